"""Products of int8 rows with quantised weights: against float64, against the documented order of operations to the bit,
and the same bits however the work is cut."""

from typing import Any

import numpy as np
import pytest
import torch
from gguf import quants

from quire import _native
from tests.kernels.native.packed_weights import (
    ACT_BLOCK,
    BLOCKS,
    ISAS,
    LONG_BLOCKS,
    STORED,
    Packed,
    Stack,
    dequantised,
    each_isa,
    empty_rows,
    finite_rows,
    quantised,
    random_acts,
    random_stack,
    random_weights,
    rows_of,
    run,
    whole_blocks,
)

FORMATS = list(STORED)
SUPERS = {"q4k", "q5k", "q6k"}
HAVE_MINIMA = {"q4m", "q5m", "q4k", "q5k"}
CODEBOOKS = {"iq4nl", "iq4xs", "mxfp4", "nvfp4"}
FAST_ISAS = [isa for isa in ISAS if isa != "scalar"] or ISAS
ACTIVATIONS = {
    "none": lambda y: y,
    "relu": lambda y: y.clamp(min=0),
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


def multiply(
    packed: Packed | Stack, acts: np.ndarray, *, out: str = "f32", threads: int = 1, bias: np.ndarray | None = None,
    activation: str = "none", gated: bool = False, add_to: np.ndarray | None = None, logit_rows: bool = False,
) -> np.ndarray:  # fmt: skip
    """Rows of the result with three columns more, which must stay as they were. Mutates: nothing."""
    width = packed.num_outputs // 2 if gated else packed.num_outputs
    result = empty_rows(out, len(acts), width)
    if add_to is not None:
        result[:, :width] = add_to
    untouched = result[:, -3:].copy()
    plan = _native.Plan(threads, max(1, len(acts)), max(1, len(acts)))
    plan.gemm(
        packed.weight, 0 if bias is None else bias.ctypes.data, rows_of(acts), rows_of(result),
        getattr(_native.Activation, activation), gated, add_to is not None, logit_rows,
    )  # fmt: skip
    run(plan, np.zeros(1 if logit_rows else len(acts)), num_logit_rows=len(acts) if logit_rows else 0)
    padded = width % 2 if out == "bf16" else 0
    assert np.array_equal(result[:, -3:][:, padded:].view(np.uint8), untouched[:, padded:].view(np.uint8))
    return result[:, : -3 + padded]


def widened(rows: np.ndarray) -> np.ndarray:
    """fp32, bf16 or int8 rows as float64."""
    if rows.dtype == ACT_BLOCK:
        return dequantised(rows)
    return (rows.astype(np.uint32) << 16).view(np.float32).astype(np.float64) if rows.dtype == np.uint16 else rows


def expected(packed: Packed, acts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute the product in float64. Returns: it, and how far fp32 sums of blocks may be from it."""
    weights, x = packed.decoded().astype(np.float64), dequantised(acts)
    # Minimum and multiple of a block are summed apart and may cancel each other.
    sizes = np.abs(x) @ (np.abs(weights).max(1, keepdims=True) * np.ones_like(weights)).T * 16
    return x @ weights.T, sizes * 2.0**-23


def in_documented_order(format_name: str, shape: tuple[int, int], acts: np.ndarray) -> np.ndarray:
    """The product with `random_weights(format_name, *shape)`, from GGUF's blocks, in the order of native/ops/gemm.h.

    Fused multiply-adds are a product and a sum with 64-bit significands, then rounded: a product of two fp32 is exact
    in them.
    """
    d, m, integers = factors(format_name, shape)
    num_outputs, num_parts, part = integers.shape
    q = acts["q"].reshape(len(acts), num_parts, part).astype(np.int64)
    y = np.zeros((len(acts), num_outputs), np.float32)
    for b in range(num_parts):
        block = acts[:, b * part // 32, None]
        exact = q[:, b] @ integers[:, b].T
        y = (exact.astype(np.float32).astype(np.longdouble) * (d[:, b] * block["scale"]) + y).astype(np.float32)
        if format_name in HAVE_MINIMA:
            y = (m[:, b].astype(np.longdouble) * block["scaled_sum"] + y).astype(np.float32)
    return y


def factors(format_name: str, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """d and m of gemm.h, fp32, and the integers about their centre, of `random_weights(format_name, *shape)`.

    Shapes: d, m `[N, parts]`, integers `[N, parts, 16 or 32]`.
    """
    stored = STORED[format_name]
    raw = finite_rows(stored, *shape)
    if format_name in CODEBOOKS:
        return codebook_factors(stored, raw.reshape(shape[0], -1, BLOCKS[stored].block_bytes))
    part = 16 if format_name == "q6k" else 32
    num_outputs, num_parts = shape[0], shape[1] // part
    if format_name in SUPERS:
        d, m, integers = super_factors(stored, raw.reshape(-1, BLOCKS[stored].block_bytes))
        d, m, integers = (values.reshape(num_outputs, num_parts, -1) for values in (d, m, integers))
        d, m = d[..., 0], m[..., 0]
    else:
        raw = raw.reshape(num_outputs, num_parts, -1)
        d, m = (raw[:, :, i : i + 2].copy().view(np.float16)[..., 0].astype(np.float32) for i in (0, 2))
        pairs = raw[:, :, -16:].astype(np.int64)
        integers = np.concatenate([pairs & 15, pairs >> 4], 2) - {"q4": 8, "q5": 16}.get(format_name, 0)
        if format_name in ("q5", "q5m"):
            integers += np.unpackbits(raw[:, :, -20:-16], axis=2, bitorder="little").astype(np.int64) << 4
        if format_name == "q8":
            integers = raw[:, :, 2:].view(np.int8).astype(np.int64)
    return d, m, integers


def codebook_factors(stored: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `factors`. Shapes: blocks uint8 `[N, blocks, bytes]`."""
    codebook = np.array(quants.IQ4_NL.kvalues if stored.startswith("IQ4") else quants.MXFP4.kvalues)
    pairs, part = blocks[..., 8:].reshape(*blocks.shape[:2], -1, 16) if stored == "IQ4_XS" else blocks[..., -16:], 32
    if stored == "MXFP4":
        d = np.ldexp(np.float32(0.5), blocks[..., 0].astype(int) - 127)
    elif stored == "NVFP4":
        scales = torch.from_numpy(blocks[..., 4:6].copy()).view(torch.float8_e4m3fn).float().numpy()
        d, part = blocks[..., :4].copy().view(np.float32) * scales, 16
    else:
        d = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    if stored == "IQ4_XS":
        lower = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).reshape(*blocks.shape[:2], 8)
        upper = blocks[..., 2:4].copy().view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
        d = d * (lower + 16.0 * upper - 32).astype(np.float32)
    integers = codebook[np.concatenate([pairs & 15, pairs >> 4], -1)].reshape(len(blocks), -1, part)
    d = d.reshape(len(blocks), -1).astype(np.float32)
    return d, np.zeros_like(d), integers.astype(np.int64)


def super_factors(stored: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """d and m of gemm.h, fp32, and the integers about their centre, found by decoding blocks with other factors.

    Shapes: blocks `[N, bytes]` -> d and m `[N, 8 or 16, 1]`, integers `[N, 8 or 16, 32 or 16]`.
    """
    one = np.array([1.0], np.float16).view(np.uint8)
    plain = blocks.copy()
    if stored == "Q6_K":
        d, scales = blocks[:, 208:210].copy().view(np.float16), blocks[:, 192:208].view(np.int8)
        plain[:, 192:208], plain[:, 208:210] = 1, one
        integers = quants.dequantize(plain, quants.GGMLQuantizationType[stored]).reshape(-1, 16, 16)
        found = d.astype(np.float32) * scales
        return found[..., None], np.zeros_like(found)[..., None], integers.astype(np.int64)
    plain[:, :16] = np.array([*one, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1], np.uint8)
    integers = quants.dequantize(plain, quants.GGMLQuantizationType[stored]).reshape(-1, 8, 32)
    scales, minima = quants.Q4_K.get_scale_min(blocks[:, 4:16])
    d, e = (blocks[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    found_d, found_m = d * scales.astype(np.float32), -(e * minima.astype(np.float32))
    return found_d.reshape(-1, 8, 1), found_m.reshape(-1, 8, 1), integers.astype(np.int64)


def assert_same(results: list[np.ndarray]) -> None:
    """At least two of them: one alone would be compared with nothing."""
    assert len(results) > 1
    assert all(np.array_equal(result.view(np.uint8), results[0].view(np.uint8)) for result in results)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("shape", [(1, 16, 32), (2, 40, 64), (5, 33, 96), (13, 1, 32), (70, 576, 576), (9, 65, 1536)])
def test_product_is_that_of_the_decoded_values(format_name: str, shape: tuple[int, int, int]) -> None:
    num_rows, num_outputs, num_inputs = shape
    num_inputs = whole_blocks(format_name, num_inputs)
    packed, acts = random_weights(format_name, num_outputs, num_inputs), random_acts(num_rows, num_inputs)
    wanted, error = expected(packed, acts)
    found = multiply(packed, acts)
    assert (np.abs(found - wanted) <= error).all()
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("format_name", FORMATS)
def test_extreme_integers_do_not_overflow(format_name: str) -> None:
    stored = STORED[format_name]
    block = BLOCKS[stored]
    rows = np.full((32, 2 if block.block_len == 32 else 1, block.block_bytes), 0xFF, dtype=np.uint8)
    rows[1::2] = 0x77 if stored in ("MXFP4", "NVFP4") else 0
    if stored == "Q8_0":
        rows[::2], rows[1::2] = 0x80, 0x7F
    # Powers of two, so that sums are exact; scales of 127 and -128 of Q6_K.
    columns = dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,))
    columns |= {"Q6_K": (208,), "MXFP4": (), "NVFP4": ()}
    for column in columns.get(stored, (0, 2)):
        rows[..., column : column + 2] = np.array([2.0**-4], np.float16).view(np.uint8)
    if stored == "MXFP4":
        rows[..., 0] = 123
    if stored == "NVFP4":
        rows[..., :4], rows[..., 4:6] = np.array([2.0**-4], np.float32).view(np.uint8), 0x38
    if stored == "Q6_K":
        rows[..., 192:208] = np.where(np.arange(32) % 4 < 2, 0x7F, 0x80)[:, None, None]
    num_inputs = rows.shape[1] * block.block_len
    packed = Packed(format_name, 32, num_inputs).add_rows(stored, rows.reshape(32, -1))
    acts = quantised(np.array([[127.0], [-127.0]], np.float32) * np.ones((2, num_inputs), np.float32))
    wanted = dequantised(acts) @ packed.decoded().astype(np.float64).T
    for found in each_isa(lambda: multiply(packed, acts)):
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(("num_rows", "least"), [(1, 160), (2, 160), (3, 160), (4, 160), (5, 608), (7, 160), (13, 576)])
def test_sums_are_in_the_documented_order_to_the_bit(format_name: str, num_rows: int, least: int) -> None:
    num_inputs = whole_blocks(format_name, least) + 256 * (format_name in LONG_BLOCKS)
    packed, acts = random_weights(format_name, 49, num_inputs), random_acts(num_rows, num_inputs)
    assert_same([in_documented_order(format_name, (49, num_inputs), acts), *each_isa(lambda: multiply(packed, acts))])


@pytest.mark.parametrize(
    ("out", "activation", "gated"), [("q8", "silu", True), ("bf16", "silu", False), ("q8", "gelu", False)]
)
def test_instruction_sets_agree_on_every_way_out(out: str, activation: str, gated: bool) -> None:
    packed, acts = random_weights("q4m", 64, 64), random_acts(3, 64)
    y = torch.from_numpy(in_documented_order("q4m", (64, 64), acts)).double()
    wanted = (ACTIVATIONS[activation](y[:, :32]) * y[:, 32:] if gated else ACTIVATIONS[activation](y)).numpy()
    first, *others = each_isa(lambda: multiply(packed, acts, out=out, activation=activation, gated=gated))
    # Half a step of int8, or half of bf16's last bit, and the error of an activation.
    rounding = np.repeat(first["scale"], 32, axis=1) / 2 if out == "q8" else np.abs(wanted) * 2.0**-8
    assert (np.abs(widened(first) - wanted) <= rounding + np.abs(wanted).max() * 2e-6).all()
    assert all(np.array_equal(other.view(np.uint8), first.view(np.uint8)) for other in others)


@pytest.mark.parametrize("isa", FAST_ISAS)
@pytest.mark.parametrize("format_name", FORMATS)
def test_row_alone_is_the_row_in_a_batch(format_name: str, isa: str) -> None:
    num_inputs = whole_blocks(format_name, 96)
    packed, acts = random_weights(format_name, 72, num_inputs), random_acts(70, num_inputs)

    def all_ways() -> np.ndarray:
        whole = multiply(packed, acts)
        for num_rows in (*range(1, 15), 24, 63, 64, 65):
            assert_same([multiply(packed, acts[:num_rows]), whole[:num_rows]])
            assert_same([multiply(packed, acts[70 - num_rows :]), whole[70 - num_rows :]])
        return whole

    assert len(list(each_isa(all_ways, [isa]))) == 1


STACKS = {
    "three": (("q4k", 96), ("q6k", 32), ("q8", 41)),
    "long": (("q6k", 320), ("q5k", 1248)),
    "four": (("q4", 32), ("q5m", 64), ("q5", 32), ("q4m", 32)),
    "codebooks": (("mxfp4", 96), ("iq4xs", 32), ("nvfp4", 64), ("q8", 32), ("iq4nl", 41)),
}


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("isa", FAST_ISAS)
def test_parts_of_a_stack_are_multiplied_as_each_alone(stack: str, isa: str) -> None:
    packed, acts = random_stack(*STACKS[stack]), random_acts(150, 256)
    residual = np.random.default_rng(6).standard_normal((150, packed.num_outputs), dtype=np.float32)

    def all_ways() -> np.ndarray:
        for num_rows in (1, 6, 7, 64, 150):
            rows, sums = acts[:num_rows], residual[:num_rows]
            wanted = np.concatenate([multiply(part, rows) for part in packed.parts], 1)
            for threads in (1, 2, 5):
                assert_same([multiply(packed, rows, threads=threads), wanted])
                assert_same([multiply(packed, rows, threads=threads, bias=sums[0]), wanted + sums[0]])
                assert_same([multiply(packed, rows, threads=threads, add_to=sums), sums + wanted])
        return wanted

    assert len(list(each_isa(all_ways, [isa]))) == 1


@pytest.mark.parametrize("parts", [(("q4k", 96), ("q6k", 96)), (("q4k", 64), ("q6k", 32), ("q5k", 64))])
@pytest.mark.parametrize("isa", FAST_ISAS)
def test_gate_and_up_may_differ_in_format(parts: tuple[tuple[str, int], ...], isa: str) -> None:
    """In the second stack the ups begin in the middle of a part, and a panel of them ends in the next."""
    packed, acts = random_stack(*parts), random_acts(70, 256)
    half = packed.num_outputs // 2

    def all_ways() -> np.ndarray:
        whole = torch.from_numpy(multiply(packed, acts))
        found = multiply(packed, acts, activation="relu", gated=True, threads=2)
        assert torch.equal(torch.from_numpy(found.copy()), whole[:, :half].clamp(min=0) * whole[:, half:])
        return found

    assert len(list(each_isa(all_ways, [isa]))) == 1


def test_row_of_a_stack_is_read_from_its_part() -> None:
    packed = random_stack(*STACKS["three"])
    wanted = np.concatenate([part.decoded() for part in packed.parts])
    for found in each_isa(packed.decoded):
        assert_same([found, wanted])


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        random_stack(("q4", 48), ("q8", 32))
    with pytest.raises(ValueError, match="want the same rows"):
        Stack(random_weights("q4", 32, 64), random_weights("q8", 32, 96))
    with pytest.raises(ValueError, match="want the same rows"):
        Stack(random_weights("q4", 32, 64), Packed("f32", 32, 64))


@pytest.mark.parametrize("shape", [(1, 576), (6, 960), (11, 40), (64, 50), (70, 96), (200, 32), (150, 700)])
@pytest.mark.parametrize("options", [{}, {"out": "q8", "gated": True, "activation": "silu"}, {"out": "bf16"}])
def test_number_of_threads_changes_nothing(shape: tuple[int, int], options: dict[str, Any]) -> None:
    num_rows, num_outputs = shape
    if options.get("gated"):
        num_outputs = -(-num_outputs // 32) * 64
    packed, acts = random_weights("q4m", num_outputs, 64), random_acts(num_rows, 64)
    assert_same([multiply(packed, acts, threads=threads, **options) for threads in (1, 2, 3, 7)])


@pytest.mark.parametrize("out", ["f32", "bf16", "q8"])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("gated", [False, True])
def test_bias_and_activation_of_every_type_of_rows(out: str, activation: str, gated: bool) -> None:
    packed, acts = random_weights("q8", 128, 64, seed=1), random_acts(5, 64)
    acts["scale"], acts["scaled_sum"] = acts["scale"] * 0.02, acts["scaled_sum"] * np.float32(0.02)
    bias = np.random.default_rng(2).standard_normal(128).astype(np.float32)
    y = torch.from_numpy(expected(packed, acts)[0] + bias)
    wanted = ACTIVATIONS[activation](y)
    if gated:
        wanted = ACTIVATIONS[activation](y[:, :64]) * y[:, 64:]
    exact = multiply(packed, acts, bias=bias, activation=activation, gated=gated)
    torch.testing.assert_close(torch.from_numpy(exact).double(), wanted, rtol=2e-5, atol=2e-5)
    found = multiply(packed, acts, out=out, bias=bias, activation=activation, gated=gated)
    if out == "q8":
        assert_same([found, quantised(exact)])
    elif out == "bf16":
        assert_same([found, torch.from_numpy(exact.copy()).bfloat16().view(torch.uint16).numpy()])


@pytest.mark.parametrize("isa", FAST_ISAS)
def test_gated_half_may_end_within_a_panel(isa: str) -> None:
    packed, acts = random_weights("q4", 96, 64), random_acts(9, 64)
    whole = torch.from_numpy(multiply(packed, acts))
    for found in each_isa(lambda: multiply(packed, acts, activation="relu", gated=True), [isa]):
        assert torch.equal(torch.from_numpy(found.copy()), whole[:, :48].clamp(min=0) * whole[:, 48:])


@pytest.mark.parametrize("num_outputs", [31, 33])
def test_odd_bf16_row_ends_in_a_zero(num_outputs: int) -> None:
    found = multiply(random_weights("q4", num_outputs, 32), random_acts(3, 32), out="bf16")
    assert found.shape == (3, num_outputs + 1)
    assert (found[:, -1] == 0).all()
    assert (found[:, :-1] != 0).any()


@pytest.mark.parametrize("num_outputs", [40, 64])
def test_added_to_the_residual(num_outputs: int) -> None:
    packed, acts = random_weights("q4m", num_outputs, 96), random_acts(9, 96)
    residual = np.random.default_rng(3).standard_normal((9, num_outputs)).astype(np.float32)
    for threads in (1, 2):
        found = multiply(packed, acts, add_to=residual, threads=threads)
        assert np.array_equal(found, residual + multiply(packed, acts))


def test_only_rows_that_need_logits() -> None:
    packed, acts = random_weights("q8", 40, 32), random_acts(4, 32)
    assert_same([multiply(packed, acts, logit_rows=True), multiply(packed, acts)])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_reaches_its_row_only(isa: str, bad: float) -> None:
    values = np.random.default_rng(4).standard_normal((7, 64)).astype(np.float32)
    packed = random_weights("q4m", 40, 64)
    wanted = multiply(packed, quantised(values))
    values[3, 5] = bad
    acts = np.zeros((7, 2), dtype=ACT_BLOCK)
    plan = _native.Plan(1, 7, 1)
    plan.activate(rows_of(values), rows_of(acts), 64)
    for _ in each_isa(lambda: run(plan, np.zeros(7)) or acts, [isa]):
        assert np.isnan(acts[3, 0]["scale"])
        found = multiply(packed, acts)
        assert np.isnan(found[3]).all()
        assert_same([np.delete(found, 3, 0), np.delete(wanted, 3, 0)])


def test_rows_after_the_last_and_a_step_without_rows_are_left_alone() -> None:
    packed, acts = random_weights("q4m", 40, 64), random_acts(4, 64)
    out = empty_rows("f32", 4, 37)
    plan = _native.Plan(2, 4, 1)
    plan.gemm(packed.weight, 0, rows_of(acts), rows_of(out))
    run(plan, np.zeros(0))
    assert np.isnan(out).all()
    acts[2:].view(np.uint8)[:] = 0xFF
    run(plan, np.zeros(2))
    assert np.isfinite(out[:2]).all()
    assert np.isnan(out[2:]).all()


# --- Writing int8 rows ------------------------------------------------------------------------------------------------


def quantise(values: np.ndarray) -> np.ndarray:
    acts = empty_rows("q8", *values.shape)[:, :-3]
    plan = _native.Plan(1, len(values), 1)
    plan.activate(rows_of(values), rows_of(acts), values.shape[1])
    run(plan, np.zeros(len(values)))
    return acts


def test_quantised_rows_are_the_formulas_bit_for_bit() -> None:
    random = np.random.default_rng(5)
    values = (random.standard_normal((50, 320)) * np.exp(random.uniform(-30, 30, (50, 1)))).astype(np.float32)
    values[3, 64:96] = 0
    values[4, 64:96] = np.arange(-16, 16)  # halves become ties
    values[5, 0:32] = [127, *np.arange(-15, 16) * 0.5]
    assert_same([quantised(values), *each_isa(lambda: quantise(values))])


def test_blocks_that_are_not_finite_hold_no_garbage() -> None:
    values = np.ones((4, 64), dtype=np.float32)
    values[0, 3], values[1, 40], values[2, 7], values[3, 0] = np.nan, np.inf, -np.inf, 1e-44
    good = np.isfinite(values).reshape(4, 2, 32).all(2)
    wanted = quantised(np.where(np.isfinite(values), values, np.float32(1)))
    for found in each_isa(lambda: quantise(values)):
        assert_same([found[good], wanted[good]])
        assert np.isnan(found[~good]["scale"]).all()
        assert np.isnan(found[~good]["scaled_sum"]).all()
        assert (found[~good]["q"] == 0).all()
        assert (found[~good]["sum"] == 0).all()
        assert (found[~good]["first_sum"] == 0).all()
