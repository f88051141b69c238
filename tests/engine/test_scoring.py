"""Embeddings, classification and scores of pairs: Transformers' numbers on tiny random models."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from quire.engine.llm import LLM
from quire.engine.scoring import INSTRUCTION, JUDGE_PREFIX, JUDGE_SUFFIX, Scoring
from quire.errors import ModelFileError, QuireError, RequestError, UnsupportedModelError
from tests.tiny_engine import VOCAB_SIZE, byte_tokenizer

FIELDS = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.3,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
OPTIONS = {"dtype": "float32", "device": "cpu", "num_blocks_override": 96, "max_num_seqs": 4}
QUERY, DOCUMENTS = "what is ah", ["ah is a pair of letters", "nothing", "of agi"]


def write(path: Path, kind: str, model_type: str, **fields: Any) -> tuple[Path, Any, Any]:
    """Save a random model of Transformers. Returns: it and its tokenizer, which puts <s> before each text."""
    path.mkdir(exist_ok=True)
    config = transformers.CONFIG_MAPPING[model_type](**FIELDS, **fields)
    torch.manual_seed(1)
    oracle = getattr(transformers, f"AutoModelFor{kind}").from_config(config).eval()
    oracle.save_pretrained(path)
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A </s> $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return path, oracle, tokenizer


def logits_of(oracle: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return oracle(torch.tensor([token_ids])).logits[0]


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "stablelm"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_classify_and_score_with_a_classification_head(tmp_path: Path, model_type: str, num_labels: int) -> None:
    path, oracle, tokenizer = write(tmp_path, "SequenceClassification", model_type, num_labels=num_labels)
    with LLM(str(path), **OPTIONS) as llm:
        found = [output.outputs.probs for output in llm.classify(DOCUMENTS, use_tqdm=False)]
        for text, probs in zip(DOCUMENTS, found, strict=True):
            logits = logits_of(oracle, tokenizer.encode(text).ids)
            expected = logits.sigmoid() if num_labels == 1 else logits.softmax(-1)
            assert probs == pytest.approx(expected.tolist(), abs=1e-5)
        with pytest.raises(RequestError, match="generates no text"):
            llm.generate("ah", use_tqdm=False)
        if num_labels > 1:
            with pytest.raises(RequestError, match="one label, this model has 3: use classify"):
                llm.score(QUERY, DOCUMENTS)
            return
        scores = [output.outputs.score for output in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
        pairs = [logits_of(oracle, tokenizer.encode(QUERY, text).ids).sigmoid().item() for text in DOCUMENTS]
        assert scores == pytest.approx(pairs, abs=1e-5)


def test_reranker_compares_the_logits_of_yes_and_no(tmp_path: Path) -> None:
    """The words are one token each; the query of a client that writes the template itself is taken as it is."""
    path, oracle, tokenizer = write(tmp_path / "Qwen3-Reranker-0.6B", "CausalLM", "qwen3")
    no, yes = (tokenizer.token_to_id(word) for word in ("ah", "bi"))
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["ah", "bi"],
                 "is_original_qwen3_reranker": True}  # fmt: skip
    texts = [f"{JUDGE_PREFIX}<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {text}{JUDGE_SUFFIX}"
             for text in DOCUMENTS]  # fmt: skip
    expected = []
    for text in texts:
        last = logits_of(oracle, tokenizer.encode(text, add_special_tokens=False).ids)[-1]
        expected.append(last[[no, yes]].softmax(-1)[1].item())
    with LLM(str(path), hf_overrides=overrides, **OPTIONS) as llm:
        assert [item.outputs.score for item in llm.score(QUERY, DOCUMENTS, use_tqdm=False)] == pytest.approx(
            expected, abs=1e-5
        )
        config, length = llm.llm_engine.config.model, len(tokenizer.encode(texts[0], add_special_tokens=False).ids)
        for limits, end in (({"max_prompt_len": length - 7}, 7), ({"max_document_len": 3}, None)):
            (prompt,) = Scoring(config, llm.get_tokenizer(), [(QUERY, DOCUMENTS[0])], **limits).prompts
            cut = tokenizer.encode(DOCUMENTS[0], add_special_tokens=False).ids[: -end if end else 3]
            assert tokenizer.decode(prompt).endswith(f"<Document>: {tokenizer.decode(cut)}{JUDGE_SUFFIX}")
        with pytest.raises(RequestError, match=r"the query alone makes .* more than the 50 of truncate_prompt_tokens"):
            Scoring(config, llm.get_tokenizer(), [(QUERY, DOCUMENTS[0])], max_prompt_len=50)
        (written,) = llm.score(texts[0][:300], texts[0][300:], use_tqdm=False)
        assert written.outputs.score == pytest.approx(expected[0], abs=1e-5)
        assert llm.generate("ah", use_tqdm=False)[0].outputs[0].token_ids
    with (
        LLM(str(path), **OPTIONS) as llm,  # known by its name
        pytest.raises(RequestError, match="'no' is 2 tokens"),
    ):
        llm.score(QUERY, DOCUMENTS)


@pytest.mark.parametrize(("mode", "normalizes"), [(None, True), ("lasttoken", True), ("mean_tokens", False)])
def test_embeddings_are_pooled_as_the_model_says_and_scored_by_cosine(
    tmp_path: Path, mode: str | None, normalizes: bool
) -> None:
    path, oracle, tokenizer = write(tmp_path, "CausalLM", "qwen3")
    if mode is not None:
        kinds = ["Transformer", "Pooling", "Normalize"][: 2 + normalizes]
        (path / "modules.json").write_text(json.dumps(
            [{"idx": i, "path": f"{i}_{kind}" * (i > 0), "type": f"sentence_transformers.models.{kind}"}
             for i, kind in enumerate(kinds)]
        ))  # fmt: skip
        (path / "1_Pooling").mkdir()
        pooling = {"pooling_mode_cls_token": False, f"pooling_mode_{mode}": True, "include_prompt": True}
        (path / "1_Pooling/config.json").write_text(json.dumps(pooling))

    def embed(text: str) -> torch.Tensor:
        with torch.inference_mode():
            hidden = oracle.model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
        return hidden.mean(0) if mode == "mean_tokens" else hidden[-1]

    with LLM(str(path), **OPTIONS) as llm:
        (found,) = llm.embed(QUERY, use_tqdm=False)
        vector = embed(QUERY)
        expected = vector / vector.norm() if normalizes else vector
        assert found.outputs.embedding == pytest.approx(expected.tolist(), abs=1e-4)
        scores = [output.outputs.score for output in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
        cosines = [torch.cosine_similarity(vector, embed(text), dim=0).item() for text in DOCUMENTS]
        assert scores == pytest.approx(cosines, abs=1e-5)
        config, encode = llm.llm_engine.config.model, tokenizer.encode
        short = Scoring(config, llm.get_tokenizer(), [(QUERY, DOCUMENTS[0])], max_prompt_len=4)
        assert short.prompts == [encode(QUERY).ids[:4], encode(DOCUMENTS[0]).ids[:4]]
        (same,) = llm.score([QUERY], [QUERY], use_tqdm=False)
        assert same.outputs.score == pytest.approx(1.0)
        with pytest.raises(RequestError, match="2 queries and 3 documents"):
            llm.score([QUERY] * 2, DOCUMENTS)
        with pytest.raises(RequestError, match="models with a classification head"):
            llm.classify(QUERY)


@pytest.mark.parametrize(
    ("modules", "pooling", "error"),
    [
        (["Transformer", "Pooling", "Dense"], "mean_tokens", UnsupportedModelError),
        (["Transformer", "Pooling"], "cls_token", UnsupportedModelError),
        ({}, "mean_tokens", ModelFileError),
    ],
)
def test_other_embeddings_are_refused(tmp_path: Path, modules: Any, pooling: str, error: type[QuireError]) -> None:
    path, *_ = write(tmp_path, "CausalLM", "qwen3")
    named = [{"path": f"{i}_{kind}", "type": f"models.{kind}"} for i, kind in enumerate(modules)]
    (path / "modules.json").write_text(json.dumps(named if isinstance(modules, list) else modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling/config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    with pytest.raises(error, match=r"modules\.json"):
        LLM(str(path), **OPTIONS)


def test_classification_head_that_is_missing_is_named(tmp_path: Path) -> None:
    path, *_ = write(tmp_path, "CausalLM", "llama")
    with pytest.raises(ModelFileError, match=r"2 labels: score\.weight \[2, 64\]; the file lacks it"):
        LLM(str(path), hf_overrides={"architectures": ["LlamaForSequenceClassification"]}, **OPTIONS)
