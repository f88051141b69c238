"""Directories and GGUF files that name a wrong end, or none: generation stops where the tokenizer says so."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.cli.tiny_directory import make_tiny_directory
from tests.weights.gguf_builder import VOCAB_SIZE, TinyModel

OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 2, "num_blocks_override": 16}
GGUF_TOKENS = ["<unk>", "<s>", "</s>", "!", "▁", "a", "<|im_end|>"]


def reasons(model: Path, *token_ids: int) -> list[str | None]:
    """Return the reason why a text ends that can have one token only, for each of these tokens."""
    llm = LLM(str(model), **OPTIONS)
    try:
        choices = [SamplingParams(max_tokens=3, temperature=0, allowed_token_ids=[item]) for item in token_ids]
        return [output.outputs[0].finish_reason for output in llm.generate(["a"] * len(choices), choices)]
    finally:
        llm.llm_engine.shutdown()


@pytest.mark.parametrize("generation", [None, {"eos_token_id": 257}])
@pytest.mark.parametrize("eos", [None, "<|im_end|>"])
def test_directory_with_a_wrong_end(tmp_path: Path, eos: str | None, generation: dict[str, int] | None) -> None:
    model = make_tiny_directory(tmp_path / "model", eos_token_id=0, vocab_size=258)
    tokenizer = json.loads((model / "tokenizer.json").read_text().replace("<s>", "<|im_end|>"))
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "tokenizer_config.json").write_text(json.dumps({} if eos is None else {"eos_token": eos}))
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps(generation))
    assert reasons(model, 0, 256, 257) == ["length", "stop", "stop"]


@pytest.mark.parametrize("end", [None, 3, 2**32 - 1, 999])
def test_gguf_with_a_wrong_end(tmp_path: Path, end: int | None) -> None:
    tokens = GGUF_TOKENS + [f"t{index}" for index in range(VOCAB_SIZE - len(GGUF_TOKENS))]
    types = [2, 3, 3, 1, 1, 1, 3, *[1] * (VOCAB_SIZE - len(GGUF_TOKENS))]
    tokenizer = {
        "model": "llama", "tokens": tokens, "token_type": types, "scores": [0.0] * VOCAB_SIZE, "eos_token_id": end,
    }  # fmt: skip
    changes = {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    TinyModel(changes=changes).write(tmp_path / "model.gguf")
    assert reasons(tmp_path / "model.gguf", 3, 6, 2) == ["length", "stop", "stop"]
