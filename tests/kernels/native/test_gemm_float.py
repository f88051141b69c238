"""Products with fp32, fp16 and bf16 weights: the documented order of every sum, to the bit, on every instruction set.

The oracle adds in the order of native/ops/gemm.h with 64-bit significands, rounding to fp32 after each input: a product
of two fp32 is exact in it, so that this is a fused multiply-add (but for ties that 40 further bits hide). For products
of two bf16, of 16 bits, it is exact with 53: what lies beyond them is 12 equal bits away from a tie of fp32.
"""

import numpy as np
import pytest
import torch

from quire import _native
from tests.kernels.native.packed_weights import FORMATS, ISAS, aligned, run

pytestmark = pytest.mark.usefixtures("chosen_isa")

FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def packed(weight: torch.Tensor, weight_format: str) -> np.ndarray:
    """[N, I] in tiles of 16 outputs: [I][16], or [pairs of inputs][16][2] for bf16; each tile on a 64-byte boundary."""
    num_outputs, num_inputs = weight.shape
    pairs = 2 if weight_format == "bf16" else 1
    padded = torch.zeros(-(-num_outputs // 16) * 16, -(-num_inputs // pairs) * pairs, dtype=weight.dtype)
    padded[:num_outputs, :num_inputs] = weight
    values = padded.view(torch.int32 if weight_format == "f32" else torch.int16).numpy()
    tiles = values.reshape(-1, 16, values.shape[1] // pairs, pairs).transpose(0, 2, 1, 3)
    tiles = tiles.reshape(tiles.shape[0], -1)
    size = _native.tile_bytes(FORMATS[weight_format], num_inputs)
    out = aligned(len(tiles) * size)
    out.view(tiles.dtype).reshape(len(tiles), -1)[:, : tiles.shape[1]] = tiles
    return out


def product(x: torch.Tensor, weight: torch.Tensor, weight_format: str, num_threads: int = 1) -> np.ndarray:
    """x [T, I] @ weight [N, I].T by a plan of one op, as the bits of fp32 [T, N]."""
    num_tokens, num_inputs = x.shape
    data = packed(weight, weight_format)
    dtype = torch.bfloat16 if weight_format == "bf16" else torch.float32
    width = num_inputs + num_inputs % 2
    rows = torch.zeros(num_tokens, width, dtype=dtype)
    rows[:, :num_inputs] = x
    out = np.full((num_tokens, weight.shape[0]), np.nan, dtype=np.float32)
    plan = _native.Plan(num_threads, num_tokens, 1)
    plan.gemm(
        _native.Weight(data.ctypes.data, *weight.shape, FORMATS[weight_format]),
        0,
        _native.Rows(rows.data_ptr(), width * rows.element_size(), _native.wanted_rows(FORMATS[weight_format])),
        _native.Rows(out.ctypes.data, out.strides[0], _native.RowType.f32),
    )
    run(plan, np.zeros(num_tokens))
    return out.view(np.uint32)


def expected(x: torch.Tensor, weight: torch.Tensor, weight_format: str) -> np.ndarray:
    """Compute the product in the documented order. Returns: the bits of fp32 [T, N]."""
    wide = np.float64 if x.dtype == weight.dtype == torch.bfloat16 else np.longdouble  # which takes five times as long
    wide_x, wide_weight = x.float().numpy().astype(wide), weight.float().numpy().astype(wide)
    order = list(range(weight.shape[1]))
    if weight_format == "bf16":
        order = [i for j in range(0, len(order), 2) for i in (j + 1, j) if i < len(order)]
    y = np.zeros((x.shape[0], weight.shape[0]), dtype=np.float32)
    for i in order:
        with np.errstate(invalid="ignore"):  # infinity minus infinity
            y = (wide_x[:, i, None] * wide_weight[None, :, i] + y).astype(np.float32)
    return y.view(np.uint32)


def expected_on(isa: str, x: torch.Tensor, weight: torch.Tensor, weight_format: str) -> np.ndarray:
    """AMX has an order of its own for bf16 (native/ops/gemm_amx.h): per 32 inputs, even ones and odd ones apart."""
    if weight_format != "bf16" or not isa.startswith("amx"):
        return expected(x, weight, weight_format)
    y = np.zeros((x.shape[0], weight.shape[0]), dtype=np.float32)
    for first in range(0, x.shape[1], 32):
        part_x, part = x[:, first : first + 32], weight[:, first : first + 32]
        even, odd = (expected(part_x[:, i::2], part[:, i::2], "f32").view(np.float32) for i in (0, 1))
        with np.errstate(invalid="ignore"):
            y = y + (even + odd)
    return y.view(np.uint32)


def random(shape: tuple[int, int], weight_format: str, seed: int) -> torch.Tensor:
    """Values of many magnitudes, so that another order of a sum is another sum."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-4, 5, shape, generator=generator))
    return values.to(FLOATS[weight_format])


def rows_for(shape: tuple[int, int], weight_format: str, seed: int) -> torch.Tensor:
    return random(shape, "bf16" if weight_format == "bf16" else "f32", seed)


# T, N, I: one row and blocks of every number of rows; N and I of no round number; inputs of one cut and of several.
SHAPES = [(1, 1, 1), (2, 16, 2), (1, 40, 300), (3, 17, 31), (4, 33, 129), (5, 48, 257), (6, 67, 64), (7, 32, 515)]
SHAPES += [(8, 31, 128), (9, 64, 255), (17, 16, 256), (70, 33, 301)]
# With this many outputs a thread multiplies up to 64 rows at once; the others are cut into fewer rows.
SHAPES += [(31, 273, 35), (34, 280, 259), (70, 273, 301)]
# A block of rows goes through all outputs before the next one.
SHAPES += [(150, 273, 35)]


@pytest.mark.parametrize("weight_format", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_in_the_documented_order_to_the_bit(shape: tuple[int, int, int], weight_format: str) -> None:
    num_tokens, num_outputs, num_inputs = shape
    x = rows_for((num_tokens, num_inputs), weight_format, 1)
    weight = random((num_outputs, num_inputs), weight_format, 2)
    for isa in ISAS:
        wanted = expected_on(isa, x, weight, weight_format)
        _native.set_isa(isa)
        for num_threads in (1, 2):
            found = product(x, weight, weight_format, num_threads)
            np.testing.assert_array_equal(found, wanted, err_msg=f"{isa}, {num_threads} threads")
    ideal = x.double() @ weight.double().T
    bound = x.double().abs() @ weight.double().abs().T * num_inputs * 2.0**-24
    assert (abs(torch.from_numpy(wanted.view(np.float32)).double() - ideal) <= bound + 1e-30).all()


@pytest.mark.parametrize("weight_format", FLOATS)
def test_row_is_the_same_alone_and_among_others(weight_format: str) -> None:
    x, weight = rows_for((67, 270), weight_format, 3), random((273, 270), weight_format, 4)
    for isa in ISAS[1:] or ISAS:
        _native.set_isa(isa)
        together = product(x, weight, weight_format, 2)
        for first, count in ((0, 1), (5, 1), (66, 1), (3, 2), (8, 7), (1, 33), (2, 64)):
            some = product(x[first : first + count], weight, weight_format)
            np.testing.assert_array_equal(some, together[first : first + count], err_msg=isa)


def test_every_f16_value_is_decoded_exactly() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.float16).reshape(256, 256)
    values = torch.where(values.isnan(), torch.zeros_like(values), values)
    one_hot = torch.eye(256)
    infinite = values.isinf().any(dim=1)  # infinity times the zeros of the other rows is NaN
    values[infinite] = torch.where(values[infinite].isinf(), torch.ones_like(values[infinite]), values[infinite])
    for isa in ISAS[1:] or ISAS:
        _native.set_isa(isa)
        found = product(one_hot, values.contiguous(), "f16", 2).view(np.float32)
        np.testing.assert_array_equal(found, values.float().T.numpy(), err_msg=isa)
    assert (values.float().abs() < 2.0**-14).sum() > 2000, "subnormals are among them"


@pytest.mark.parametrize("weight_format", FLOATS)
def test_not_a_number_and_infinity_reach_their_own_rows_and_outputs_only(weight_format: str) -> None:
    x, weight = rows_for((10, 37), weight_format, 5), random((35, 37), weight_format, 6)
    clean = {isa: expected_on(isa, x, weight, weight_format).view(np.float32) for isa in ISAS}
    x[3, 36], x[7, 0] = torch.nan, torch.inf
    weight[20, 5], weight[34, 36] = torch.nan, -torch.inf
    for isa in ISAS:
        wanted = expected_on(isa, x, weight, weight_format).view(np.float32)
        assert np.isnan(wanted[3]).all()
        assert np.isnan(wanted[:, 20]).all()
        assert np.isinf(wanted[7]).sum() >= 33
        _native.set_isa(isa)
        found = product(x, weight, weight_format, 2).view(np.float32)
        np.testing.assert_array_equal(found, wanted, err_msg=isa)  # NaN equals NaN here
        others = np.ix_([0, 1, 2, 4, 5, 6, 8, 9], [n for n in range(35) if n not in (20, 34)])
        np.testing.assert_array_equal(found[others], clean[isa][others], err_msg=isa)


@pytest.mark.parametrize("weight_format", ["f32", "bf16"])
def test_denormals_are_zero_on_every_instruction_set(weight_format: str) -> None:
    """VDPBF16PS always flushes them; the threads of a plan, the calling one included, do too."""
    generator = torch.Generator().manual_seed(7)
    shape = (9, 66)
    exponents = torch.randint(-4, 5, shape, generator=generator) - torch.arange(58, 76, 2)[:, None]
    x = (torch.randn(shape, generator=generator) * torch.exp2(exponents)).bfloat16()
    weight = (torch.randn(40, 66, generator=generator) * 2.0**-62).to(FLOATS[weight_format])
    x[:, ::7], weight[:, ::7] = 2.0**-130, 2.0**60  # denormal, though its products are not
    without = torch.where(torch.arange(66) % 7 == 0, 0, x)
    results = []
    isas = [isa for isa in ISAS if not isa.startswith("amx")]
    for isa in isas:
        _native.set_isa(isa)
        results.append(product(x, weight, weight_format, 2))
        np.testing.assert_array_equal(results[-1], product(without, weight, weight_format, 2), err_msg=isa)
    magnitudes = np.abs(results[0].view(np.float32))
    assert ((magnitudes == 0) | (magnitudes >= np.finfo(np.float32).tiny)).all()
    assert (magnitudes > 0).any()
    assert (magnitudes == 0).any()
    for isa, result in zip(isas, results, strict=True):
        np.testing.assert_array_equal(result, results[0], err_msg=isa)
