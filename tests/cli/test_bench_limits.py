"""The roofline, against figures worked out by hand for SmolLM2-135M in bf16."""

import dataclasses

import pytest

from quire.cache_spec import PagedKV
from quire.cli.bench_cases import BenchCase
from quire.cli.bench_limits import arithmetics, tokens_per_s_limit, work_of
from quire.config import EngineConfig, EngineOptions, Hardware, ModelConfig
from quire.resolve import resolve
from quire.runtime.machine_limits import MachineLimits

PARAMETERS = 134_515_008
HEAD = 49_152 * 576
IN_LAYERS = PARAMETERS - HEAD


@pytest.fixture
def smollm2() -> EngineConfig:
    model = ModelConfig(
        architecture="LlamaForCausalLM", hf_config={"tie_word_embeddings": True}, vocab_size=49_152, hidden_size=576,
        num_layers=30, num_heads=9, num_kv_heads=3, head_size=64, context_len=8192, num_parameters=PARAMETERS,
        cache_specs=(PagedKV(3, 64, 1),) * 30,
    )  # fmt: skip
    hardware = Hardware("cpu", 2**34, 2**34, has_fast_bfloat16=True, num_threads=2)
    return resolve(EngineOptions(), hardware, model)


def test_decode_step_reads_weights_once_and_the_kv_of_every_stream(smollm2: EngineConfig) -> None:
    work = work_of(BenchCase(480, 64, 32), smollm2)
    assert work.num_tokens == 32
    assert work.num_bytes == 2 * PARAMETERS + 32 * 512 * 23_040
    assert work.num_flops == {"bf16": 32 * (2 * PARAMETERS + 4 * 30 * 576 * 512)}


def test_prompt_computes_the_head_once(smollm2: EngineConfig) -> None:
    work = work_of(BenchCase(512, 0), smollm2)
    assert work.num_tokens == 512
    assert work.num_bytes == 2 * PARAMETERS
    assert work.num_flops == {"bf16": 2 * IN_LAYERS * 512 + 2 * HEAD + 2 * 30 * 576 * 512**2}


def test_untied_embedding_is_not_read(smollm2: EngineConfig) -> None:
    model = dataclasses.replace(smollm2.model, hf_config={}, num_parameters=PARAMETERS + HEAD)
    untied = dataclasses.replace(smollm2, model=model)
    assert work_of(BenchCase(1, 8), untied) == work_of(BenchCase(1, 8), smollm2)


def test_slower_of_memory_and_arithmetic_binds(smollm2: EngineConfig) -> None:
    one, prompt = BenchCase(1, 2), BenchCase(512, 0)
    limits = MachineLimits(read_bytes_per_s=27e9, flops_per_s={"bf16": 1e12})
    assert tokens_per_s_limit(one, smollm2, limits) == pytest.approx(100, rel=0.01)
    assert tokens_per_s_limit(prompt, smollm2, limits) == pytest.approx(
        512 / (work_of(prompt, smollm2).num_flops["bf16"] / 1e12)
    )


def test_quantised_weights_and_keys_count_in_the_arithmetic_they_run_in(smollm2: EngineConfig) -> None:
    quantised = resolve(EngineOptions(quantization="int8", kv_cache_dtype="float16"), smollm2.hardware, smollm2.model)
    assert arithmetics(quantised) == ("int8", "fp32")
    work = work_of(BenchCase(480, 64, 32), quantised)
    assert work.num_flops == {"int8": 32 * 2 * PARAMETERS, "fp32": 32 * 4 * 30 * 576 * 512}
    limits = MachineLimits(read_bytes_per_s=1e15, flops_per_s={"int8": 4e12, "fp32": 1e12})
    seconds = 32 * 2 * PARAMETERS / 4e12 + 32 * 4 * 30 * 576 * 512 / 1e12
    assert tokens_per_s_limit(BenchCase(480, 64, 32), quantised, limits) == pytest.approx(32 / seconds)
    op_by_op = resolve(EngineOptions(enforce_eager=True, dtype="float16"), smollm2.hardware, smollm2.model)
    assert arithmetics(op_by_op) == ("fp16", "fp16")
