"""Results of `write_kv` in queries, keys and the pool, which is read by the layout of native/ops/kv_cache.h."""

import numpy as np
import pytest
import torch

from quire import _native
from tests.kernels.native.kv_steps import (
    ALL_FORMATS,
    FLOAT_DTYPES,
    Extras,
    Pool,
    Requests,
    Runner,
    Shape,
    as_stored,
    random_tokens,
)
from tests.kernels.native.packed_weights import ISAS, run

pytestmark = pytest.mark.usefixtures("chosen_isa")

MIXED = [(2, 5, 1), (0, 0, 40), (1, 31, 9), (3, 16, 2), (4, 15, 1)]
LENGTHS = [40, 40, 6, 18, 64]


def new_tokens(shape: Shape, requests: Requests, seed: int = 0) -> torch.Tensor:
    return torch.cat(random_tokens(shape, [count for _, _, count in requests], seed))


def write(
    shape: Shape, requests: Requests, qkv: torch.Tensor, extras: Extras | None = None, num_threads: int = 1
) -> tuple[Pool, Runner]:
    pool = Pool(shape, LENGTHS)
    runner = Runner(pool, extras or Extras(), max_tokens=len(qkv), num_threads=num_threads)
    runner.qkv[:] = qkv
    runner.run(requests, parts=1)
    return pool, runner


def read_block(pool: Pool, block: int, head: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [B, D] of one head's part of a block, in fp64."""
    shape = pool.shape
    b, d = shape.block_size, shape.head_size
    size = shape.block_bytes // shape.num_kv_heads
    start = block * pool.stride_bytes + head * size
    raw = pool.bytes[start : start + size]
    if shape.format == "i8":
        quads = -(-d // 4)
        key_bytes = b * quads * 4
        keys = raw[:key_bytes].numpy().reshape(-1, quads, 16, 4).transpose(0, 2, 1, 3).reshape(b, -1)[:, :d]
        values = raw[key_bytes : key_bytes + b * d].view(torch.int8).numpy()
        values = values.reshape(-1, d, 2).transpose(0, 2, 1).reshape(b, d)
        scales = raw[key_bytes + b * d :].numpy().view(np.float32).astype(np.float64).reshape(2, b, 1)
        return (keys.astype(np.float64) - 128) * scales[0], values * scales[1]
    floats = raw.view(FLOAT_DTYPES[shape.format])
    keys, values = floats.double().numpy().reshape(2, -1)
    if shape.format == "bf16":
        keys = keys.reshape(-1, d // 2, 16, 2).transpose(0, 2, 1, 3)
        values = values.reshape(-1, d, 2).transpose(0, 2, 1)
    else:
        keys = keys.reshape(-1, d, 16).transpose(0, 2, 1)
    return keys.reshape(b, d), values.reshape(b, d)


def check_pool(pool: Pool, runner: Runner, requests: Requests) -> None:
    """Check that the new tokens' slots hold the runner's keys and values, and that no other byte has changed."""
    shape = pool.shape
    _, keys, values = (part.unflatten(1, (-1, shape.head_size)) for part in runner.qkv.split(shape.widths, 1))
    expected_keys, expected_values = as_stored(keys, shape.format).numpy(), as_stored(values, shape.format).numpy()
    first = 0
    for row, start, count in requests:
        slots = np.arange(start, start + count)
        for head in range(shape.num_kv_heads):
            blocks = [
                read_block(pool, int(block), head) for block in pool.tables[row, : slots[-1] // shape.block_size + 1]
            ]
            for i, expected in enumerate((expected_keys, expected_values)):
                stored = np.concatenate([block[i] for block in blocks])[slots]
                np.testing.assert_array_equal(stored, expected[first : first + count, head])
        first += count


@pytest.mark.parametrize("kv_format", ALL_FORMATS)
@pytest.mark.parametrize(
    ("block_size", "head_size", "num_kv_heads"), [(16, 8, 1), (32, 64, 3), (64, 80, 2), (32, 6, 1)]
)
@pytest.mark.parametrize("isa", ISAS)
def test_keys_and_values_lie_where_documented(
    kv_format: str, block_size: int, head_size: int, num_kv_heads: int, isa: str
) -> None:
    _native.set_isa(isa)
    shape = Shape(num_kv_heads, num_kv_heads, head_size, block_size, kv_format)
    pool, runner = write(shape, MIXED, new_tokens(shape, MIXED))
    check_pool(pool, runner, MIXED)


@pytest.mark.parametrize("kv_format", ALL_FORMATS)
def test_nothing_else_is_written(kv_format: str) -> None:
    shape = Shape(format=kv_format, head_size=32)
    requests = [(0, 3, 5), (4, 31, 1)]
    pool, _ = write(shape, requests, new_tokens(shape, requests))
    value_bytes = {"f32": 4, "f16": 2, "bf16": 2}.get(kv_format, 1)
    written = int((pool.bytes != pool.fill).sum())
    scales = 2 * 4 if kv_format == "i8" else 0
    most = 6 * shape.num_kv_heads * (2 * 32 * value_bytes + scales)
    assert 0.9 * most < written <= most
    untouched = set(range(1, 10)) - {int(pool.tables[0, 0]), int(pool.tables[4, 0])}
    for block in untouched:
        start = block * pool.stride_bytes
        assert (pool.bytes[start : start + pool.stride_bytes] == pool.fill).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("head_size", "half"), [(6, 3), (16, 8), (80, 40), (64, 32), (80, 10), (12, 1)])
def test_queries_and_keys_are_rotated_by_pairs(isa: str, head_size: int, half: int) -> None:
    """Rotate the first 2 · half dimensions; the op `rope` does the same to rows of their own."""
    _native.set_isa(isa)
    shape = Shape(head_size=head_size, format="f32")
    extras = Extras(frequencies=torch.linspace(1.0, 0.01, half))
    qkv = new_tokens(shape, MIXED)
    pool, runner = write(shape, MIXED, qkv, extras)
    check_pool(pool, runner, MIXED)
    positions = torch.cat([torch.arange(start, start + count) for _, start, count in MIXED])
    angles = positions.float()[:, None] * extras.frequencies
    torch.testing.assert_close(runner.angles[0].double(), angles.double().cos(), atol=1e-7, rtol=0)
    cos, sin = (part[:, None] for part in runner.angles)
    q, k, v = (part.unflatten(1, (-1, head_size)) for part in qkv.split(shape.widths, 1))
    for x, column in ((q, 0), (k, shape.widths[0])):
        a, b = x[..., :half], x[..., half : 2 * half]
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1).flatten(1)
        assert torch.equal(runner.qkv[:, column : column + rotated.shape[1]], rotated)
        assert torch.equal(roped(runner, x), rotated)
    assert torch.equal(runner.qkv[:, -shape.widths[2] :], v.flatten(1))


def roped(runner: Runner, x: torch.Tensor) -> torch.Tensor:
    """Heads [T, heads, D] after the op `rope` with a runner's angles. Shapes: [T, heads * D]."""
    x = x.contiguous()
    num_tokens, heads, head_size = x.shape
    out = torch.full((num_tokens, heads * head_size), torch.nan)
    plan = _native.Plan(2, num_tokens, 1)
    rows = [_native.Rows(part.data_ptr(), 4 * heads * head_size, _native.RowType.f32) for part in (x, out)]
    cos, sin = (part.data_ptr() for part in runner.angles)
    plan.rope(*rows, heads, head_size, cos, sin, len(runner.extras.frequencies))  # type: ignore[arg-type]
    run(plan, np.zeros(num_tokens))
    return out


@pytest.mark.parametrize("isa", ISAS)
def test_angles_of_far_positions_are_fp32_products_and_their_cosines_exact(isa: str) -> None:
    """A million tokens on, multiples of pi / 2 in a single double would be wrong by 10^-5 of a circle."""
    _native.set_isa(isa)
    start, count, half = 2**20, 300, 9
    frequencies = torch.linspace(1.0, 0.37, half)
    angles = torch.zeros(2, count, half)
    plan = _native.Plan(2, count, 1)
    plan.rotary(frequencies.data_ptr(), angles[0].data_ptr(), angles[1].data_ptr(), half)
    run(plan, np.zeros(count), start=start)
    exact = (torch.arange(start, start + count).float()[:, None] * frequencies).numpy().astype(np.longdouble)
    for found, wanted in zip(angles, (np.cos(exact), np.sin(exact)), strict=True):
        np.testing.assert_allclose(found.numpy(), wanted.astype(np.float64), rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("isa", ISAS)
def test_cosines_and_sines_are_scaled_by_period_and_past_the_last_by_the_last(isa: str) -> None:
    _native.set_isa(isa)
    count, half, period = 40, 5, 16
    frequencies, scales = torch.linspace(1.0, 0.37, half), torch.tensor([1.0, 1.25])
    plain, scaled = torch.zeros(2, 2, count, half)
    plan = _native.Plan(2, count, 1)
    plan.rotary(frequencies.data_ptr(), plain[0].data_ptr(), plain[1].data_ptr(), half)
    plan.rotary(frequencies.data_ptr(), scaled[0].data_ptr(), scaled[1].data_ptr(), half, scales.data_ptr(), 2, period)
    run(plan, np.zeros(count))
    factors = scales[(torch.arange(count) // period).clamp(max=1)]
    assert torch.equal(scaled, plain * factors[:, None])


def test_queries_may_turn_by_other_values_than_keys() -> None:
    shape = Shape(head_size=16, format="f32")
    qkv = new_tokens(shape, MIXED)
    pool, plain = write(shape, MIXED, qkv, Extras(frequencies=torch.linspace(1.0, 0.01, 8)))
    other_pool = Pool(shape, LENGTHS)
    other = Runner(other_pool, Extras(), max_tokens=len(qkv))
    other.qkv[:] = qkv
    q, (cos, sin), (q_cos, q_sin) = other.qkv.data_ptr(), plain.angles, 2 * plain.angles
    k = q + shape.widths[0] * 4
    other.plan = _native.Plan(1, len(qkv), len(LENGTHS))
    other.plan.write_kv(
        q, k, k + shape.widths[1] * 4, *[sum(shape.widths)] * 3, shape.num_heads, cos=cos.data_ptr(),
        sin=sin.data_ptr(), half=8, kv=other_pool.layer(), q_cos=q_cos.data_ptr(), q_sin=q_sin.data_ptr(),
    )  # fmt: skip
    other.run(MIXED, parts=1)
    assert torch.equal(other_pool.bytes, pool.bytes)
    queries = shape.widths[0]
    assert torch.equal(other.qkv[:, :queries], 2 * plain.qkv[:, :queries])
    assert torch.equal(other.qkv[:, queries:], plain.qkv[:, queries:])


def test_queries_and_keys_are_normalised_before_they_are_rotated() -> None:
    shape = Shape(head_size=32, format="f32")
    generator = torch.Generator().manual_seed(5)
    q_norm, k_norm = torch.rand(2, 32, generator=generator) + 0.5
    extras = Extras(q_norm=q_norm, k_norm=k_norm, frequencies=torch.linspace(1.0, 0.01, 16), epsilon=1e-5)
    qkv = new_tokens(shape, MIXED)
    pool, runner = write(shape, MIXED, qkv, extras)
    check_pool(pool, runner, MIXED)
    cos, sin = (part[:, None].double() for part in runner.angles)
    for part, weight, column in zip(
        qkv.split(shape.widths, 1)[:2], (q_norm, k_norm), (0, shape.widths[0]), strict=True
    ):
        x = part.double().unflatten(1, (-1, 32))
        x = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        expected = torch.cat([x[..., :16] * cos - x[..., 16:] * sin, x[..., 16:] * cos + x[..., :16] * sin], -1)
        got = runner.qkv[:, column : column + part.shape[1]].double()
        torch.testing.assert_close(got, expected.flatten(1), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kv_format", ALL_FORMATS)
def test_bits_depend_on_neither_threads_nor_instruction_set_nor_steps(kv_format: str) -> None:
    shape = Shape(6, 3, 24, 16, kv_format)
    q_norm, k_norm = torch.rand(2, 24, generator=torch.Generator().manual_seed(3))
    extras = Extras(q_norm=q_norm, k_norm=k_norm, frequencies=torch.linspace(1.0, 0.01, 12))
    qkv = new_tokens(shape, MIXED)
    pool, runner = write(shape, MIXED, qkv, extras)
    for isa in ISAS:
        _native.set_isa(isa)
        for num_threads in (1, 2, 3, 7):
            other_pool, other = write(shape, MIXED, qkv, extras, num_threads)
            assert torch.equal(other_pool.bytes, pool.bytes)
            assert torch.equal(other.qkv.view(torch.int32), runner.qkv.view(torch.int32))
    one_by_one = Pool(shape, LENGTHS)
    single = Runner(one_by_one, extras, max_tokens=1, num_threads=2)
    token = 0
    for row, start, count in MIXED:
        for position in range(start, start + count):
            single.qkv[0] = qkv[token]
            single.run([(row, position, 1)], parts=1)
            token += 1
    assert torch.equal(one_by_one.bytes, pool.bytes)


@pytest.mark.parametrize("kv_format", ["f16", "bf16"])
@pytest.mark.parametrize("isa", ISAS)
def test_rounding_to_halves_is_torchs_for_every_kind_of_value(kv_format: str, isa: str) -> None:
    """Ties, halves' denormals, what is too large, and NaN of any payload."""
    _native.set_isa(isa)
    shape = Shape(1, 1, 512, 16, kv_format)
    random = np.random.default_rng(2)
    bits = random.integers(0, 2**32, (16, sum(shape.widths)), dtype=np.uint32)
    bits[::2] &= 0xFFFF_8000 if kv_format == "bf16" else 0xFFFF_F000  # ties
    # Exponents of halves and just outside of these; then infinities and NaN.
    exponents = random.integers(100, 145, bits.shape, dtype=np.uint32) << 23
    bits[4:] = (bits[4:] & 0x807F_FFFF) | exponents[4:]
    bits[14:] |= 0x7F80_0000
    bits[15, ::2] = 0x7FFF_FFFF
    bits[13] = np.array([65519.99, 65520.0], np.float32).view(np.uint32)[random.integers(0, 2, bits.shape[1])]
    qkv = torch.from_numpy(bits.view(np.float32))
    pool, _ = write(shape, [(0, 0, 16)], qkv)
    block = read_block(pool, int(pool.tables[0, 0]), 0)
    for found, values in zip(block, qkv.split(shape.widths, 1)[1:], strict=True):
        np.testing.assert_array_equal(found, as_stored(values, kv_format).numpy())  # NaN equals NaN here


def test_keys_and_values_alone_need_no_queries() -> None:
    shape = Shape(format="f32", head_size=16)
    qkv = new_tokens(shape, MIXED)
    pool, _ = write(shape, MIXED, qkv)
    alone = Pool(shape, LENGTHS)
    other = Runner(alone, Extras(), max_tokens=len(qkv))
    other.qkv[:] = qkv
    plan = _native.Plan(1, len(qkv), len(LENGTHS))
    k = other.qkv.data_ptr() + shape.widths[0] * 4
    plan.write_kv(0, k, k + shape.widths[1] * 4, *[sum(shape.widths)] * 3, shape.num_heads, kv=alone.layer())
    other.plan = plan
    other.run(MIXED, parts=1)
    assert torch.equal(alone.bytes, pool.bytes)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_as_int8(isa: str, bad: float) -> None:
    _native.set_isa(isa)
    shape = Shape(1, 1, 16, 16, "i8")
    qkv = new_tokens(shape, [(0, 0, 3)])
    qkv[1, 16 + 5] = bad
    qkv[2, 32 + 3] = bad
    pool, _ = write(shape, [(0, 0, 3)], qkv)
    keys, values = read_block(pool, int(pool.tables[0, 0]), 0)
    assert np.isfinite(keys[[0, 2]]).all()
    assert np.isfinite(values[[0, 1]]).all()
    assert not np.isfinite(keys[1]).any()
    assert not np.isfinite(values[2]).any()


def test_impossible_shapes_are_refused() -> None:
    for block_size, head_size in ((24, 64), (32, 63), (32, 0), (0, 64), (32, 2048)):
        with pytest.raises(ValueError, match=r"block size|head size"):
            _native.KvLayer(0, 0, block_size, 1, head_size, _native.KvFormat.f32, 0)


@pytest.mark.parametrize(("kv_format", "largest"), [("e4m3", 448.0), ("e5m2", 57344.0)])
@pytest.mark.parametrize("isa", ISAS)
def test_fp8_rounds_to_even_and_keeps_finite_values_finite(isa: str, kv_format: str, largest: float) -> None:
    _native.set_isa(isa)
    shape = Shape(1, 1, 16, 16, kv_format)
    least = float(torch.finfo(FLOAT_DTYPES[kv_format]).smallest_normal)
    ties = [1 + 2**-4, 1 + 3 * 2**-4, 1 + 2**-3, 1 + 3 * 2**-3, least / 16, 3 * least / 16, least * 0.99]
    values = torch.tensor([0.0, -0.0, largest, 1e30, -1e30, *ties, *(-x for x in ties)])[:16]
    pool, _ = write(shape, [(0, 0, 1)], torch.cat([values, values, values])[None])
    expected = values.clamp(-largest, largest).to(FLOAT_DTYPES[kv_format]).double().numpy()
    for found in read_block(pool, int(pool.tables[0, 0]), 0):
        np.testing.assert_array_equal(found[0], expected)
        assert np.array_equal(np.signbit(found[0]), np.signbit(expected))
