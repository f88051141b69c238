"""Packed weights hold the values of the stored ones: read back by the embedding op, against `weights.dequantize`."""

import numpy as np
import pytest
import torch
from gguf import quants

from quire import _native
from quire.weights.weight_tensor import BLOCK_FORMATS, decode
from tests.kernels.native.packed_weights import BLOCKS, FORMATS, STORED, Packed, finite_rows
from tests.weights.gguf_builder import random_rows

FLOATS = [("F32", "f32"), ("F16", "f16"), ("BF16", "bf16")]
SUPERS = [("Q4_K", "q4k"), ("Q5_K", "q5k"), ("Q6_K", "q6k"), ("IQ4_XS", "iq4xs")]
EXACT = [("Q4_0", "q4"), ("Q4_1", "q4m"), ("Q5_0", "q5"), ("Q5_1", "q5m"), ("Q8_0", "q8"), ("IQ4_NL", "iq4nl"), *FLOATS]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal, signs of zeros included; a NaN may have any payload."""
    nan = np.isnan(a)
    return np.array_equal(nan, np.isnan(b)) and np.array_equal(a.view(np.uint32)[~nan], b.view(np.uint32)[~nan])


def floats_as(stored: str, values: np.ndarray) -> np.ndarray:
    """Shapes: fp32 `[rows, inputs]` -> uint8 `[rows, bytes]`."""
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[stored]
    rounded = torch.from_numpy(values).to(dtype)
    return rounded.view(torch.uint8).numpy().reshape(len(values), -1)


@pytest.mark.parametrize(
    ("stored", "target", "shape"),
    [
        *((*pair, shape) for pair in EXACT for shape in [(1, 32), (16, 64), (37, 544)]),
        *((*pair, shape) for pair in SUPERS for shape in [(1, 256), (37, 768)]),
    ],
)
def test_any_bytes_keep_their_values(stored: str, target: str, shape: tuple[int, int]) -> None:
    raw = random_rows(stored, shape[0], shape[1] // BLOCK_FORMATS[stored].block_len, seed=shape[0])
    assert same_bits(Packed(target, *shape).add_rows(stored, raw).decoded(), decode(raw, stored))


@pytest.mark.parametrize("shape", [(1, 32), (37, 544)])
def test_mxfp4_keeps_its_values(shape: tuple[int, int]) -> None:
    raw = random_rows("MXFP4", shape[0], shape[1] // 32)
    raw[:, ::17] = np.maximum(raw[:, ::17], 2)
    assert same_bits(Packed("mxfp4", *shape).add_rows("MXFP4", raw).decoded(), decode(raw, "MXFP4"))


def test_mxfp4_with_denormal_scales_becomes_zero() -> None:
    raw = random_rows("MXFP4", 16, 2)
    raw[:, ::17] = 0, 1
    assert (Packed("mxfp4", 16, 64).add_rows("MXFP4", raw).decoded() == 0).all()


@pytest.mark.parametrize("shape", [(1, 32), (37, 544)])
def test_nvfp4_keeps_its_values(shape: tuple[int, int]) -> None:
    """The bits of the gguf package's, whose blocks are of 64 with groups of 16 apart, times the row's factor."""
    num_rows, num_groups = shape[0], shape[1] // 16
    random = np.random.default_rng(3)
    codes = random.integers(0, 16, (num_rows, num_groups, 16), np.uint8)
    scales = random.integers(0, 0x7F, (num_rows, num_groups), np.uint8)
    factors = random.uniform(1e-3, 1, (num_rows, 1)).astype(np.float32)
    pairs = codes.reshape(num_rows, -1, 32)
    blocks = np.concatenate([
        np.broadcast_to(factors.view(np.uint8)[:, None], (num_rows, num_groups // 2, 4)),
        scales.reshape(num_rows, -1, 2), pairs[..., :16] | pairs[..., 16:] << 4,
    ], -1).reshape(num_rows, -1)  # fmt: skip
    found = Packed("nvfp4", *shape).add_rows("NVFP4", np.ascontiguousarray(blocks)).decoded()
    of_groups = 2 * quants.NVFP4.ue4m3_to_fp32(scales) * factors
    wanted = np.array(quants.NVFP4.kvalues)[codes] * of_groups.astype(np.float32)[..., None]
    assert same_bits(found, wanted.astype(np.float32).reshape(shape))


@pytest.mark.parametrize("target", ["f32", "bf16", "q8", "q4m"])
@pytest.mark.parametrize("stored", [name for name in BLOCK_FORMATS if name not in ("Q4_1", "Q8_0")])
def test_blocks_are_packed_as_the_values_that_numpy_decodes(stored: str, target: str) -> None:
    """Random bytes: among the scales are denormals, infinities and NaN, whose signs and payloads may differ."""

    def both(raw: np.ndarray) -> tuple[Packed, Packed]:
        values = decode(raw, stored).view(np.uint8)
        return Packed(target, 37, 768).add_rows(stored, raw), Packed(target, 37, 768).add_rows("F32", values)

    raw = random_rows(stored, 37, 768 // BLOCK_FORMATS[stored].block_len, seed=1)
    found, wanted = both(raw)
    assert same_bits(found.decoded(), wanted.decoded())
    found, wanted = both(raw & 0xBB)  # no exponent of infinity
    assert np.array_equal(found.data, wanted.data)


@pytest.mark.parametrize(("stored", "target"), [("Q4_1", "q8"), ("Q4_1", "f32"), ("Q8_0", "q4m"), ("Q8_0", "f32")])
def test_formats_with_a_packed_one_of_their_own_are_decoded_for_others(stored: str, target: str) -> None:
    raw = finite_rows(stored, 21, 96)
    values = Packed(target, 21, 96).add_rows("F32", decode(raw, stored).view(np.uint8))
    assert np.array_equal(Packed(target, 21, 96).add_rows(stored, raw).data, values.data)


@pytest.mark.parametrize("stored", STORED.values())
def test_packed_weights_are_at_most_5_percent_larger_than_the_file(stored: str) -> None:
    target = next(name for name, each in STORED.items() if each == stored)
    in_file = 2048 // 32 * 18 if stored == "NVFP4" else 2048 // BLOCKS[stored].block_len * BLOCKS[stored].block_bytes
    assert _native.packed_bytes(FORMATS[target], 96, 2048) <= 1.05 * 96 * in_file


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("target", ["f32", "f16", "bf16"])
def test_plain_floats_need_no_whole_blocks(stored: str, target: str) -> None:
    raw = floats_as(stored, np.random.default_rng(0).standard_normal((21, 301)).astype(np.float32))
    packed = Packed(target, 21, 301).add_rows(stored, raw)
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[target]
    assert same_bits(packed.decoded(), torch.from_numpy(decode(raw, stored)).to(dtype).float().numpy())
    packed.num_inputs += target == "bf16"  # the zero that completes the last pair
    assert (packed.decoded()[:, 301:] == 0).all()


@pytest.mark.parametrize("target", ["f16", "bf16"])
def test_rounding_is_torchs_for_every_kind_of_value(target: str) -> None:
    random = np.random.default_rng(1)
    bits = random.integers(0, 2**32, 1 << 16, dtype=np.uint32)
    # Half of them within float16's range, where exponents of denormals and ties are frequent.
    bits[::2] = (bits[::2] & 0x80FF_F000) | (random.integers(100, 145, len(bits[::2]), dtype=np.uint32) << 23)
    # Infinities, the NaN next to them, and where fp16 ends.
    bits[:6] = 0x7F80_0000, 0xFF80_0000, 0x7F80_0001, 0x477F_E000, 0x477F_EFFF, 0x477F_F000
    values = bits.view(np.float32).reshape(16, -1)
    found = Packed(target, *values.shape).add_rows("F32", values.view(np.uint8)).decoded()
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[target]
    assert same_bits(found, torch.from_numpy(values).to(dtype).float().numpy())


@pytest.mark.parametrize("stored", ["F16", "BF16"])
def test_every_half_is_widened_exactly(stored: str) -> None:
    raw = np.arange(1 << 16, dtype=np.uint16).reshape(64, -1).view(np.uint8)
    assert same_bits(Packed("f32", 64, 1024).add_rows(stored, raw).decoded(), decode(raw, stored))


def test_blocks_far_from_zero_stay_within_their_sixteen_values() -> None:
    """There fp16's minimum is wrong by more than a step: values would be below the first or above the last."""
    values = (100 + np.random.default_rng(7).uniform(-0.15, 0.15, (17, 320))).astype(np.float32)
    values[::2] *= -1
    found = Packed("q4m", 17, 320).add_rows("F32", values.view(np.uint8)).decoded()
    assert (np.abs(found - values) <= 2.0**-5 + 0.3 / 15).all()


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("target", ["q8", "q4m"])
def test_quantised_at_load_within_half_a_step(stored: str, target: str) -> None:
    random = np.random.default_rng(2)
    values = random.standard_normal((21, 320)).astype(np.float32) * np.exp(random.uniform(-6, 3, (21, 1)))
    raw = floats_as(stored, values.astype(np.float32))
    values = decode(raw, stored)
    found = Packed(target, *values.shape).add_rows(stored, raw).decoded()
    blocks, read = values.reshape(21, -1, 32), found.reshape(21, -1, 32)
    low, high = blocks.min(2, keepdims=True), blocks.max(2, keepdims=True)
    step = np.maximum(high, -low) / 127 if target == "q8" else (high - low) / 15
    # Half a step of rounding, and what f16 adds: to the scale, over 15 or 127 steps, and to the minimum.
    bound = step * (0.5 + (127 if target == "q8" else 15) / 2048) + np.abs(low) * (0 if target == "q8" else 1 / 2048)
    assert (np.abs(read - blocks) <= bound).all()
    # Rounding to the nearest: a quarter of a step on average.
    assert np.abs(read - blocks).mean() < 0.3 * step.mean()


def test_values_on_the_grid_survive_quantisation() -> None:
    random = np.random.default_rng(3)
    q = random.integers(-127, 128, (19, 96))
    q[:, ::32] = 127
    values = (q * 0.03125).astype(np.float32)
    assert np.array_equal(Packed("q8", 19, 96).add_rows("F32", values.view(np.uint8)).decoded(), values)
    u = random.integers(0, 16, (19, 96))
    u[:, ::32], u[:, 1::32] = 0, 15
    values = (u * 0.25 - 1.5).astype(np.float32)
    assert np.array_equal(Packed("q4m", 19, 96).add_rows("F32", values.view(np.uint8)).decoded(), values)


@pytest.mark.parametrize("target", ["q8", "q4m"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_block_and_zeros_stay(target: str, bad: float) -> None:
    values = np.zeros((3, 96), dtype=np.float32)
    values[1, 40] = bad
    found = Packed(target, 3, 96).add_rows("F32", values.view(np.uint8)).decoded()
    assert np.isnan(found[1, 32:64]).all()
    found[1, 32:64] = 0
    assert (found == 0).all()


@pytest.mark.parametrize(("stored", "target"), [*EXACT, *SUPERS, ("F32", "q8"), ("BF16", "q4m")])
def test_parts_join_and_rows_may_be_reordered(stored: str, target: str) -> None:
    raw = finite_rows(stored, 45, 256)
    if stored in ("F32", "BF16"):
        raw = floats_as(stored, np.random.default_rng(4).standard_normal((45, 256)).astype(np.float32))
    whole = Packed(target, 45, 256).add_rows(stored, raw)
    joined = Packed(target, 45, 256).add_rows(stored, raw[:7]).add_rows(stored, raw[7:32]).add_rows(stored, raw[32:])
    assert np.array_equal(joined.data, whole.data)
    threaded = Packed(target, 45, 256).add_rows(stored, raw, num_threads=3)
    assert np.array_equal(threaded.data, whole.data)
    order = np.random.default_rng(5).permutation(45).astype(np.int32)
    wide = np.zeros((45, raw.shape[1] + 6), dtype=np.uint8)
    wide[:, : raw.shape[1]] = raw
    reordered = Packed(target, 45, 256).add_rows(stored, wide[:, : raw.shape[1]], order)
    assert np.array_equal(reordered.decoded(), whole.decoded()[order])
    # A later part's order counts from its own first row.
    order = np.random.default_rng(6).permutation(38).astype(np.int32)
    later = Packed(target, 45, 256).add_rows(stored, raw[:7]).add_rows(stored, raw[7:], order)
    assert np.array_equal(later.decoded()[7:], whole.decoded()[7:][order])


@pytest.mark.parametrize(("stored", "target"), [*EXACT, *SUPERS, ("F32", "q8"), ("F32", "q4m")])
def test_outputs_past_the_last_are_zero(stored: str, target: str) -> None:
    packed = Packed(target, 19, 256)
    packed.add_rows(stored, finite_rows(stored, 19, 256))
    packed.num_outputs = 32
    assert (packed.decoded()[19:] == 0).all()


def test_bytes_of_a_packed_matrix() -> None:
    assert _native.packed_bytes(FORMATS["q4m"], 17, 64) == 2 * 2 * (256 + 64)
    assert _native.packed_bytes(FORMATS["f32"], 16, 3) == 192
    assert _native.packed_bytes(FORMATS["q8"], 0, 64) == 0


@pytest.mark.parametrize(("stored", "target"), SUPERS)
def test_packed_k_quants_are_hardly_larger_than_the_file(stored: str, target: str) -> None:
    file_bytes = 32 * 2 * BLOCK_FORMATS[stored].block_bytes
    assert file_bytes <= _native.packed_bytes(FORMATS[target], 32, 512) <= 1.05 * file_bytes


def test_jobs_of_one_call_that_share_tiles_equal_one_job() -> None:
    raw = random_rows("Q8_0", 400, 2)
    whole, joined = Packed("q8", 400, 64).add_rows("Q8_0", raw), Packed("q8", 400, 64)
    jobs = [
        _native.PackedRows(
            "Q8_0", raw[first:].ctypes.data, 10, 64, raw.strides[0], joined.data.ctypes.data, first, joined.format
        )
        for first in range(0, 400, 10)
    ]
    _native.pack_rows(jobs, 4)
    assert np.array_equal(joined.data, whole.data)


@pytest.mark.parametrize(
    ("stored", "target", "num_inputs", "message"),
    [
        ("Q8_K", "q8", 256, "stored as Q8_K"),
        ("NVFP4", "q8", 32, "stored as NVFP4"),
        ("F32", "q4", 32, "cannot be packed"),
        ("F32", "q8", 48, "whole number of blocks"),
        ("Q4_K", "q4k", 288, "whole number of blocks"),
        ("Q4_K", "q5k", 256, "cannot be packed"),
        ("CODES", "q8", 256, "need codes"),
        ("F32", "q4k", 256, "cannot be packed"),
        ("F32", "mxfp4", 256, "cannot be packed"),
        ("MXFP4", "q4", 256, "cannot be packed"),
    ],
)
def test_what_cannot_be_packed_is_refused(stored: str, target: str, num_inputs: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.pack_rows([_native.PackedRows(stored, 0, 0, num_inputs, 0, 0, 0, FORMATS[target])])
