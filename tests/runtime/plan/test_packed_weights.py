"""Formats of the weights, and that packed values are the stored ones within the bounds of the table there."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quire._native import CodeLayout, WeightFormat
from quire.errors import UnsupportedModelError
from quire.kernels.instruction import Packing
from quire.runtime.plan.packed_weights import PackedWeights, Placement, choose_formats, kept_bytes, stacked
from quire.weight_map import Offset
from quire.weights.model_files import map_file
from quire.weights.quantized import Quantized, QuantizedTensor, RoundedTensor, StoredCodes
from quire.weights.weight_tensor import WeightTensor, join_mxfp4
from tests.kernels.native.packed_weights import finite_rows
from tests.runtime.plan.harness import decoded, k_quants, packed, stored

DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
EXACT = {"Q4_0": "q4", "Q4_1": "q4m", "Q5_0": "q5", "Q5_1": "q5m", "Q8_0": "q8", "Q4_K": "q4k", "Q5_K": "q5k",
         "Q6_K": "q6k", "IQ4_NL": "iq4nl", "IQ4_XS": "iq4xs", "MXFP4": "mxfp4", "NVFP4": "nvfp4"}  # fmt: skip
OTHERS = ("Q2_K", "Q3_K")


def chosen(
    *formats: str, num_inputs: int = 64, dtype: str = "bfloat16", quantization: str | None = None,
    keeps_stored: bool = True, is_table: bool = False,
) -> str:  # fmt: skip
    config: Any = SimpleNamespace(
        dtype=dtype, options=SimpleNamespace(quantization=quantization), keeps_stored_weights=keeps_stored,
        model=SimpleNamespace(vocab_size=19),
    )  # fmt: skip
    found = choose_formats(config, formats, 19 if is_table else 32, num_inputs)
    assert len(found) == len(formats)
    return "+".join(dict.fromkeys(part_format.name for part_format in found))


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


# --- Choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "name"), DTYPES.items())
@pytest.mark.parametrize("stored_format", ["F32", "F16", "BF16"])
def test_floats_become_the_compute_type(dtype: str, name: str, stored_format: str) -> None:
    assert chosen(stored_format, dtype=dtype) == chosen("F32", stored_format, dtype=dtype) == name


@pytest.mark.parametrize(("stored_format", "name"), [*EXACT.items(), *((other, "q8") for other in OTHERS)])
def test_quantised_weights_keep_their_format(stored_format: str, name: str) -> None:
    assert chosen(stored_format) == chosen(stored_format, stored_format, is_table=True) == name
    # Chosen for weights that are not quantised.
    assert chosen(stored_format, quantization="int4") == name
    # The reference wants the values that files have.
    assert chosen(stored_format, keeps_stored=False, dtype="float32") == "f32"
    # No whole blocks of 32 inputs, as GGUF itself never has it.
    assert chosen(stored_format, num_inputs=48) == "bf16"


@pytest.mark.parametrize(
    ("parts", "names"),
    [(("Q4_0", "Q4_1"), "q4+q4m"), (("Q4_1", "Q4_K"), "q4m+q4k"), (("Q4_0", "Q4_0", "Q8_0"), "q4+q8"),
     (("F32", "Q4_0"), "q8+q4"), (("MXFP4", "IQ4_XS"), "mxfp4+iq4xs"), (("Q5_0", "Q4_0"), "q5+q4"),
     (("Q3_K", "Q5_1"), "q8+q5m")],
)  # fmt: skip
def test_parts_of_different_formats_keep_theirs(parts: tuple[str, ...], names: str) -> None:
    assert chosen(*parts) == names
    assert chosen(*parts, keeps_stored=False) == "bf16"


@pytest.mark.parametrize("stored_format", ["F32", "F16", "BF16"])
def test_floats_rounded_to_e4m3_have_the_bytes_of_the_rounded_values(stored_format: str) -> None:
    values = random(37, 96) * torch.logspace(-9, 2, 37)[:, None]
    values[3], values[5, 7], values[6, ::3] = 0, -700, 2.0**-9
    whole = RoundedTensor.of(stored("w", values, stored_format))
    order = np.random.default_rng(1).permutation(37)
    reordered = RoundedTensor.of(whole.source.with_rows(order))
    moved = RoundedTensor.of(whole.source.viewed([Offset(0.5)]))
    for tensor in (whole, whole.part(slice(5, 31), slice(32, 96)), reordered, moved):
        expected = WeightTensor("w", tensor.shape, "F32", np.ascontiguousarray(tensor.to_numpy()).view(np.uint8))
        found = [packed_bytes_of("q8", each) for each in (tensor, expected)]
        assert np.array_equal(*found)


def test_neighbours_in_one_format_are_one_part() -> None:
    q4k, q6k = WeightFormat.q4k, WeightFormat.q6k
    assert stacked([q4k, q4k, q6k], [0, 64, 96, 128]) == Packing(((96, q4k), (32, q6k)))
    assert stacked([q6k, q4k, q6k], [0, 64, 96, 105]) == Packing(((64, q6k), (32, q4k), (9, q6k)))
    assert stacked([q4k, q4k], [0, 17, 35]) == Packing(((35, q4k),))


def test_parts_that_do_not_begin_with_a_block_of_rows_become_8_bit() -> None:
    assert stacked([WeightFormat.q4k, WeightFormat.q6k], [0, 48, 64]) == Packing(((64, WeightFormat.q8),))


@pytest.mark.parametrize(
    ("quantization", "is_table", "name"),
    [("int8", False, "q8"), ("int8", True, "q8"), ("int4", False, "q4m"), ("int4", True, "q8")],
)
def test_quantised_at_load(quantization: str, is_table: bool, name: str) -> None:
    assert chosen("BF16", quantization=quantization, is_table=is_table) == name
    assert chosen("BF16", quantization=quantization, is_table=is_table, num_inputs=80) == "bf16"


# --- Values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stored_format", OTHERS)
def test_other_formats_are_within_half_a_step_of_8_bit(stored_format: str) -> None:
    found, expected = packed("q8", k_quants("w", 21, 256, stored_format))
    largest = expected.view(-1, 32).abs().amax(1, keepdim=True)
    # Half a step, and the rounding of the step itself to fp16.
    assert ((found - expected).view(-1, 32).abs() <= largest * (0.5 / 127 + 1 / 2048) + 1e-6).all()
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("stored_format", ["F32", "Q3_K"])
def test_weights_are_packed_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch, stored_format: str) -> None:
    tensor = stored("w", random(45, 256), "F32") if stored_format == "F32" else k_quants("w", 45, 256, stored_format)
    whole, _ = packed("q8", tensor)
    monkeypatch.setattr("quire.runtime.plan.packed_weights.PART_VALUES", 7 * 256)
    assert torch.equal(packed("q8", tensor)[0], whole)


def test_packed_pages_of_the_file_are_released_and_can_be_read_again(tmp_path: Path) -> None:
    values = random(2048, 1024)
    (tmp_path / "w").write_bytes(values.numpy().tobytes())
    mapping = map_file(tmp_path / "w")
    tensor = WeightTensor("w", (2048, 1024), "F32", np.frombuffer(mapping, np.uint8).reshape(2048, -1))

    def mapped_kb() -> int:
        parts = Path("/proc/self/smaps").read_text().split(str(tmp_path / "w"))
        return int(parts[1].split("Rss:")[1].split()[0])

    found, expected = packed("f32", tensor)
    assert torch.equal(found, expected)
    tensor.release()
    assert mapped_kb() == 0
    assert torch.equal(tensor.to_torch(torch.float32), values)


def finite(stored_format: str, rows: int) -> WeightTensor:
    return WeightTensor(stored_format, (rows, 512), stored_format, finite_rows(stored_format, rows, 512))


@pytest.mark.parametrize("stored_format", ["Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS", "MXFP4"])
def test_slices_of_a_rank_have_the_values_of_the_whole(stored_format: str) -> None:
    tensor = finite(stored_format, 53)
    whole = tensor.to_torch(torch.float32)
    for rows, columns in ((slice(16, 48), slice(None)), (slice(None), slice(256, 512)), (slice(5, 9), slice(0, 256))):
        found, expected = packed(EXACT[stored_format], tensor.part(rows, columns))
        assert torch.equal(found, expected)
        assert torch.equal(found, whole[rows, columns])


def quantized(
    layout: str = "across8", *, name: str = "INT8", groups_of: int | None = None, has_zeros: bool = False,
    rows_per_scale: int = 1, is_signed: bool = False, table: np.ndarray | None = None,
) -> QuantizedTensor:  # fmt: skip
    """Codes with a scale and a zero for each 32 columns, or `groups_of`; by default in a shuffled order.

    Shapes: `[48, 384]`.
    """
    generator, bits = np.random.default_rng(5), 8 if layout.endswith("8") else 4
    shape = {"across": (48, 48 * bits), "down": (48 * bits, 192), "awq": (384, 24)}[layout.rstrip("48")]
    stored_codes = StoredCodes(CodeLayout[layout], generator.integers(0, 256, shape, np.uint8))
    groups = generator.permutation(384) // 32 if groups_of is None else np.arange(384) // groups_of
    scales = generator.uniform(0.01, 0.1, (48 // rows_per_scale, groups.max() + 1)).astype(np.float32)
    zeros = generator.integers(0, 9, (48, groups.max() + 1), np.uint8)
    zero = 0.0 if is_signed or table is not None else 2.0**bits / 2
    parts = Quantized(
        stored_codes, WeightTensor("s", scales.shape, "F32", scales.view(np.uint8)),
        (lambda first, last: zeros[first:last]) if has_zeros else zero, groups, 1.0, rows_per_scale,
        table=table, is_signed=is_signed,
    )  # fmt: skip
    return QuantizedTensor("w", (48, 384), name, stored_codes.stored, quantized=parts)


def changes_of(tensor: QuantizedTensor) -> list[QuantizedTensor]:
    """The whole, rows in another order, a part that begins within a tile, and both."""
    order = np.random.default_rng(6).permutation(48)
    part = tensor.part(slice(3, 40), slice(32, 352))
    reordered: Any = tensor.with_rows(order)
    return [tensor, reordered, part, reordered.part(slice(9, 30), slice(256, 384))]


@pytest.mark.parametrize(
    "tensor",
    [
        quantized(has_zeros=True),
        quantized("down4", has_zeros=True),
        quantized("awq", has_zeros=True, groups_of=16),
        quantized("across4", groups_of=128),
        quantized(is_signed=True),
        quantized(table=np.arange(256, dtype=np.float32) / 3, rows_per_scale=8),
    ],
    ids=["zeros", "GPTQ", "AWQ", "4 bit", "signed", "table"],
)
@pytest.mark.parametrize("target", ["q8", "f32"])
def test_codes_are_packed_as_the_values_that_numpy_decodes(tensor: QuantizedTensor, target: str) -> None:
    for part in changes_of(tensor):
        values = np.ascontiguousarray(part.to_numpy())
        as_floats = WeightTensor("w", values.shape, "F32", values.view(np.uint8))
        assert torch.equal(packed(target, part)[0], packed(target, as_floats)[0])


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Shapes: uint8 `[..., 32]` -> `[..., 16]`, byte j holding codes j and, above it, j + 16."""
    return codes[..., :16] | codes[..., 16:] << 4


def as_blocks(tensor: QuantizedTensor) -> WeightTensor:
    """The same as GGUF's blocks, built by NumPy from codes that it decodes."""
    unit = replace(tensor, quantized=replace(tensor.quantized, scales=ones(tensor.quantized.scales), zeros=0.0))
    rows = tensor.corner[0] + (np.arange(tensor.shape[0]) if tensor.row_order is None else tensor.row_order)
    scales = tensor.quantized.scales.to_numpy()[rows]
    zeros = tensor.quantized.zeros
    zeros = zeros(0, 48)[rows].astype(np.float32) if callable(zeros) else np.full_like(scales, zeros)
    groups = tensor.quantized.groups[tensor.corner[1] :][: tensor.shape[1] : 32]
    codes, scales, zeros = unit.to_numpy(), scales[:, groups, None], zeros[:, groups, None]
    if tensor.format == "Q8_0" and not tensor.quantized.is_signed:
        codes = codes - 128
    integers = codes.astype(np.int8).view(np.uint8).reshape(tensor.shape[0], -1, 32)
    heads = [scales, -zeros * scales] if tensor.format == "Q4_1" else [scales]
    body = integers if tensor.format == "Q8_0" else nibbles(integers)
    raw = np.concatenate([*(head.astype("<f2").view(np.uint8) for head in heads), body], axis=-1)
    return WeightTensor("w", tensor.shape, tensor.format, np.ascontiguousarray(raw.reshape(tensor.shape[0], -1)))


def ones(scales: WeightTensor) -> WeightTensor:
    return replace(scales, stored=np.ones(scales.shape, np.float32).view(np.uint8))


@pytest.mark.parametrize(
    "tensor",
    [
        quantized("down4", name="Q4_0", groups_of=128),
        quantized("down4", name="Q4_1", groups_of=32, has_zeros=True),
        quantized("awq", name="Q4_1", groups_of=64, has_zeros=True),
        quantized("across4", name="Q4_0", groups_of=32),
        quantized("across4", name="Q4_1", groups_of=128, has_zeros=True),
        quantized("down8", name="Q8_0", groups_of=128),
        quantized("across8", name="Q8_0", groups_of=384),
        quantized("across8", name="Q8_0", groups_of=384, is_signed=True),
    ],
    ids=["GPTQ 4", "GPTQ 4 zeros", "AWQ", "W4A16", "W4A16 zeros", "GPTQ 8", "W8A16", "W8A8"],
)
def test_codes_of_directories_are_packed_as_blocks_with_the_same_values(tensor: QuantizedTensor) -> None:
    for part in changes_of(tensor):
        target = EXACT[part.format]
        assert np.array_equal(packed_bytes_of(target, part), packed_bytes_of(target, as_blocks(part)))


def packed_bytes_of(target: str, *tensors: WeightTensor) -> np.ndarray:
    shape = (sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1])
    parameter: Any = SimpleNamespace(shape=shape)
    weights = PackedWeights({"w": parameter}, {"w": Packing.whole(shape[0], WeightFormat[target])}, 2)
    firsts = [0, *itertools.accumulate(tensor.shape[0] for tensor in tensors)]
    weights.fill([Placement(tensor, "w", first) for tensor, first in zip(tensors, firsts, strict=False)])
    return weights.memory


def test_parts_of_codes_may_meet_within_a_tile() -> None:
    tensor = quantized("down4", name="Q4_0", groups_of=128)
    parts = [tensor.part(slice(first, last), slice(None)) for first, last in ((0, 5), (5, 21), (21, 48))]
    assert np.array_equal(packed_bytes_of("q4", *parts), packed_bytes_of("q4", tensor))


def test_scales_beyond_fp16_are_an_error_where_blocks_have_halves() -> None:
    tensor = quantized("down4", name="Q4_1", groups_of=32, has_zeros=True)
    large = replace(tensor.quantized.scales, stored=np.full((48, 12), 9000, np.float32).view(np.uint8))
    tensor = replace(tensor, quantized=replace(tensor.quantized, scales=large))
    with pytest.raises(UnsupportedModelError, match="'w' has scales that fp16 cannot hold; use the original model"):
        packed_bytes_of("q4m", tensor)
    packed_bytes_of("q8", tensor)


def test_mxfp4_with_scales_apart_is_packed_as_gguf_stores_it() -> None:
    generator = np.random.default_rng(7)
    pairs, scales = generator.integers(0, 256, (53, 256), np.uint8), generator.integers(0, 255, (53, 16), np.uint8)
    apart = WeightTensor("w", (53, 512), "MXFP4", pairs, scales=scales)
    joined = WeightTensor("w", (53, 512), "MXFP4", join_mxfp4(pairs, scales))
    order = generator.permutation(53)
    for change in (
        lambda tensor: tensor, lambda tensor: tensor.part(slice(5, 37), slice(64, 256)),
        lambda tensor: tensor.with_rows(order).part(slice(3, 20), slice(None)),
    ):  # fmt: skip
        assert torch.equal(packed("mxfp4", change(apart))[0], packed("mxfp4", change(joined))[0])
        assert np.array_equal(change(apart).raw, change(joined).raw)


def test_parts_with_codebooks_stack_and_keep_their_values() -> None:
    parts = finite("MXFP4", 32), finite("IQ4_XS", 64), finite("Q8_0", 32), finite("IQ4_NL", 9)
    found, expected = packed("mxfp4+iq4xs+q8+iq4nl", *parts)
    assert torch.equal(found, expected)


def test_parts_of_different_formats_stack() -> None:
    """Rows do not mix, though a tile of 16 rows holds the end of one part and the start of the next."""
    parts = [
        stored("q", random(21, 64, 1), "Q4_0"), stored("k", random(5, 64, 2), "Q8_0"),
        stored("v", random(9, 64, 3), "F16"), stored("z", random(3, 64, 4), "Q5_0"),
    ]  # fmt: skip
    found, expected = packed("q8", *parts)
    step = expected.view(-1, 32).abs().amax(1) / 127
    assert ((found - expected).view(-1, 32).abs().amax(1) <= step * 0.57).all()
    assert torch.equal(found[21:26], expected[21:26]), "Q8_0 keeps its values"


def test_rows_stored_in_another_order() -> None:
    tensor = stored("w", random(20, 64), "Q4_1")
    order = np.random.default_rng(0).permutation(20)
    found, expected = packed("q4m", WeightTensor("w", (20, 64), "Q4_1", tensor.stored, order))
    assert torch.equal(found, expected)
    assert not torch.equal(found, tensor.to_torch(torch.float32))


def test_vectors_are_fp32_and_stack_too() -> None:
    bias = nn.Parameter(torch.zeros(7), requires_grad=False)
    weights = PackedWeights({"b": bias}, {})
    stack = stored("q", torch.arange(4.0)), stored("k", torch.arange(3.0), "BF16")
    weights.fill([Placement(stack[0], "b", 0), Placement(stack[1], "b", 4)])
    address = weights.vector_address(bias)
    found = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * 7).from_address(address))
    assert found.tolist() == [0, 1, 2, 3, 0, 1, 2]


def test_matrices_lie_apart_and_aligned() -> None:
    shapes = {"a": (17, 32), "b": (1, 64), "c": (40, 96)}
    parameters = {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes.items()}
    formats = {"a": WeightFormat.q4m, "b": WeightFormat.f32, "c": WeightFormat.bf16}
    packings = {name: Packing.whole(shapes[name][0], each) for name, each in formats.items()}
    weights = PackedWeights(parameters, packings)
    values = {name: random(*shape) for name, shape in shapes.items()}
    for name in ("c", "a", "b"):
        weights.put_values(name, values[name])
    assert torch.equal(decoded(weights, parameters["b"]), values["b"])
    assert torch.equal(decoded(weights, parameters["c"]), values["c"].bfloat16().float())
    assert (decoded(weights, parameters["a"]) - values["a"]).abs().max() < 0.3
    assert [weights.packing_of(parameters[name]).parts[0][1] for name in shapes] == list(formats.values())
    assert weights.num_bytes == 2 * 320 + 64 * 16 * 4 + 3 * 96 * 16 * 2


def test_model_without_matrices_packs() -> None:
    assert PackedWeights({}, {}).num_bytes == 0


def test_kept_bytes_counts_packed_and_plain_weights() -> None:
    """Return the bytes that `resolve` counts: packed tiles of what is quantised, the file's bytes of the rest."""
    tensors = [
        stored("a", random(32, 64), "Q4_1"), k_quants("b", 16, 256, "Q3_K"), stored("c", random(8, 3), "BF16"),
        stored("d", torch.zeros(5)),
    ]  # fmt: skip
    assert kept_bytes(tensors) == 2 * 2 * 320 + 8 * 544 + 8 * 3 * 2 + 5 * 4
    parameters = {tensor.name: nn.Parameter(torch.empty(tensor.shape, device="meta")) for tensor in tensors[:2]}
    packings = {"a": Packing.whole(32, WeightFormat.q4m), "b": Packing.whole(16, WeightFormat.q8)}
    weights = PackedWeights(parameters, packings)
    assert weights.num_bytes == kept_bytes(tensors[:2])
