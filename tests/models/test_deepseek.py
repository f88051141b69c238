"""DeepSeek in the whole engine: tokens of Transformers, the bytes of its cache, and quantised weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.cache_spec import LatentKV
from quire.config import EngineOptions, Hardware
from quire.engine.llm_engine import LLMEngine
from quire.events import EventKind
from quire.models.registry import ModelRegistry
from quire.resolve import resolve
from quire.runtime.cache_engine import CacheEngine
from quire.sampling_params import SamplingParams
from tests.engine.builders import finals, run
from tests.insight.explain.test_explanation import explain
from tests.models.harness import random_tokens
from tests.models.oracle import Pair
from tests.models.test_published_configs import PUBLISHED
from tests.models.tiny_configs import DEEPSEEK, DEEPSEEK_YARN
from tests.runtime.plan.harness import PlanRunner, make_checkpoint, make_config
from tests.tiny_engine import VOCAB_SIZE, build, byte_tokenizer

WIDE = {
    **DEEPSEEK, "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 32, "rope_scaling": DEEPSEEK_YARN,
}  # fmt: skip
"""Blocks of 32 columns, which can be quantised."""
LENGTHS = (70, 33, 5, 50)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair("deepseek_v2", WIDE)


@pytest.fixture(scope="module")
def directory(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek")
    pair.oracle.save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[list[int]]:
    """Transformers' greedy tokens."""
    found = []
    for length in LENGTHS:
        prompt = torch.tensor([random_tokens(length, VOCAB_SIZE)])
        tokens = pair.oracle.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=None)
        found.append(tokens[0, length:].tolist())
    return found


def generated(engine: LLMEngine, num_tokens: int) -> list[list[list[int]]]:
    """Per prompt the greedy tokens of two sequences, which are forked after the prompt."""
    params = SamplingParams(top_k=1, max_tokens=num_tokens, ignore_eos=True, n=2)
    for index, length in enumerate(LENGTHS):
        engine.add_request(str(index), {"prompt_token_ids": random_tokens(length, VOCAB_SIZE)}, params)
    found = finals(run(engine))
    return [[completion.token_ids for completion in found[str(index)].outputs] for index in range(len(LENGTHS))]


@pytest.mark.parametrize(
    "options",
    [
        {"num_threads": 2},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 24, "max_num_seqs": 8},
        {"num_blocks_override": 14, "max_model_len": 128},
    ],
    ids=["whole", "op by op", "in chunks", "preempted"],
)
def test_tokens_are_those_of_transformers(expected: list[list[int]], directory: Path, options: dict[str, Any]) -> None:
    engine = build(directory, **options)
    found = generated(engine, 30)
    assert bool(engine.events.of(EventKind.PREEMPT)) == ("num_blocks_override" in options)
    assert found == [[tokens, tokens] for tokens in expected]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("name", ["DeepSeek-V2-Lite", "DeepSeek-R1"])
def test_cache_bytes_per_token_are_those_of_the_formula(name: str, kv_dtype: str) -> None:
    """(R + C) values per layer, and in int8 one scale."""
    model = ModelRegistry.make_model_config(PUBLISHED[name][1])
    options = EngineOptions(model=name, dtype="bfloat16", kv_cache_dtype=kv_dtype, max_model_len=4096)
    config = resolve(options, Hardware("cpu", 2**42, 2**42, has_fast_bfloat16=False, num_threads=1), model)
    per_layer = {"bfloat16": 576 * 2, "float32": 576 * 4, "int8": 576 + 4}[kv_dtype]
    (group,) = config.scheduler.kv_cache_groups
    assert group.spec == LatentKV(512, 64, *{"bfloat16": (2, 0), "float32": (4, 0), "int8": (1, 4)}[kv_dtype])
    assert group.page_bytes(16) == 16 * model.num_layers * per_layer


def test_pool_and_explanation_have_the_bytes_of_the_formula(pair: Pair, directory: Path) -> None:
    config = make_config(pair.hf_config)
    cache = CacheEngine(config)
    assert cache.pool[0].numel() * cache.pool.element_size() == 16 * 2 * (32 + 8) * 4
    report = explain(str(directory), batches=(1,), ctx=64, dtype="float32").report
    assert report.quantity("KV cache", "per token").value == 2 * (32 + 8) * 4


@pytest.mark.parametrize("weights", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_quantised_projection_gives_nearly_the_logits_of_the_same_values(pair: Pair, weights: str) -> None:
    """This holds for most tokens: rounding may choose other experts for some."""
    checkpoint = make_checkpoint(pair.hf_config, pair.oracle.state_dict(), {"": "BF16", "kv_b_proj": weights})
    exact = {name: tensor.to_torch(torch.float32) for name, tensor in checkpoint.tensors.items()}
    tokens = random_tokens(80, VOCAB_SIZE)
    config = make_config(pair.hf_config, dtype="float32")
    expected = PlanRunner(config, make_checkpoint(pair.hf_config, exact))
    wanted = expected.run(expected.add(tokens)).double()
    for kv_dtype in ("float32", "int8"):
        runner = PlanRunner(make_config(pair.hf_config, dtype="bfloat16", kv_cache_dtype=kv_dtype), checkpoint)
        for chunk in (None, 5):
            errors = (runner.run(runner.add(tokens), chunk).double() - wanted).square().mean(-1).sqrt()
            assert float(np.median(errors.numpy())) < 0.1 * float(wanted.square().mean().sqrt())
