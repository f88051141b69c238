"""`resolve` as a table: what is chosen, why, and every error, whose advice is followed and must work."""

import re
from dataclasses import replace
from typing import Any

import pytest

from quire.byte_sizes import format_bytes
from quire.config import EngineConfig, EngineOptions, Hardware, ModelConfig
from quire.errors import ConfigError, MemoryCapacityError
from quire.resolve import CPU_BLOCK_SIZE, MAX_DEFAULT_CPU_KV_BYTES, resolve
from quire.types import KVCacheGroup, KVCacheSpec

GIB = 2**30
CPU = Hardware("cpu", 64 * GIB, 48 * GIB, has_fast_bfloat16=True, num_threads=8, name="a CPU")
OLD_CPU = replace(CPU, has_fast_bfloat16=False)
GPU = Hardware("cuda:0", 80 * GIB, 79 * GIB, has_fast_bfloat16=True, num_threads=8, name="a GPU")
OLD_GPU = replace(GPU, has_fast_bfloat16=False)
FULL = KVCacheGroup(tuple(range(30)), KVCacheSpec(num_kv_heads=3, head_size=64, dtype_bytes=1))
MODEL = ModelConfig(
    architecture="LlamaForCausalLM", hf_config={"intermediate_size": 1536}, vocab_size=49152, hidden_size=576,
    num_layers=30, num_heads=9, num_kv_heads=3, head_size=64, context_len=8192, num_parameters=135_000_000,
    kv_cache_groups=(FULL,),
)  # fmt: skip
BLOCK_BYTES = 30 * 2 * 3 * 64 * 2 * 32
"""bfloat16, 32 tokens."""


def resolved(hardware: Hardware = CPU, model: ModelConfig = MODEL, **options: Any) -> EngineConfig:
    return resolve(EngineOptions(**options), hardware, model)


def reason(config: EngineConfig, name: str) -> str:
    return next(decision.reason for decision in config.decisions if decision.name == name)


def follow_advice(error: str, options: dict[str, Any], hardware: Hardware, model: ModelConfig) -> list[EngineConfig]:
    """Resolve once with each `--option value` that the message names."""
    advice = re.findall(r"--([a-z-]+) ([\w.:]+)", error)
    assert advice, error
    configs = []
    for flag, text in advice:
        value: Any = int(text) if text.isdecimal() else text
        configs.append(resolved(hardware, model, **{**options, flag.replace("-", "_"): value}))
    return configs


@pytest.mark.parametrize(
    ("hardware", "options", "dtype", "kv_dtype", "block_size"),
    [
        (CPU, {}, "bfloat16", "bfloat16", 32),
        (OLD_CPU, {}, "float32", "float32", 32),
        (GPU, {}, "bfloat16", "bfloat16", 16),
        (OLD_GPU, {}, "float16", "float16", 16),
        (CPU, {"dtype": "float32"}, "float32", "float32", 32),
        (CPU, {"dtype": "half"}, "float16", "float16", 32),
        (OLD_CPU, {"dtype": "bfloat16"}, "bfloat16", "bfloat16", 32),
        (CPU, {"kv_cache_dtype": "float32"}, "bfloat16", "float32", 32),
        (GPU, {"block_size": 64}, "bfloat16", "bfloat16", 64),
    ],
)
def test_types_and_block_size(
    hardware: Hardware, options: dict[str, Any], dtype: str, kv_dtype: str, block_size: int
) -> None:
    config = resolved(hardware, **options)
    assert (config.dtype, config.kv_dtype, config.scheduler.block_size) == (dtype, kv_dtype, block_size)
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[kv_dtype]
    assert [group.spec.dtype_bytes for group in config.scheduler.kv_cache_groups] == [size]
    assert config.device == hardware.device


@pytest.mark.parametrize(
    ("context", "chosen", "expected"),
    [(8192, None, 8192), (2048, None, 2048), (131072, None, 8192), (131072, 20000, 20000), (8192, 100, 100)],
)
def test_max_model_len(context: int, chosen: int | None, expected: int) -> None:
    config = resolved(model=replace(MODEL, context_len=context), max_model_len=chosen)
    assert config.scheduler.max_model_len == expected
    assert (str(context) in reason(config, "max_model_len")) == (context > 8192 and chosen is None)


@pytest.mark.parametrize(
    ("hardware", "options", "num_blocks"),
    [
        # 48 GiB are available, sequences of 8192 tokens would need more: the cap holds.
        (CPU, {}, MAX_DEFAULT_CPU_KV_BYTES // BLOCK_BYTES),
        # All that 4 sequences of 64 tokens can use, and the null block.
        (CPU, {"max_num_seqs": 4, "max_model_len": 64}, 4 * 2 + 1),
        # Half of what the weights leave.
        (replace(CPU, available_memory_bytes=2 * GIB), {}, (2 * GIB - 270_000_000) // 2 // BLOCK_BYTES),
        (CPU, {"kv_cache_memory_bytes": 10 * BLOCK_BYTES + 1, "max_model_len": 100}, 10),
        (CPU, {"num_blocks_override": 77, "max_model_len": 100}, 77),
        (CPU, {"num_blocks_override": 77, "kv_cache_memory_bytes": GIB, "max_model_len": 100}, 77),
    ],
)
def test_number_of_blocks(hardware: Hardware, options: dict[str, Any], num_blocks: int) -> None:
    config = resolved(hardware, **options)
    assert config.scheduler.num_blocks == num_blocks
    assert format_bytes(num_blocks * BLOCK_BYTES) in reason(config, "num_blocks")


def test_gpu_blocks_fill_the_utilisation() -> None:
    block_bytes = BLOCK_BYTES // 2
    most = resolved(GPU).scheduler.num_blocks * block_bytes
    half = resolved(GPU, gpu_memory_utilization=0.45).scheduler.num_blocks * block_bytes
    assert 0.8 * 72 * GIB < most < 72 * GIB - 270_000_000
    assert abs((most - half) - 36 * GIB) < 2 * block_bytes
    # Another process holds most of it.
    crowded = resolved(replace(GPU, available_memory_bytes=10 * GIB)).scheduler.num_blocks * block_bytes
    assert crowded < 10 * GIB - 270_000_000
    # Larger steps leave less.
    assert resolved(GPU, max_num_batched_tokens=65536).scheduler.num_blocks < resolved(GPU).scheduler.num_blocks


def test_groups_share_pages_as_long_as_the_largest_group() -> None:
    spec = KVCacheSpec(num_kv_heads=2, head_size=8, dtype_bytes=1)
    window = KVCacheSpec(num_kv_heads=2, head_size=8, dtype_bytes=1, window=100)
    groups = (KVCacheGroup((0, 3), spec), KVCacheGroup((1, 2, 4), window))
    config = resolved(model=replace(MODEL, kv_cache_groups=groups), kv_cache_memory_bytes=2**22, max_num_seqs=1)
    assert config.scheduler.num_blocks == 2**22 // (3 * 2 * 2 * 8 * 2 * 32)
    assert config.scheduler.kv_cache_groups[1] == KVCacheGroup((1, 2, 4), replace(window, dtype_bytes=2))


@pytest.mark.parametrize("blocks", [2, 3, 10, 100])
def test_automatic_length_shrinks_to_the_pool(blocks: int) -> None:
    config = resolved(num_blocks_override=blocks)
    assert config.scheduler.max_model_len == (blocks - 1) * CPU_BLOCK_SIZE
    assert str(blocks) in reason(config, "max_model_len")
    assert "8192" in reason(config, "max_model_len")


def test_without_chunked_prefill_a_step_holds_a_prompt() -> None:
    config = resolved(enable_chunked_prefill=False)
    assert config.scheduler.max_num_batched_tokens == config.scheduler.max_model_len == 8192
    assert "chunked" in reason(config, "max_num_batched_tokens")
    assert resolved(enable_chunked_prefill=False, max_model_len=1000).scheduler.max_num_batched_tokens == 2048
    assert resolved().scheduler.max_num_batched_tokens == 2048


def test_scheduler_options_are_passed_on() -> None:
    chosen = {
        "max_num_seqs": 7, "max_num_batched_tokens": 99, "enable_prefix_caching": False, "max_num_partial_prefills": 3,
        "max_long_partial_prefills": 2, "long_prefill_token_threshold": 40, "sjf_ageing_tokens_per_s": 5.0,
        "max_num_waiting": 11,
    }  # fmt: skip
    config = resolved(scheduling_policy="sjf", **chosen)
    assert {name: getattr(config.scheduler, name) for name in chosen} == chosen
    assert config.scheduler.policy == "sjf"


def test_several_partial_prefills_share_the_budget() -> None:
    config = resolved(max_num_partial_prefills=4)
    assert config.scheduler.long_prefill_token_threshold == 512
    assert "budget" in reason(config, "long_prefill_token_threshold")
    assert resolved().scheduler.long_prefill_token_threshold == 0


def test_pure_and_every_choice_has_a_reason() -> None:
    assert resolved() == resolved()
    decisions = resolved().decisions
    names = {decision.name for decision in decisions}
    assert {"device", "dtype", "kv_cache_dtype", "block_size", "max_model_len", "num_blocks"} <= names
    assert all(decision.reason and decision.value for decision in decisions)


SMALL_CPU = replace(OLD_CPU, available_memory_bytes=400_000_000)


@pytest.mark.parametrize(
    ("hardware", "options", "error", "words"),
    [
        (CPU, {"max_model_len": 8193}, ConfigError, ["8193", "--max-model-len 8192"]),
        (CPU, {"max_num_seqs": 9, "max_num_batched_tokens": 8}, ConfigError, ["--max-num-seqs 8"]),
        (CPU, {"tensor_parallel_size": 2}, ConfigError, ["--tensor-parallel-size 1"]),
        (CPU, {"device": "cuda"}, ConfigError, ["--device auto"]),
        (CPU, {"max_long_partial_prefills": 2}, ConfigError, ["--max-long-partial-prefills 1"]),
        (
            CPU,
            {"enable_chunked_prefill": False, "max_num_partial_prefills": 2},
            ConfigError,
            ["--max-num-partial-prefills 1"],
        ),
        (
            CPU,
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 1000},
            ConfigError,
            ["--max-num-batched-tokens 8192", "--max-model-len 1000"],
        ),
        (SMALL_CPU, {}, MemoryCapacityError, ["515 MiB", "134 MiB", "--dtype bfloat16"]),
        (SMALL_CPU, {"dtype": "float32"}, MemoryCapacityError, ["--dtype bfloat16"]),
        (
            replace(OLD_GPU, available_memory_bytes=GIB),
            {"dtype": "float32", "max_num_seqs": 8},
            MemoryCapacityError,
            ["a step", "--dtype float16"],
        ),
        (
            CPU,
            {"max_model_len": 8000, "num_blocks_override": 11},
            MemoryCapacityError,
            ["--max-model-len 320", "--num-blocks-override 251"],
        ),
        (
            CPU,
            {"max_model_len": 8000, "kv_cache_memory_bytes": 11 * BLOCK_BYTES},
            MemoryCapacityError,
            ["--max-model-len 320", f"--kv-cache-memory-bytes {251 * BLOCK_BYTES}"],
        ),
        (
            replace(CPU, available_memory_bytes=400_000_000),
            {"max_model_len": 8000},
            MemoryCapacityError,
            ["--max-model-len"],
        ),
        (
            replace(CPU, available_memory_bytes=500_000_000),
            {"max_model_len": 8000},
            MemoryCapacityError,
            ["--max-model-len", f"--kv-cache-memory-bytes {251 * BLOCK_BYTES}"],
        ),
        (CPU, {"num_blocks_override": 1}, MemoryCapacityError, ["--num-blocks-override 2"]),
        (CPU, {"kv_cache_memory_bytes": 5}, MemoryCapacityError, [f"--kv-cache-memory-bytes {2 * BLOCK_BYTES}"]),
        (CPU, {"kv_cache_memory_bytes": 60 * GIB}, MemoryCapacityError, ["60 GiB", "--kv-cache-memory-bytes"]),
        (CPU, {"num_blocks_override": 10**6}, MemoryCapacityError, ["--num-blocks-override"]),
    ],
)
def test_errors_name_what_fits_and_it_does(
    hardware: Hardware, options: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as raised:
        resolved(hardware, **options)
    message = str(raised.value)
    for word in words:
        assert word in message
    assert "\n" not in message
    follow_advice(message, options, hardware, MODEL)


def test_a_model_too_large_in_every_type_names_the_largest_that_fits() -> None:
    with pytest.raises(MemoryCapacityError, match=r"at most 0\.05 billion parameters fits, this one has 0\.14"):
        resolved(replace(CPU, available_memory_bytes=100_000_000))


def test_no_room_for_even_one_block_says_how_much_is_missing() -> None:
    with pytest.raises(MemoryCapacityError, match="of memory are missing"):
        resolved(replace(CPU, available_memory_bytes=270_000_000 + BLOCK_BYTES))
