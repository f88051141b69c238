"""`resolve` as a table: choices with reasons, and every error. The tests follow the advice of each error."""

import re
from dataclasses import replace
from typing import Any

import pytest

from quire.byte_sizes import format_bytes
from quire.cache_spec import CacheGroup, PagedKV, RecurrentState
from quire.config import EngineConfig, EngineOptions, Hardware, ModelConfig
from quire.errors import ConfigError, MemoryCapacityError
from quire.memory_plan import (
    MAX_DEFAULT_CPU_KV_BYTES,
    PROMPT_LOGPROB_ROWS,
    bytes_beside,
    engine_bytes,
)
from quire.resolve import DEFAULT_BLOCK_SIZE, resolve

GIB = 2**30
CPU = Hardware("cpu", 64 * GIB, 48 * GIB, has_fast_bfloat16=True, num_threads=8, name="a CPU")
OLD_CPU = replace(CPU, has_fast_bfloat16=False)
GPU = Hardware("cuda:0", 80 * GIB, 79 * GIB, has_fast_bfloat16=True, num_threads=8, name="a GPU")
OLD_GPU = replace(GPU, has_fast_bfloat16=False)
FULL = (PagedKV(num_kv_heads=3, head_size=64, dtype_bytes=1),) * 30
MODEL = ModelConfig(
    architecture="LlamaForCausalLM", hf_config={"intermediate_size": 1536}, vocab_size=49152, hidden_size=576,
    num_layers=30, num_heads=9, num_kv_heads=3, head_size=64, context_len=8192, num_parameters=135_000_000,
    cache_specs=FULL,
)  # fmt: skip
BLOCK_BYTES = 30 * 2 * 3 * 64 * 2 * 32
"""bfloat16, 32 tokens."""


def cpu(left_bytes: int, base: Hardware = CPU) -> Hardware:
    """A machine with so much memory for weights and KV cache; tests that use it leave the size of a step alone."""
    beside = bytes_beside(EngineOptions(), MODEL, "cpu", "float32", EngineOptions().max_num_batched_tokens)
    return replace(base, available_memory_bytes=left_bytes + beside)


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
        (OLD_CPU, {}, "bfloat16", "bfloat16", 32),
        (CPU, {"enforce_eager": True}, "bfloat16", "bfloat16", 32),
        (OLD_CPU, {"enforce_eager": True}, "float32", "float32", 32),
        (OLD_CPU, {"block_size": 24}, "float32", "float32", 24),
        (GPU, {}, "bfloat16", "bfloat16", 32),
        (OLD_GPU, {}, "float16", "float16", 32),
        (CPU, {"dtype": "float32"}, "float32", "float32", 32),
        (CPU, {"dtype": "half"}, "float16", "float16", 32),
        (OLD_CPU, {"dtype": "bfloat16"}, "bfloat16", "bfloat16", 32),
        (CPU, {"kv_cache_dtype": "float32"}, "bfloat16", "float32", 32),
        (CPU, {"kv_cache_dtype": "int8"}, "bfloat16", "int8", 32),
        (CPU, {"kv_cache_dtype": "int8", "dtype": "float32"}, "float32", "int8", 32),
        (CPU, {"kv_cache_dtype": "fp8"}, "bfloat16", "fp8_e4m3", 32),
        (CPU, {"kv_cache_dtype": "fp8_e5m2"}, "bfloat16", "fp8_e5m2", 32),
        (OLD_CPU, {"quantization": "int4", "dtype": "half"}, "float16", "float16", 32),
        (GPU, {"block_size": 64}, "bfloat16", "bfloat16", 64),
    ],
)
def test_types_and_block_size(
    hardware: Hardware, options: dict[str, Any], dtype: str, kv_dtype: str, block_size: int
) -> None:
    config = resolved(hardware, **options)
    assert (config.dtype, config.kv_dtype, config.scheduler.block_size) == (dtype, kv_dtype, block_size)
    size, scale = {"float32": (4, 0), "bfloat16": (2, 0), "float16": (2, 0), "int8": (1, 4)}.get(kv_dtype, (1, 0))
    specs = [group.spec for group in config.scheduler.kv_cache_groups]
    assert [(spec.dtype_bytes, spec.scale_bytes) for spec in specs] == [(size, scale)]
    assert config.device == hardware.device


@pytest.mark.parametrize(
    ("hardware", "options", "is_plan", "keeps_stored", "words"),
    [
        (CPU, {}, True, True, "one native call per step"),
        (OLD_CPU, {}, True, True, "one native call per step"),
        (CPU, {"dtype": "bfloat16"}, True, True, "native"),
        # The reference computes with the values in the file, dequantised.
        (CPU, {"dtype": "fp32"}, True, False, "native"),
        (CPU, {"enforce_eager": True}, False, False, "enforce_eager"),
        (CPU, {"block_size": 8}, False, False, "multiple of 16"),
        (CPU, {"block_size": 48}, True, True, "native"),
        (GPU, {"enforce_eager": True}, False, False, "a GPU computes"),
    ],
)
def test_execution(hardware: Hardware, options: dict[str, Any], is_plan: bool, keeps_stored: bool, words: str) -> None:
    config = resolved(hardware, **options)
    assert (config.uses_plan, config.keeps_stored_weights, config.gpu_kernels) == (is_plan, keeps_stored, "off")
    (decision,) = (decision for decision in config.decisions if decision.name == "execution")
    assert decision.value == ("plan" if is_plan else "eager")
    assert words in decision.reason


@pytest.mark.parametrize(
    ("hardware", "options", "kernels"),
    [
        (replace(GPU, has_triton=True), {}, "triton"),
        (GPU, {}, "off"),
        (replace(OLD_GPU, has_triton=True), {}, "off"),
        (replace(GPU, has_triton=True), {"gpu_kernels": "reference"}, "reference"),
        (CPU, {"gpu_kernels": "reference"}, "reference"),
        (replace(GPU, num_devices=2), {"tensor_parallel_size": 2}, "off"),
        (CPU, {}, "off"),
    ],
)
def test_kernels_of_a_device_plan(hardware: Hardware, options: dict[str, Any], kernels: str) -> None:
    config = resolved(hardware, **options)
    assert config.gpu_kernels == kernels
    (decision,) = (decision for decision in config.decisions if decision.name == "execution")
    assert (decision.value == "device plan") == (kernels != "off")


@pytest.mark.parametrize(
    "option",
    [{"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}],
)
@pytest.mark.parametrize(
    ("hardware", "options", "words"),
    [
        (CPU, {"enforce_eager": True}, "enforce_eager was chosen"),
        (CPU, {"block_size": 8}, "a multiple of 16 tokens"),
        (GPU, {}, "a GPU computes"),
    ],
)
def test_what_needs_a_plan_says_why_there_is_none(
    option: dict[str, str], hardware: Hardware, options: dict[str, Any], words: str
) -> None:
    ((name, value),) = option.items()
    with pytest.raises(ConfigError, match=f"{name}='{value}' needs a native plan.*{words}.*leave {name} unset"):
        resolved(hardware, **options, **option)


@pytest.mark.parametrize(
    ("options", "stored_bytes", "weight_bytes"),
    [
        ({}, None, 270_000_000),
        # Kept as it is stored, unless that is more.
        ({}, 80_000_000, 80_000_000),
        ({}, 540_000_000, 270_000_000),
        ({"dtype": "float32"}, 80_000_000, 540_000_000),
        ({"enforce_eager": True}, 80_000_000, 270_000_000),
        # 8.5 and 5 bits per weight; stored in 16 bit.
        ({"quantization": "int8"}, 270_000_000, 143_437_500),
        ({"quantization": "int4"}, 270_000_000, 84_375_000),
        # What is quantised already stays so.
        ({"quantization": "int4"}, 143_437_500, 143_437_500),
    ],
)
def test_size_of_the_weights(options: dict[str, Any], stored_bytes: int | None, weight_bytes: int) -> None:
    config = resolved(model=replace(MODEL, stored_bytes=stored_bytes), **options)
    assert config.weight_bytes == weight_bytes
    # Half of the rest is taken for the KV cache.
    block_bytes = BLOCK_BYTES * (2 if config.dtype == "float32" else 1)
    small = cpu(weight_bytes + 6 * block_bytes)
    assert resolved(small, config.model, **options).scheduler.num_blocks == 3


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
        # 256 sequences of 256 tokens, and the null block.
        (CPU, {}, 256 * 8 + 1),
        # 4 sequences of 8192 tokens are more than 64 of 256.
        (CPU, {"max_num_seqs": 64}, 4 * 256 + 1),
        # Room for 4 sequences of 64 tokens, or for one of 8192.
        (CPU, {"max_num_seqs": 4, "max_model_len": 64}, 4 * 2 + 1),
        (CPU, {"max_num_seqs": 1}, 256 + 1),
        (CPU, {"max_num_seqs": 64, "max_model_len": 2112}, 64 * 66 + 1),
        (CPU, {"max_model_len": 2112}, 256 * 8 + 1),
        # The most that is taken unasked.
        (CPU, {"max_num_seqs": 2000}, MAX_DEFAULT_CPU_KV_BYTES // BLOCK_BYTES),
        # Half of the memory left after the weights.
        (cpu(2 * GIB), {}, (2 * GIB - 270_000_000) // 2 // BLOCK_BYTES),
        (CPU, {"kv_cache_memory_bytes": 10 * BLOCK_BYTES + 1, "max_model_len": 100}, 10),
        (CPU, {"num_blocks_override": 77, "max_model_len": 100}, 77),
        (CPU, {"num_blocks_override": 77, "kv_cache_memory_bytes": GIB, "max_model_len": 100}, 77),
    ],
)
def test_number_of_blocks(hardware: Hardware, options: dict[str, Any], num_blocks: int) -> None:
    config = resolved(hardware, **options)
    assert config.scheduler.num_blocks == num_blocks
    assert format_bytes(num_blocks * BLOCK_BYTES) in reason(config, "num_blocks")


def test_default_kv_memory_says_which_requests_it_holds_and_how_to_get_more() -> None:
    said = reason(resolved(), "num_blocks")
    assert said == "1.41 GiB of KV cache: room for 256 sequences of 256 tokens; --kv-cache-memory-bytes for more"


def test_gpu_blocks_fill_the_utilisation() -> None:
    block_bytes = BLOCK_BYTES
    most = resolved(GPU).scheduler.num_blocks * block_bytes
    half = resolved(GPU, gpu_memory_utilization=0.45).scheduler.num_blocks * block_bytes
    assert 0.8 * 72 * GIB < most < 72 * GIB - 270_000_000
    assert abs((most - half) - 36 * GIB) < 2 * block_bytes
    # Another process holds most of it.
    crowded = resolved(replace(GPU, available_memory_bytes=10 * GIB)).scheduler.num_blocks * block_bytes
    assert crowded < 10 * GIB - 270_000_000
    # Larger steps leave less.
    assert resolved(GPU, max_num_batched_tokens=65536).scheduler.num_blocks < resolved(GPU).scheduler.num_blocks


def test_layers_become_groups_in_the_kv_format() -> None:
    full, window = (PagedKV(num_kv_heads=2, head_size=8, dtype_bytes=1, window=size) for size in (None, 100))
    model = replace(MODEL, cache_specs=(full, window, window, full, window))
    config = resolved(model=model, kv_cache_memory_bytes=2**22, max_num_seqs=1)
    # Two layers fill a page: a third would stay empty in the blocks of the full layers.
    assert config.scheduler.num_blocks == 2**22 // (2 * 2 * 2 * 8 * 2 * 32)
    assert config.scheduler.kv_cache_groups[0] == CacheGroup((0, 3), full.stored_as(2, 0))
    assert {group.spec for group in config.scheduler.kv_cache_groups[1:]} == {window.stored_as(2, 0)}


def test_each_rank_has_its_share_of_heads_weights_and_memory() -> None:
    options = {"max_num_seqs": 4, "max_model_len": 512, "dtype": "bfloat16"}
    whole, shared = (resolved(tensor_parallel_size=size, **options) for size in (1, 3))
    assert [group.spec.num_kv_heads for group in shared.scheduler.kv_cache_groups] == [1]
    assert shared.scheduler.num_blocks == whole.scheduler.num_blocks
    assert (whole.threads_per_rank, shared.threads_per_rank) == (8, 2)
    assert reason(shared, "tensor_parallel_size") == "chosen; each rank is a process with 2 of 8 threads"
    assert not any(decision.name == "tensor_parallel_size" for decision in whole.decisions)
    crowded = resolved(tensor_parallel_size=9, **options)
    assert crowded.threads_per_rank == 1
    assert "take turns on 8 cores" in reason(crowded, "tensor_parallel_size")
    with pytest.raises(MemoryCapacityError, match=r"85\.8 MiB in bfloat16 .* available on cpu for each of 3 ranks"):
        resolved(replace(CPU, available_memory_bytes=2 * GIB), tensor_parallel_size=3, max_num_batched_tokens=65536)


def test_each_rank_has_a_gpu() -> None:
    gpus = replace(GPU, num_devices=3)
    whole, shared = (resolved(gpus, tensor_parallel_size=size) for size in (1, 3))
    assert shared.scheduler.num_blocks > 3 * whole.scheduler.num_blocks  # a third of the heads in as much memory
    assert reason(shared, "tensor_parallel_size") == "chosen; each rank is a process with a GPU of its own"
    assert [shared.on_rank(rank).device for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert resolved().on_rank(1).device == "cpu"
    usable = int(0.9 * GPU.total_memory_bytes)
    for config in (whole, shared):  # a server of several models counts what its engine needs of one GPU
        assert usable - config.scheduler.num_blocks * BLOCK_BYTES < engine_bytes(config) <= usable


def test_device_plan_decodes_one_token_a_step() -> None:
    config = resolved(CPU, gpu_kernels="reference")
    assert config.scheduler.multi_step_decode == 1
    assert "before the tokens of this one are known" in reason(config, "multi_step_decode")
    assert resolved(CPU).scheduler.multi_step_decode > 1


def test_stages_compute_short_steps_of_one_iteration() -> None:
    config = resolved(pipeline_parallel_size=2, tensor_parallel_size=3)
    assert config.threads_per_rank == 1
    settings = config.scheduler
    assert (settings.pipeline_stages, settings.multi_step_decode, settings.max_num_batched_tokens) == (2, 1, 256)
    assert "the first stage" in reason(config, "multi_step_decode")
    assert resolved(pipeline_parallel_size=2, max_num_seqs=300).scheduler.max_num_batched_tokens == 300
    assert resolved(pipeline_parallel_size=2, max_num_batched_tokens=512).scheduler.max_num_batched_tokens == 512


def test_stages_of_ray_have_a_machine_each() -> None:
    here, there = (resolved(pipeline_parallel_size=2, distributed_executor_backend=kind) for kind in ("mp", "ray"))
    assert (here.threads_per_rank, there.threads_per_rank) == (4, 8)
    assert "Ray actor with 8 threads" in reason(there, "pipeline_parallel_size")
    shared = resolved(pipeline_parallel_size=2, tensor_parallel_size=3, distributed_executor_backend="ray")
    assert shared.threads_per_rank == 2


def test_copies_of_parameters_count_as_memory() -> None:
    """Six ranks hold each of three KV heads twice; the last stage holds the embedding as its head."""
    options = {"max_num_seqs": 4, "max_model_len": 512, "dtype": "bfloat16", "max_num_batched_tokens": 512}
    messages = []
    for sizes in ({"tensor_parallel_size": 3}, {"tensor_parallel_size": 6}, {"pipeline_parallel_size": 2}):
        with pytest.raises(MemoryCapacityError) as raised:
            resolved(replace(CPU, available_memory_bytes=2**20), **sizes, **options)
        messages.append(re.search(r"weights need ([\d.]+) MiB", str(raised.value))[1])  # type: ignore[index]
    heads, table = 2 * 30 * 3 * 64 * 576, 49152 * 576
    expected = [135_000_000 / 3, (135_000_000 + heads) / 6, 135_000_000 + table]
    assert [float(message) for message in messages] == pytest.approx([2 * count / 2**20 for count in expected], abs=0.5)


def test_models_with_states_get_larger_blocks() -> None:
    model = replace(MODEL, cache_specs=(*FULL[:8], *[RecurrentState(2**20)] * 24))
    config = resolved(model=model)
    assert config.scheduler.block_size % DEFAULT_BLOCK_SIZE == 0
    assert config.scheduler.block_size > DEFAULT_BLOCK_SIZE
    assert "recurrent state" in reason(config, "block_size")
    assert resolved(model=model, block_size=64).scheduler.block_size == 64


@pytest.mark.parametrize("blocks", [2, 3, 10, 100])
def test_automatic_length_shrinks_to_the_pool(blocks: int) -> None:
    config = resolved(num_blocks_override=blocks)
    assert config.scheduler.max_model_len == (blocks - 1) * DEFAULT_BLOCK_SIZE
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


def test_a_gpu_does_not_promise_the_same_bits_in_any_batch() -> None:
    with pytest.raises(ConfigError, match=r"batch_invariant is for CPUs.*leave it out"):
        resolved(GPU, batch_invariant=True)


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


RAY = {"distributed_executor_backend": "ray", "pipeline_parallel_size": 2}
SMALL_CPU = cpu(base=OLD_CPU, left_bytes=400_000_000)
TINY_CPU = cpu(base=OLD_CPU, left_bytes=200_000_000)
TINIER_CPU = cpu(base=OLD_CPU, left_bytes=100_000_000)


@pytest.mark.parametrize(
    ("hardware", "options", "error", "words"),
    [
        (CPU, {"max_model_len": 8193}, ConfigError, ["8193", "--max-model-len 8192"]),
        (CPU, {"max_num_seqs": 9, "max_num_batched_tokens": 8}, ConfigError, ["--max-num-seqs 8"]),
        (CPU, {"pipeline_parallel_size": 2, "block_size": 8}, ConfigError, ["of 16 tokens", "--pipeline-parallel-s"]),
        (GPU, {"pipeline_parallel_size": 2}, ConfigError, ["a GPU computes", "--pipeline-parallel-size 1"]),
        (replace(GPU, num_devices=2), {"tensor_parallel_size": 3}, ConfigError, ["2 GPUs", "--tensor-parallel-size 2"]),
        (GPU, {"tensor_parallel_size": 2}, ConfigError, ["1 GPU from cuda:0 on", "--tensor-parallel-size 1"]),
        (
            replace(CPU, available_memory_bytes=2 * GIB),
            {"data_parallel_size": 3, "kv_cache_memory_bytes": GIB},
            MemoryCapacityError,
            ["--kv-cache-memory-bytes"],
        ),
        (CPU, {"tensor_parallel_size": 65}, ConfigError, ["the limit of 64 ranks", "--tensor-parallel-size 9"]),
        (CPU, {"pipeline_parallel_size": 31}, ConfigError, ["the model's 30 layers", "--pipeline-parallel-size 30"]),
        (CPU, {"tensor_parallel_size": 3, "pipeline_parallel_size": 22}, ConfigError, ["--pipeline-parallel-size 21"]),
        (CPU, {"distributed_executor_backend": "ray"}, ConfigError, ["--pipeline-parallel-size 2"]),
        (CPU, {**RAY, "pipeline_parallel_size": 1, "tensor_parallel_size": 2}, ConfigError, ["--distributed-executo"]),
        (CPU, {"pipeline_parallel_size": 2, "enforce_eager": True}, ConfigError, ["--pipeline-parallel-size 1"]),
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
            {"enable_chunked_prefill": False, "long_prefill_token_threshold": 8},
            ConfigError,
            ["--long-prefill-token-threshold 0"],
        ),
        (
            CPU,
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 1000},
            ConfigError,
            ["--max-num-batched-tokens 8192", "--max-model-len 1000"],
        ),
        (SMALL_CPU, {"enforce_eager": True}, MemoryCapacityError, ["515 MiB", "134 MiB", "--dtype bfloat16"]),
        (TINY_CPU, {}, MemoryCapacityError, ["257 MiB in bfloat16", "--quantization int8 fits (137 MiB)"]),
        (TINIER_CPU, {}, MemoryCapacityError, ["--quantization int4 fits (80.5 MiB)"]),
        (TINIER_CPU, {"dtype": "half"}, MemoryCapacityError, ["257 MiB in float16", "--quantization int4"]),
        (TINIER_CPU, {"dtype": "bfloat16", "max_model_len": 40}, MemoryCapacityError, ["--quantization int4"]),
        (CPU, {"quantization": "int8", "dtype": "float32"}, ConfigError, ["--dtype bfloat16"]),
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
            cpu(400_000_000),
            {"max_model_len": 8000},
            MemoryCapacityError,
            ["--max-model-len"],
        ),
        (
            cpu(500_000_000),
            {"max_model_len": 8000},
            MemoryCapacityError,
            ["--max-model-len", f"--kv-cache-memory-bytes {251 * BLOCK_BYTES}"],
        ),
        (CPU, {"num_blocks_override": 1}, MemoryCapacityError, ["--num-blocks-override 2"]),
        (CPU, {"kv_cache_memory_bytes": 5}, MemoryCapacityError, [f"--kv-cache-memory-bytes {2 * BLOCK_BYTES}"]),
        (CPU, {"kv_cache_memory_bytes": 60 * GIB}, MemoryCapacityError, ["60 GiB", "--kv-cache-memory-bytes"]),
        (CPU, {"num_blocks_override": 10**6}, MemoryCapacityError, ["--num-blocks-override"]),
        (CPU, {"kv_disk": "d", "kv_disk_bytes": 5}, ConfigError, [f"--kv-disk-bytes {16 * BLOCK_BYTES}"]),
        (CPU, {"kv_disk": "d", "load_format": "dummy"}, ConfigError, ["--load-format auto"]),
        (CPU, {"preemption_mode": "recompute", "swap_space": 1}, ConfigError, ["--preemption-mode swap"]),
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


def test_model_too_large_in_every_type_names_the_largest_that_fits() -> None:
    small = cpu(50_000_000)
    with pytest.raises(MemoryCapacityError, match=r"at most 0\.08 billion parameters fits in int4, this one has 0\.14"):
        resolved(small)
    with pytest.raises(MemoryCapacityError, match=r"80.5 MiB in int4 .*at most 0\.08 billion parameters fits in int4"):
        resolved(small, quantization="int4")
    with pytest.raises(MemoryCapacityError, match=r"at most 0\.03 billion parameters fits in 16 bit"):
        resolved(small, enforce_eager=True)
    with pytest.raises(
        MemoryCapacityError, match=r"the weights need 76.3 MiB in all and a step .* together; that is 28.6 MiB more"
    ):
        resolved(small, replace(MODEL, stored_bytes=80_000_000))


EXPERTS = replace(MODEL, stored_bytes=250_000_000, expert_share=0.9, chosen_share=0.125)
"""250 MB of weights, of which a token reads 53 MB."""


def test_experts_stay_on_disk_where_all_weights_are_larger_than_memory() -> None:
    config = resolved(cpu(260_000_000), EXPERTS)
    assert config.weights_on_disk
    assert "238 MiB do not fit" in reason(config, "weights")
    assert engine_bytes(config) <= config.hardware.available_memory_bytes
    in_memory = resolved(CPU, EXPERTS)
    saved = engine_bytes(in_memory) - engine_bytes(replace(in_memory, weights_on_disk=True))
    assert saved == pytest.approx(250_000_000 * 0.9 * 0.875, abs=2)


@pytest.mark.parametrize("options", [{}, {"kv_cache_memory_bytes": 150_000_000}, {"num_blocks_override": 100}])
def test_experts_stay_in_memory_where_weights_and_kv_cache_fit(options: dict[str, Any]) -> None:
    fits = cpu(700_000_000)
    assert not resolved(fits, EXPERTS, **options).weights_on_disk
    assert resolved(fits, EXPERTS, kv_cache_memory_bytes=460_000_000).weights_on_disk


@pytest.mark.parametrize(
    ("hardware", "model"),
    [
        (cpu(240_000_000), replace(EXPERTS, expert_share=0.0)),  # each token reads all
        (cpu(50_000_000), EXPERTS),  # less than a token reads
        (replace(cpu(240_000_000), memory_limit="RLIMIT_AS, ulimit -v"), EXPERTS),
        (replace(GPU, total_memory_bytes=350_000_000, available_memory_bytes=350_000_000), EXPERTS),
    ],
)
def test_weights_larger_than_memory_are_refused_where_no_file_helps(hardware: Hardware, model: ModelConfig) -> None:
    with pytest.raises(MemoryCapacityError, match="the weights need"):
        resolved(hardware, model)


def test_weights_larger_than_memory_without_a_file_name_the_option() -> None:
    small, options = cpu(240_000_000), {"weight_cache": "off"}
    with pytest.raises(MemoryCapacityError, match="--weight-cache auto fits") as raised:
        resolved(small, EXPERTS, **options)
    (config,) = follow_advice(str(raised.value), options, small, EXPERTS)
    assert config.weights_on_disk


def test_no_room_for_even_one_block_says_how_much_is_missing() -> None:
    with pytest.raises(MemoryCapacityError, match="of memory are missing"):
        resolved(cpu(270_000_000 + BLOCK_BYTES))


def test_who_wants_interactivity_gets_short_steps_on_cpus() -> None:
    config = resolved(performance_mode="interactivity")
    assert config.scheduler.prefill_tokens_per_decode == 2
    (decision,) = [item for item in config.decisions if item.name == "prefill_tokens_per_decode"]
    assert "performance_mode=interactivity" in decision.reason
    for others in (
        resolved(), resolved(GPU, performance_mode="interactivity"),
        resolved(performance_mode="interactivity", enable_chunked_prefill=False),
    ):  # fmt: skip
        assert others.scheduler.prefill_tokens_per_decode is None


def test_limit_of_the_memory_is_named() -> None:
    limited = replace(CPU, available_memory_bytes=GIB, memory_limit="cgroup")
    with pytest.raises(MemoryCapacityError, match=r"MiB, but .* are left on cpu \(cgroup\) after weights and step"):
        resolved(limited, kv_cache_memory_bytes=GIB)
    with pytest.raises(MemoryCapacityError, match=r"more than the 50 MiB available on cpu \(cgroup\): "):
        resolved(replace(limited, available_memory_bytes=50 * 2**20))


def test_step_on_a_cpu_has_room_for_a_slice_of_a_prompts_logits() -> None:
    many, few = (bytes_beside(EngineOptions(max_num_seqs=n), MODEL, "cpu", "float32", 16) for n in (256, 1))
    assert many == few > PROMPT_LOGPROB_ROWS * MODEL.vocab_size * 4


AMX = replace(CPU, has_tiles=True)


@pytest.mark.parametrize(
    ("hardware", "options", "is_invariant", "why"),
    [
        (CPU, {}, True, "one arithmetic"),
        (GPU, {}, False, "a GPU's products"),
        (CPU, {"batch_invariant": True}, True, "chosen"),
        (AMX, {}, False, "--batch-invariant"),
        (AMX, {"batch_invariant": True}, True, "chosen"),
        (AMX, {"dtype": "float32"}, True, "one arithmetic"),
        (AMX, {"enforce_eager": True}, True, "one arithmetic"),
    ],
)
def test_amx_tiles_are_used_unless_batch_invariance_was_chosen(
    hardware: Hardware, options: dict[str, Any], is_invariant: bool, why: str
) -> None:
    config = resolved(hardware, **options)
    assert config.batch_invariant == is_invariant
    assert (config.tile_rows == 0) == is_invariant
    assert why in reason(config, "batch_invariant")


@pytest.mark.parametrize(
    ("hardware", "options", "num_host_blocks", "words"),
    [
        (CPU, {}, 2049, "as much as the KV cache"),
        (CPU, {"swap_space": 0.5}, GIB // 2 // BLOCK_BYTES, "chosen"),
        (CPU, {"swap_space": 0}, 0, "chosen"),
        (CPU, {"preemption_mode": "recompute"}, 0, "chosen"),
        (CPU, {"enable_prefix_caching": False}, 0, "by their prefix"),
        (GPU, {}, 4 * GIB // BLOCK_BYTES, "at most 4 GiB"),
    ],
)
def test_host_memory_for_preempted_requests(
    hardware: Hardware, options: dict[str, Any], num_host_blocks: int, words: str
) -> None:
    config = resolved(hardware, **options)
    assert config.scheduler.num_host_blocks == num_host_blocks
    assert words in reason(config, "preemption_mode")
    assert config.scheduler.compares_swap == ("preemption_mode" not in options)


def test_disk_tier_has_a_limit() -> None:
    assert resolved().scheduler.max_disk_bytes == 0
    assert resolved(kv_disk="d").scheduler.max_disk_bytes == 8 * GIB
    config = resolved(kv_disk="d", kv_disk_bytes=10**9)
    assert config.scheduler.max_disk_bytes == 10**9
    assert reason(config, "kv_disk_bytes") == "at most 954 MiB in d: chosen"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_disk_bytes": 10**9}, "has no directory: add --kv-disk DIR"),
        (
            {"kv_disk": "d", "pipeline_parallel_size": 2, "distributed_executor_backend": "ray"},
            "is of one machine: --distributed-executor-backend mp fits",
        ),
        ({"kv_disk": "d", "enable_prefix_caching": False}, "leave enable_prefix_caching on"),
        ({"preemption_mode": "swap", "enable_prefix_caching": False}, "leave enable_prefix_caching on"),
        ({"swap_space": float("nan")}, "is not a number of at least 0"),
        ({"kv_disk": "d", "kv_disk_bytes": 0}, "is not an integer of at least 1"),
    ],
)
def test_tiers_without_what_they_need_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(**options)


def test_swap_space_must_fit() -> None:
    with pytest.raises(MemoryCapacityError, match=r"--swap-space [\d.]+ fits") as raised:
        resolved(swap_space=60)
    fitting = re.findall(r"--swap-space ([\d.]+)", str(raised.value))[0]
    assert resolved(swap_space=float(fitting)).scheduler.num_host_blocks > 0


def test_adapters_get_their_memory_before_the_kv_cache() -> None:
    limit = 1 << 20
    plain, own = resolved(), resolved(enable_lora=True, lora_bytes=limit)
    assert engine_bytes(own) - engine_bytes(plain) == limit
    with pytest.raises(MemoryCapacityError, match="--lora-bytes"):
        resolved(enable_lora=True, lora_bytes=1 << 50)
