"""Architectures without a file in Quire: Transformers' own module on Quire's KV cache gives Transformers' logits."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import masking_utils

from quire.config import EngineOptions, Hardware
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError, ModelFileError, UnsupportedModelError
from quire.insight.explain.explanation import explain
from quire.insight.explain.subject import Settings
from quire.models import registry
from quire.models.hf_fallback import FallbackConfig, TransformersForCausalLM, describe_mask
from quire.models.registry import ModelRegistry, model_types
from quire.resolve import resolve
from quire.runtime.fallback import load_fallback
from quire.runtime.forward import EagerForward
from quire.sampling_params import SamplingParams
from quire.weights.checkpoint import open_checkpoint
from quire.weights.sources import resolve_source
from tests.engine.builders import finals, run
from tests.models.harness import Runner, random_tokens
from tests.models.oracle import Pair
from tests.models.test_conformance import assert_close
from tests.models.tiny_configs import BASE, LLAMA
from tests.runtime.plan.harness import make_checkpoint
from tests.tiny_engine import VOCAB_SIZE, build, engine_with, prompt, write_tiny

HEADS = {**BASE, "num_attention_heads": 4}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
SLIDING = ["sliding_attention", "full_attention"]
GEMMA4 = {
    **LLAMA, "num_hidden_layers": 4, "head_dim": 12, "global_head_dim": 24, "sliding_window": 7,
    "layer_types": SLIDING * 2, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 53,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "stablelm": {**LLAMA, "use_qkv_bias": True, "qk_layernorm": True, "partial_rotary_factor": 0.5},
    "cohere2": {**LLAMA, "head_dim": 12, "sliding_window": 7, "layer_types": SLIDING, "logit_scale": 0.3},
    "nemotron": {**LLAMA, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "persimmon": {**HEADS, "partial_rotary_factor": 0.5},
    "vaultgemma": {**LLAMA, "head_dim": 12, "sliding_window": 7, "layer_types": SLIDING, "query_pre_attn_scalar": 9},
    "granite_swa": {**LLAMA, "sliding_window": 7, "layer_types": SLIDING},
    "minicpm3": {**HEADS, **MLA, "num_key_value_heads": 4, "scale_emb": 3.0, "dim_model_base": 24},
    "ernie4_5_moe": {
        **LLAMA,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_layer_start_index": 1,
    },
    "gemma4_text": GEMMA4,
    "gemma4": {"text_config": {**GEMMA4, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}},
    "llama": {**LLAMA, "attention_bias": True},
}


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no attention to replace": ("bloom", {"vocab_size": 53, "hidden_size": 48, "n_layer": 2, "n_head": 4}, "attention"),
    "ALiBi": ("mpt", {"vocab_size": 53, "d_model": 48, "n_layers": 2, "n_heads": 4}, "attention cannot be replaced"),
    "state": ("falcon_h1", {**LLAMA, "mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_head": 12}, "recurrent state"),
    "a head that is not apart": ("llama4_text", {**LLAMA, "head_dim": 12, "num_local_experts": 2}, "head is not apart"),
    "two calls a layer": ("diffllama", LLAMA, "4 calls of attention in 2 layers"),
    "encoder": ("bert", {**HEADS, "architectures": ["BertLMHeadModel"]}, "is_causal=False"),
    "frequencies by length": (
        "stablelm", {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"
    ),
    "a config that Transformers refuses": ("nemotron", {**LLAMA, "hidden_act": "none"}, "KeyError.*none"),
}  # fmt: skip


REQUEST_IDS = itertools.count()
"""Engines share an executor, which knows requests by their ids."""


class FallbackPair(Pair):
    """Transformers' model by itself, and on Quire's attention and KV cache."""

    def fallback(self, **options: Any) -> Runner:
        chosen = EngineOptions(dtype="float32", model_impl="transformers", num_blocks_override=64)
        model = ModelRegistry.make_model_config(self.hf_config, model_impl="transformers")
        config = resolve(chosen, Hardware("cpu", 2**33, 2**33, has_fast_bfloat16=False, num_threads=1), model)
        assert not config.uses_plan
        return Runner(load_fallback(config, self.checkpoint.tensors), num_blocks=300, **options)


@pytest.fixture(scope="module")
def pairs() -> dict[str, FallbackPair]:
    return {}


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest, pairs: dict[str, FallbackPair]) -> FallbackPair:
    if request.param not in pairs:
        pairs[request.param] = FallbackPair(request.param, FAMILIES[request.param])
    return pairs[request.param]


def test_most_of_the_families_here_have_no_file() -> None:
    assert len(FAMILIES.keys() - set(model_types())) >= 4


def test_logits_whole_in_chunks_ragged_and_behind_a_shared_prefix(pair: FallbackPair) -> None:
    prompts = [random_tokens(length, 53, seed) for seed, length in enumerate((21, 9, 14, 60, 2))]
    expected = [pair.expected(token_ids) for token_ids in prompts]
    runner = pair.fallback(scatter=1)
    assert_close(runner.run(runner.add(prompts[3])), expected[3])
    streams = [runner.add(token_ids) for token_ids in prompts]
    before = runner.step([(streams[0], 20), (streams[1], 8), (streams[3], 47)])
    mixed = runner.step([(streams[1], 1), (streams[2], 14), (streams[0], 1), (streams[4], 1), (streams[3], 13)])
    found = [[before[0], mixed[2]], [before[1], mixed[0]], [mixed[1]], [before[2], mixed[4]], [mixed[3]]]
    for parts, wanted in zip(found, expected, strict=True):
        assert_close(torch.cat(parts), wanted[: sum(map(len, parts))])
    shared = runner.add(prompts[3][:48] + prompts[0], shares=streams[3], num_shared_blocks=12)
    assert_close(runner.run(shared, 5), pair.expected(shared.token_ids)[48:])


def test_llama_by_transformers_equals_quires_own(pairs: dict[str, FallbackPair]) -> None:
    pair = pairs.setdefault("llama", FallbackPair("llama", FAMILIES["llama"]))
    token_ids = random_tokens(40, 53)
    own, fallback = pair.eager(), pair.fallback()
    assert_close(fallback.run(fallback.add(token_ids), 7), own.run(own.add(token_ids), 7))


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused_with_the_reason(name: str) -> None:
    model_type, fields, words = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=f"{model_type}.*{words}"):
        FallbackConfig.from_hf({"model_type": model_type, **fields})


@pytest.mark.parametrize(
    ("mask", "window", "problem"),
    [
        (masking_utils.causal_mask_function, None, None),
        (masking_utils.sliding_window_causal_mask_function(1), 1, None),
        (masking_utils.sliding_window_causal_mask_function(60), 60, None),
        (masking_utils.sliding_window_causal_mask_function(500), None, None),
        (masking_utils.bidirectional_mask_function, None, "neither causal nor a sliding window"),
        (masking_utils.chunked_causal_mask_function(8, torch.zeros(1)), None, "neither causal nor a sliding window"),
        (masking_utils.chunked_causal_mask_function(8, torch.zeros(1, device="meta")), None, "cannot be read"),
    ],
)
def test_windows_are_read_off_the_mask(mask: Any, window: int | None, problem: str | None) -> None:
    found = describe_mask(mask_function=mask, config=transformers.LlamaConfig(max_position_embeddings=128))
    assert found.window == window
    assert (problem or "") in (found.problem or "")
    assert (problem is None) == (found.problem is None)


def test_positions_that_a_module_counts_itself_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of a loaded module: the same tokens in several steps must give the same hidden states."""
    forward = TransformersForCausalLM.forward

    def counts_itself(self: Any, token_ids: torch.Tensor, batch: Any) -> torch.Tensor:
        batch.positions = torch.arange(len(token_ids))
        return forward(self, token_ids, batch)

    pair = FallbackPair("stablelm", FAMILIES["stablelm"])
    monkeypatch.setattr(TransformersForCausalLM, "forward", counts_itself)
    with pytest.raises(UnsupportedModelError, match=r"hidden states differ by .* in several steps"):
        pair.fallback()


def test_checkpoint_that_lacks_a_tensor_is_refused() -> None:
    pair = FallbackPair("stablelm", FAMILIES["stablelm"])
    tensors = {name: values for name, values in pair.oracle.state_dict().items() if name != "model.norm.weight"}
    pair.checkpoint = make_checkpoint(pair.hf_config, tensors)
    with pytest.raises(ModelFileError, match=r"StableLmForCausalLM: missing are model\.norm\.weight"):
        pair.fallback()


# --- In the engine ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = {**LLAMA, "vocab_size": VOCAB_SIZE, "initializer_range": 0.3, "max_position_embeddings": 512}
    config = transformers.Cohere2Config(
        **fields, head_dim=12, sliding_window=7, layer_types=SLIDING, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    return write_tiny(tmp_path_factory.mktemp("cohere2"), config)


def generate(engine: LLMEngine, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Return the tokens of each prompt, and the number of preemptions."""
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    ids = [str(next(REQUEST_IDS)) for _ in prompts]
    for request_id, token_ids in zip(ids, prompts, strict=True):
        engine.add_request(request_id, token_ids, params)
    outputs = finals(run(engine))
    num_preemptions = sum(output.metrics.num_preemptions for output in outputs.values() if output.metrics)
    return [list(outputs[request_id].outputs[0].token_ids) for request_id in ids], num_preemptions


def test_engine_gives_transformers_tokens_batched_cached_and_preempted(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build(directory, block_size=8)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "Cohere2ForCausalLM" in record.getMessage()
    assert "tok/s" in record.getMessage()
    assert isinstance(engine._executor._worker.forward, EagerForward)
    assert engine.config.model.implementation == "transformers"
    prompts = [prompt(number, length) for number, length in ((1, 40), (2, 9), (3, 1))] + [prompt(1, 32) + prompt(4, 9)]
    oracle = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = [
            oracle.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=24, min_new_tokens=24,
                do_sample=False,
            )[0, len(ids) :].tolist()
            for ids in prompts
        ]  # fmt: skip
    for settings in ({}, {"num_blocks": 20}, {"max_num_batched_tokens": 16}):
        tokens, num_preemptions = generate(engine_with(engine, **settings), prompts)
        assert tokens == expected
        assert sum(record.levelname in ("WARNING", "ERROR") for record in caplog.records) == 1  # no step failed
        assert (num_preemptions > 0) == ("num_blocks" in settings)


@pytest.mark.parametrize(
    ("model_type", "architecture", "is_known"),
    [
        ("stablelm", "StableLmForCausalLM", True), ("internlm3", "InternLM3ForCausalLM", True),
        ("gemma3n", "Gemma3nForConditionalGeneration", True), ("llama", "NoSuchForCausalLM", False),
        ("stablelm", "StableLmForTokenClassification", False), ("no such", "StableLmForCausalLM", False),
    ],
)  # fmt: skip
def test_only_the_class_of_the_model_type_is_run(model_type: str, architecture: str, is_known: bool) -> None:
    config = {"model_type": model_type, "architectures": [architecture]}
    if is_known:
        assert ModelRegistry.resolve(config) is TransformersForCausalLM
    else:
        with pytest.raises(UnsupportedModelError, match=f"architecture {architecture} is not supported"):
            ModelRegistry.resolve(config)


def test_options_that_need_a_plan_or_quires_own_model_are_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs a native plan.*Transformers' own module"):
        build(directory, kv_cache_dtype="int8")
    with pytest.raises(UnsupportedModelError, match="Cohere2ForCausalLM has no implementation in Quire"):
        build(directory, model_impl="quire")


def test_explain_refuses_work_that_it_does_not_know(directory: Path) -> None:
    checkpoint = open_checkpoint(resolve_source(str(directory)))
    with pytest.raises(UnsupportedModelError, match=r"Cohere2ForCausalLM is computed by Transformers' own module"):
        explain(checkpoint, Settings(ctx=64))


def test_without_transformers_the_error_tells_what_to_install(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModelError, match=r"Cohere2ForCausalLM is not supp.*pip install .*'transformers<"):
        build(directory)
    with pytest.raises(UnsupportedModelError, match=r"needs Transformers: pip install .*'transformers<"):
        build(directory, model_impl="transformers")
