"""Ranks in one process: each loads its share of the weights alone; together they give the whole model's logits."""

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.errors import ConfigError
from quire.layers.group import SINGLE, Group, LocalGroup
from quire.models.registry import model_types
from quire.runtime.eager import load_model
from quire.runtime.loader import make_model, make_share, partitions_of
from quire.runtime.plan.load import load_plan, plan_weights
from quire.weight_map import Transpose, weight_map
from quire.weights.checkpoint import Checkpoint
from quire.weights.model_files import map_file
from quire.weights.quantized import RoundedTensor
from quire.weights.weight_tensor import BLOCK_FORMATS, WeightTensor
from tests.models.harness import DTYPES, Runner, random_tokens, stored
from tests.models.tiny_configs import LLAMA, TINY_CONFIGS, full_config
from tests.runtime.plan.harness import (
    SCALE_OFFSETS,
    decoded,
    k_quants,
    make_checkpoint,
    make_config,
    packed,
)

TOLERANCE = 1e-5
"""Largest difference between the ranks' logits and the whole model's, relative to the largest logit."""
TOKENS = random_tokens(11, 53)
SIZES = (2, 4)
CASES = [
    (model_type, name, size)
    for model_type in model_types()
    for index, name in enumerate(TINY_CONFIGS.get(model_type, {}))
    for size in (SIZES if index == 0 or "odd" in name else (4,))
]
FORMATS = (*DTYPES, "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *SCALE_OFFSETS)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks have a thread each; tiny models compute no faster on several."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class ThreadGroup:
    """A rank in a thread of its own. `slots` and `barrier` are those of all ranks."""

    def __init__(self, rank: int, slots: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._slots, self._barrier = rank, len(slots), slots, barrier

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), -1)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._slots[self.rank] = x
        self._barrier.wait(60)
        values = list(self._slots)
        self._barrier.wait(60)
        return values


def on_ranks(size: int, run: Callable[[Group], Any]) -> list[Any]:
    """Run a function once per rank, each in a thread, at the same time."""
    slots, barrier = [torch.empty(0)] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: run(ThreadGroup(rank, slots, barrier)), range(size)))


def random_checkpoint(hf_config: dict[str, Any], make: Callable[..., WeightTensor] = stored) -> Checkpoint:
    """Make all tensors that a model stores with `make(name, values)`."""
    with torch.device("meta"):
        model: Any = make_model(hf_config)
    partitions, generator = partitions_of(model), torch.Generator().manual_seed(11)
    checkpoint = make_checkpoint(hf_config, {})
    needed, parameters = weight_map(model, ()).sources, dict(model.named_parameters())
    for target, sources in needed.items():
        parameter = parameters[target]
        sizes = [part.whole for part in partitions[target].rows] if len(sources) > 1 else [len(parameter)]
        num_first = len(sizes) - len(sources) + 1  # a stored tensor may have several parts: queries and their gates
        for source, num_rows in zip(sources, [sum(sizes[:num_first]), *sizes[num_first:]], strict=True):
            shape = (num_rows, *parameter.shape[1:])
            scale = 1.5 * shape[-1] ** -0.5 if len(shape) > 1 else 0.3
            values = torch.empty(shape).normal_(float(len(shape) == 1), scale, generator=generator)
            is_transposed = values.ndim == 2 and Transpose() in source.views
            checkpoint.tensors[source.name] = make(source.name, values.T if is_transposed else values)  # type: ignore[index]
    return checkpoint


def fits(hf_config: dict[str, Any], size: int) -> bool:
    """Return whether heads, those of state spaces too, and MLP columns divide; vocabularies always do."""
    config = make_model(hf_config).config
    kv_heads = config.num_kv_heads
    state_heads = hf_config.get("mamba_n_heads", size)
    divides = all(count % size == 0 for count in (config.num_heads, config.intermediate_size, state_heads))
    return divides and (kv_heads % size == 0 or size % kv_heads == 0)


@pytest.mark.parametrize(("model_type", "name", "size"), CASES)
def test_ranks_compute_the_logits_of_the_whole_model(model_type: str, name: str, size: int) -> None:
    hf_config = full_config(model_type, TINY_CONFIGS[model_type][name])
    config, checkpoint = make_config(hf_config), random_checkpoint(hf_config)

    def logits(group: Group) -> torch.Tensor:
        runner = Runner(load_model(config, checkpoint, group=group), num_ranks=group.size)
        stream = runner.add(TOKENS)
        return torch.cat([*runner.step([(stream, 8)]), runner.run(stream, 1)])

    if not fits(hf_config, size):
        with pytest.raises(ConfigError, match=f"tensor_parallel_size={size} .*nearest that fits"):
            logits(LocalGroup(0, size))
        return
    expected = logits(SINGLE)
    for found in on_ranks(size, logits):
        assert found.shape == expected.shape
        assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model_type", model_types())
def test_random_weights_of_a_rank_are_its_slice_of_the_whole(model_type: str, size: int) -> None:
    hf_config = full_config(model_type, next(iter(TINY_CONFIGS[model_type].values())))
    config, empty = make_config(hf_config, load_format="dummy"), make_checkpoint(hf_config, {})
    whole = dict(load_model(config, empty).named_parameters())
    for rank in range(size):
        model = load_model(config, empty, group=LocalGroup(rank, size))
        partitions = partitions_of(model)
        assert partitions
        for name, parameter in model.named_parameters():
            expected = whole[name]
            if name in partitions:
                ranges = partitions[name].row_ranges(len(expected))
                columns = partitions[name].column_slice if expected.ndim == 2 else ...
                expected = torch.cat([expected[rows.start : rows.stop] for rows in ranges])
                expected = expected[:, columns] if expected.ndim == 2 else expected
            assert torch.equal(parameter[: len(expected)], expected)
            assert not parameter[len(expected) :].any()


# --- Every format of weights, against slices made here -------------------------------------------


def wide_config(block: int, num_heads: int = 8) -> dict[str, Any]:
    """Return a Llama of one layer whose row-parallel columns four ranks can share in such blocks."""
    return full_config(
        "llama",
        {**LLAMA, "hidden_size": block, "num_attention_heads": num_heads, "head_dim": block // 2,
         "intermediate_size": 4 * block, "num_hidden_layers": 1, "attention_bias": True},
    )  # fmt: skip


def wide_checkpoint(stored_format: str) -> Checkpoint:
    """Weights of which all matrices have this format; queries and keys have their rows in another order."""

    def make(name: str, values: torch.Tensor) -> WeightTensor:
        if stored_format in SCALE_OFFSETS and values.ndim == 2:
            tensor = k_quants(name, *values.shape, stored_format)
        else:
            tensor = stored(name, values, stored_format)
        order = np.random.default_rng(len(values)).permutation(len(values))
        is_rotary = "q_proj" in name or "k_proj" in name
        return WeightTensor(name, tensor.shape, tensor.format, tensor.stored, order if is_rotary else None)

    return random_checkpoint(wide_config(max(32, BLOCK_FORMATS[stored_format].block_len)), make)


def expected_slices(whole: dict[str, torch.Tensor], head_size: int, rank: int, size: int) -> dict[str, torch.Tensor]:
    """Return the slices that a rank of the wide model holds, cut from the whole tensors by their stored names."""

    def rows(name: str, unit: int = 1) -> torch.Tensor:
        units = whole[name].split(unit)
        mine = [rank * len(units) // size] if len(units) < size else np.array_split(range(len(units)), size)[rank]
        return torch.cat([units[index] for index in mine])

    def columns(name: str) -> torch.Tensor:
        return whole[name].chunk(size, 1)[rank]

    attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
    qkv = [f"{attention}{part}_proj" for part in "qkv"]
    return {
        "embed_tokens.weight": whole["embed_tokens.weight"].split(-(-53 // size))[rank],
        "lm_head.weight": whole["lm_head.weight"].split(-(-53 // size))[rank],
        "layers.0.self_attn.qkv_proj.weight": torch.cat([rows(f"{name}.weight", head_size) for name in qkv]),
        "layers.0.self_attn.qkv_proj.bias": torch.cat([rows(f"{name}.bias", head_size) for name in qkv]),
        "layers.0.self_attn.o_proj.weight": columns(f"{attention}o_proj.weight"),
        "layers.0.self_attn.o_proj.bias": whole[f"{attention}o_proj.bias"],
        "layers.0.mlp.gate_up_proj.weight": torch.cat([rows(f"{mlp}{part}_proj.weight") for part in ("gate", "up")]),
        "layers.0.mlp.down_proj.weight": columns(f"{mlp}down_proj.weight"),
        "layers.0.input_layernorm.weight": whole["layers.0.input_layernorm.weight"],
        "layers.0.post_attention_layernorm.weight": whole["layers.0.post_attention_layernorm.weight"],
        "norm.weight": whole["norm.weight"],
    }


RANKS = [(0, 2), (1, 2), (0, 4), (2, 4), (3, 4)]


@pytest.mark.parametrize("stored_format", FORMATS)
def test_weights_of_a_rank_are_its_slices_of_the_stored_ones(stored_format: str) -> None:
    checkpoint = wide_checkpoint(stored_format)
    config = make_config(checkpoint.hf_config)
    whole = {name: tensor.to_torch(torch.float32) for name, tensor in checkpoint.tensors.items()}
    for rank, size in RANKS:
        expected = expected_slices(whole, config.model.head_size, rank, size)
        model = load_model(config, checkpoint, group=LocalGroup(rank, size))
        assert dict(model.named_parameters()).keys() == expected.keys()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter[: len(expected[name])], expected[name]), name


@pytest.mark.parametrize(
    ("stored_format", "quantization"), [*((name, None) for name in FORMATS), ("F32", "int4"), ("BF16", "fp8")]
)
def test_packed_weights_of_a_rank_are_its_slices_of_the_packed_ones(
    stored_format: str, quantization: str | None
) -> None:
    """4- and 8-bit weights stay so, with the blocks that the whole matrix has."""
    checkpoint = wide_checkpoint(stored_format)
    config = make_config(checkpoint.hf_config, dtype="bfloat16", quantization=quantization)
    whole: dict[str, torch.Tensor] = {}
    for rank, size in RANKS:
        with torch.device("meta"):
            share = make_share(config, checkpoint, LocalGroup(rank, size))
        weights, model = plan_weights(config, share), share.model
        weights.fill(weights.placements)
        of_layers, of_tables = model.layers[0].mlp.down_proj.weight, model.embed_tokens.weight
        for name, tensor in checkpoint.tensors.items() if not whole else ():
            chosen = weights.packing_of(of_tables if "embed" in name or "head" in name else of_layers).name
            is_matrix, is_table = len(tensor.shape) == 2, "embed" in name or "head" in name
            if quantization == "fp8" and is_matrix and not is_table:
                tensor = stored(name, torch.from_numpy(RoundedTensor.of(tensor).to_numpy()))
            whole[name] = packed(chosen, tensor)[0] if is_matrix else tensor.to_torch(torch.float32)
        expected = expected_slices(whole, config.model.head_size, rank, size)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                assert torch.equal(decoded(weights, parameter)[: len(expected[name])], expected[name]), name


def test_only_the_share_of_a_mapped_matrix_is_read(tmp_path: Path) -> None:
    """Pages of the mapping that are in memory after a rank has taken its rows or columns."""
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    mapped = np.frombuffer(map_file(path), np.uint8)
    tensor = WeightTensor("w", (1024, 16384), "F32", mapped.reshape(1024, -1))
    tensor.part(slice(256, 512), slice(None)).to_torch(torch.float32).sum()
    assert resident_bytes(path) <= 17 << 20
    tensor.part(slice(0, 16), slice(4096, 8192)).to_torch(torch.float32).sum()
    assert resident_bytes(path) <= 19 << 20


def resident_bytes(path: Path) -> int:
    mappings = Path("/proc/self/smaps").read_text().split(str(path))[1:]
    return sum(int(re.search(r"Rss: +(\d+) kB", mapping)[1]) << 10 for mapping in mappings)  # type: ignore[index]


# --- Sizes that do not fit ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "size", "message"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}, 2,
         "tensor_parallel_size=2 does not divide 3 KV heads; the nearest that fits: --tensor-parallel-size 1"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 96}, 2 * 2,
         "tensor_parallel_size=4 does not divide 6 attention heads; "
         "the nearest that fits: --tensor-parallel-size 3 or 6"),
        ({"num_attention_heads": 4, "num_key_value_heads": 2}, 8,
         "tensor_parallel_size=8 does not divide 4 attention heads; the nearest that fits: --tensor-parallel-size 4$"),
        ({"intermediate_size": 42}, 4, "does not divide 42 MLP columns; .* 2$"),
        ({"num_attention_heads": 12, "num_key_value_heads": 2}, 3,
         "exceeds 2 KV heads and is not a multiple of them; .* 2 or 4$"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide_name_the_nearest_that_do(fields: dict[str, Any], size: int, message: str) -> None:
    hf_config = full_config("llama", {**LLAMA, **fields})
    config, empty = make_config(hf_config, load_format="dummy"), make_checkpoint(hf_config, {})
    for load in (load_model, lambda *args, **kwargs: load_plan(*args, (0, 0), **kwargs)):
        with pytest.raises(ConfigError, match=message):
            load(config, empty, group=LocalGroup(0, size))


@pytest.mark.parametrize(
    ("stored_format", "quantization", "size", "message"),
    [
        ("Q6_K", None, 8, r"each rank 128 of the 1024 columns of \S+o_proj.weight, .* blocks of 256; .* 4$"),
        ("Q4_K", None, 8, r"blocks of 256; .* 4$"),
        ("BF16", "int8", 8, r"each rank 16 of the 128 columns of \S+o_proj.weight, .* blocks of 32; .* 4$"),
    ],
)
def test_blocks_are_not_split_between_ranks(
    stored_format: str, quantization: str | None, size: int, message: str
) -> None:
    checkpoint = wide_checkpoint(stored_format)
    config = make_config(checkpoint.hf_config, dtype="bfloat16", quantization=quantization)
    with pytest.raises(ConfigError, match=message):
        load_plan(config, checkpoint, (0,), group=LocalGroup(0, size))


# --- One rank -------------------------------------------------------------------------------------


def test_one_rank_plans_no_collectives() -> None:
    hf_config = wide_config(32)
    config = make_config(hf_config, load_format="dummy")
    program, _ = load_plan(config, make_checkpoint(hf_config, {}), (0,))
    assert [type(instruction).__name__ for instruction in program.body] == [
        "Embed", "Rotary", "Norm", "Gemm", "WriteKv", "Attend", "Gemm", "Norm", "Gemm", "Gemm", "Norm",
    ]  # fmt: skip
    values = torch.ones(2, 3)
    assert SINGLE.all_reduce(values) is values
    assert SINGLE.all_gather(values) is values
