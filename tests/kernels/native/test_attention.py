"""Native attention against fp64, and the same bits however a row is computed.

The oracle is softmax(q k^T / sqrt(D)) v in fp64 over keys and values as the pool's format holds them. Everything in the
pool that was not written is NaN.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from quire import _native
from tests.kernels.native.kv_steps import (
    ALL_FORMATS,
    FORMATS,
    Extras,
    Pool,
    Requests,
    Runner,
    Shape,
    as_stored,
    attention,
    check_nan_stays,
    random_tokens,
    rising_tokens,
    run_steps,
    split,
    visible,
)
from tests.kernels.native.packed_weights import ACT_BLOCK, ISAS

pytestmark = pytest.mark.usefixtures("chosen_isa")

VECTOR_ISAS = [isa for isa in ISAS if isa != "scalar"] or ISAS
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def oracle(tokens: torch.Tensor, shape: Shape, window: int = 0) -> torch.Tensor:
    """[T, H D] in fp64 for all positions of one request."""
    q, k, v = split(tokens, shape)
    if shape.format == "i8":
        q = as_stored(q, "i8")
    mask = visible(len(tokens), window)
    k, v = as_stored(k, shape.format), as_stored(v, shape.format)
    return scaled_dot_product_attention(q.double(), k, v, attn_mask=mask).transpose(0, 1).flatten(1)


def plain(tokens: torch.Tensor, shape: Shape, window: int = 0) -> torch.Tensor:
    """PyTorch's own attention in the format's dtype; in fp16 for int8, whose queries are coarser."""
    dtype = DTYPES.get(shape.format, torch.float16)
    q, k, v = (part.to(dtype) for part in split(tokens, shape))
    return scaled_dot_product_attention(q, k, v, attn_mask=visible(len(tokens), window)).transpose(0, 1).flatten(1)


def floats(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [rows.view(torch.float32) for rows in outputs]


def whole(lengths: Sequence[int]) -> list[Requests]:
    return [[(row, 0, length) for row, length in enumerate(lengths)]]


def in_chunks(lengths: Sequence[int], sizes: Sequence[int]) -> list[Requests]:
    """Steps that mix all requests, each going on by the next size."""
    steps, done, next_size = [], [0] * len(lengths), itertools.cycle(sizes)
    while any(d < length for d, length in zip(done, lengths, strict=True)):
        step = []
        for row, length in enumerate(lengths):
            count = min(next(next_size), length - done[row])
            if count > 0:
                step.append((row, done[row], count))
                done[row] += count
        if step:
            steps.append(step)
    return steps


SHAPES = [
    pytest.param(4, 2, 64, 32, id="gqa"),
    pytest.param(9, 3, 64, 16, id="smollm2"),
    pytest.param(3, 3, 128, 64, id="mha"),
    pytest.param(7, 1, 80, 32, id="mqa"),
    pytest.param(14, 2, 96, 32, id="group-of-7"),
    pytest.param(2, 1, 256, 16, id="large"),
    pytest.param(4, 2, 8, 16, id="tiny"),
    pytest.param(2, 2, 6, 32, id="odd-quads"),
    pytest.param(40, 1, 16, 32, id="more-rows-than-an-item"),
]


@pytest.mark.parametrize("kv_format", ALL_FORMATS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size", "block_size"), SHAPES)
@pytest.mark.parametrize("window", [0, 21, 140])
def test_error_is_at_most_twice_that_of_torch(
    kv_format: str, num_heads: int, num_kv_heads: int, head_size: int, block_size: int, window: int
) -> None:
    shape = Shape(num_heads, num_kv_heads, head_size, block_size, kv_format)
    lengths = [150, 33, 1]
    tokens = random_tokens(shape, lengths)
    outputs = floats(run_steps(Pool(shape, lengths), tokens, whole(lengths), Extras(window=window), num_threads=2))
    expected = torch.cat([oracle(rows, shape, window) for rows in tokens])
    error = (torch.cat(outputs).double() - expected).abs()
    allowed = (torch.cat([plain(rows, shape, window) for rows in tokens]).double() - expected).abs()
    assert error.max() <= 2 * allowed.max()
    assert error.mean() <= 2 * allowed.mean()


@pytest.mark.parametrize(
    ("kv_format", "tolerance"),
    [("f32", 1e-6), ("f16", 1e-3), ("bf16", 1e-2), ("i8", 2e-2), ("e4m3", 2e-6), ("e5m2", 2e-6)],
)
def test_scores_are_held_within_a_soft_cap(kv_format: str, tolerance: float) -> None:
    shape, lengths = Shape(6, 2, 64, 32, kv_format), [150, 33]
    tokens = [rows * 2 for rows in random_tokens(shape, lengths)]

    def attended(soft_cap: float) -> torch.Tensor:
        extras = Extras(soft_cap=soft_cap)
        return torch.cat(floats(run_steps(Pool(shape, lengths), tokens, in_chunks(lengths, [7, 50]), extras)))

    expected = [attention(rows, shape, Extras(soft_cap=3.0)) for rows in tokens]
    found = []
    for isa in ISAS:
        _native.set_isa(isa)
        found.append(attended(3.0))
    assert (found[0] - torch.cat(expected)).abs().max() <= tolerance * torch.cat(expected).abs().max()
    assert all(torch.equal(found[0], other) for other in found)
    assert not torch.allclose(found[0], attended(0.0), atol=0.1)


@pytest.mark.parametrize(("kv_format", "tolerance"), [("f32", 1e-6), ("f16", 1e-3), ("bf16", 8e-3), ("i8", 8e-3)])
@pytest.mark.parametrize("window", [0, 20])
def test_sinks_take_their_share_of_the_weights(kv_format: str, tolerance: float, window: int) -> None:
    """From next to none of it to all of it; whole and in chunks, on any number of threads and instruction set."""
    shape, lengths = Shape(6, 2, 64, 32, kv_format), [300, 33]
    tokens = random_tokens(shape, lengths)
    sinks = torch.tensor([-200.0, -1.0, 0.0, 1.0, 4.0, 200.0])
    extras = Extras(window=window, sinks=sinks)
    expected = [attention(rows, shape, extras) for rows in tokens]
    found = []
    for isa in ISAS:
        _native.set_isa(isa)
        for steps, threads in ((in_chunks(lengths, [7, 50]), 1), (whole(lengths), 3)):
            found.append(torch.cat(floats(run_steps(Pool(shape, lengths), tokens, steps, extras, num_threads=threads))))
    assert (found[0] - torch.cat(expected)).abs().max() <= tolerance * torch.cat(expected).abs().max()
    assert all(torch.equal(found[0], other) for other in found)
    assert not found[0][:, -64:].any()


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("rising", [1, -1], ids=["rising", "falling"])
def test_scores_that_rise_or_fall_from_tile_to_tile(kv_format: str, rising: int) -> None:
    """Each tile's highest score is another, to which all results before it are brought."""
    shape, length = Shape(2, 1, 64, 16, kv_format), 700
    tokens = rising_tokens(shape, length, 4 * rising)
    (output,) = floats(run_steps(Pool(shape, [length]), [tokens], whole([length]), num_threads=2))
    expected = oracle(tokens, shape)
    allowed = (plain(tokens, shape).double() - expected).abs().max()
    assert (output.double() - expected).abs().max() <= 2 * allowed


def bit_cases() -> list[tuple[Shape, list[int], int]]:
    """Shapes, lengths of requests and windows; several tiles, and rows that no tile or group divides."""
    return [
        (Shape(4, 2, 16, 16, "f32"), [150, 17], 0),
        (Shape(6, 2, 8, 32, "f16"), [140, 1], 20),
        (Shape(3, 1, 18, 16, "bf16"), [135, 40], 0),
        (Shape(2, 2, 16, 16, "bf16"), [140, 31], 33),
        (Shape(5, 1, 10, 32, "i8"), [131, 30], 0),
        (Shape(2, 1, 16, 16, "i8"), [140, 3], 50),
    ]


@pytest.mark.parametrize("case", bit_cases(), ids=lambda case: f"{case[0].format}-{case[0].head_size}-{case[2]}")
def test_bits_are_those_of_every_instruction_set(case: tuple[Shape, list[int], int]) -> None:
    shape, lengths, window = case
    tokens = random_tokens(shape, lengths)
    results = []
    for isa in ISAS:
        _native.set_isa(isa)
        results.append(run_steps(Pool(shape, lengths), tokens, whole(lengths), Extras(window=window)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("isa", VECTOR_ISAS)
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("window", [0, 50])
def test_bits_depend_on_neither_chunks_nor_neighbours_nor_threads(isa: str, kv_format: str, window: int) -> None:
    _native.set_isa(isa)
    shape = Shape(6, 2, 32, 16, kv_format)
    lengths = [150, 64, 7]
    tokens = random_tokens(shape, lengths)

    def results(steps: Sequence[Requests], num_threads: int) -> list[torch.Tensor]:
        return run_steps(Pool(shape, lengths), tokens, steps, Extras(window=window), num_threads=num_threads)

    expected = results(whole(lengths), 1)
    ways = [
        (whole(lengths), 3),
        (in_chunks(lengths, [1]), 1),
        (in_chunks(lengths, [13, 1, 64, 30, 2]), 2),
        ([[(row, 0, length)] for row, length in enumerate(lengths)], 2),
        ([list(reversed(whole(lengths)[0]))], 2),
    ]
    for steps, num_threads in ways:
        for got, wanted in zip(results(steps, num_threads), expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("isa", VECTOR_ISAS)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_rows_of_a_draft_have_together_the_bits_of_each_alone(isa: str, kv_format: str) -> None:
    _native.set_isa(isa)
    shape, length, most = Shape(9, 3, 64, 32, kv_format), 270, 25  # the draft crosses a tile's end at 256
    tokens = random_tokens(shape, [length])
    one_by_one = [[(0, position, 1)] for position in range(length - most, length)]
    (expected,) = run_steps(Pool(shape, [length]), tokens, [[(0, 0, length - most)], *one_by_one])
    for count in (2, 3, 5, 8, 16, most):
        steps = [[(0, 0, length - count)], [(0, length - count, count)]]
        (got,) = run_steps(Pool(shape, [length]), tokens, steps, num_threads=2)
        assert torch.equal(got, expected), f"{count} rows"


@pytest.mark.parametrize("num_threads", [2, 5])
@pytest.mark.parametrize("shape", [Shape(9, 3, 64, 32, "bf16"), Shape(2, 1, 16, 16, "i8"), Shape(1, 1, 16, 16, "f32")])
def test_long_decodes_are_shared_by_threads_to_the_same_bits(num_threads: int, shape: Shape) -> None:
    lengths = [1500, 10, 700]
    tokens = random_tokens(shape, lengths)
    steps = [[(row, 0, length - 1) for row, length in enumerate(lengths)], [(0, 1499, 1), (1, 9, 1), (2, 699, 1)]]
    alone = [*steps[:1], [(0, 1499, 1)], [(1, 9, 1)], [(2, 699, 1)]]
    expected = run_steps(Pool(shape, lengths), tokens, steps)
    for way in (steps, alone):
        got = run_steps(Pool(shape, lengths), tokens, way, num_threads=num_threads)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("isa", VECTOR_ISAS)
def test_sums_that_vanish_have_the_same_sign_however_they_are_computed(isa: str) -> None:
    """Products below the least normal number are zeros of either sign, to which masked positions may add another."""
    _native.set_isa(isa)
    shape = Shape(2, 1, 16, 16, "f32")
    (tokens,) = random_tokens(shape, [40])
    tokens[:, -16:] = torch.where(tokens[:, -16:] > 0, 1.2e-38, -1.2e-38)
    (expected,) = run_steps(Pool(shape, [40]), [tokens], in_chunks([40], [1]))
    for steps in (whole([40]), in_chunks([40], [7])):
        assert torch.equal(run_steps(Pool(shape, [40]), [tokens], steps)[0], expected)


@pytest.mark.parametrize("num_threads", [2, 3])
def test_results_of_tiles_that_do_not_fit_a_threads_memory(num_threads: int) -> None:
    """24 heads of 512 over 33 tiles: the threads' parts of them would take more than the half MiB there is for each."""
    shape, length = Shape(24, 1, 512, 64, "f16"), 33 * 128
    pool = Pool(shape, [length])
    writer = Runner(pool, Extras(), max_tokens=128)
    for start in range(0, length, 128):
        writer.qkv[:] = random_tokens(shape, [128], seed=start)[0]
        writer.run([(0, start, 128)], parts=1)
    outputs = []
    for threads in (1, num_threads):
        runner = Runner(pool, Extras(), max_tokens=1, num_threads=threads)
        runner.qkv[:] = random_tokens(shape, [1], seed=1)[0]
        runner.run([(0, length - 1, 1)], parts=2)
        outputs.append(runner.out.clone())
    assert torch.equal(*outputs)
    assert outputs[0].view(torch.float32).isfinite().all()


@pytest.mark.parametrize("isa", VECTOR_ISAS)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_what_was_in_the_pool_before_does_not_matter(isa: str, kv_format: str) -> None:
    """NaN, large numbers and zeros in slots that are not written yet, also in those that pair with written ones."""
    _native.set_isa(isa)
    shape = Shape(4, 2, 16, 16, kv_format)
    lengths = [37, 130, 1]
    tokens = random_tokens(shape, lengths)
    steps = in_chunks(lengths, [9, 5, 1])
    expected = run_steps(Pool(shape, lengths), tokens, steps)
    assert all(output.isfinite().all() for output in floats(expected))
    for fill in (0x00, 0x7F, 0x45):
        got = run_steps(Pool(shape, lengths, fill), tokens, steps)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("isa", VECTOR_ISAS)
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("head_size", [16, 24])
def test_what_an_earlier_step_left_in_scratch_does_not_matter(isa: str, kv_format: str, head_size: int) -> None:
    _native.set_isa(isa)
    shape = Shape(4, 2, head_size, 16, kv_format)
    lengths = [9, 140, 1, 300]
    tokens = random_tokens(shape, lengths)
    expected = run_steps(Pool(shape, lengths), tokens, whole(lengths[:3]))
    tokens[3][:] = float("nan")
    steps = [[(3, 0, 300)], *whole(lengths[:3]), [(3, 299, 1)], [(1, 139, 1)]]
    got = run_steps(Pool(shape, lengths), tokens, steps)
    assert all(torch.equal(a, b) for a, b in zip(got[:3], expected[:3], strict=True))


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("window", [1, 16, 40])
def test_blocks_left_of_the_window_are_not_read(kv_format: str, window: int) -> None:
    shape = Shape(4, 2, 16, 16, kv_format)
    tokens = random_tokens(shape, [200])
    extras = Extras(window=window)
    expected = run_steps(Pool(shape, [200]), tokens, whole([200]), extras)[0]
    pool = Pool(shape, [200])
    run_steps(pool, tokens, whole([200]), extras)
    for start in (0, 8, 120, 136, 184):
        # The null block is full of NaN.
        pool.tables[0, : max(start - window + 1, 0) // 16] = 0
        got = run_steps(pool, tokens, [[(0, start, 8)]], extras)[0]
        assert torch.equal(got[start : start + 8], expected[start : start + 8])


@pytest.mark.parametrize("isa", VECTOR_ISAS)
@pytest.mark.parametrize(("head_size", "num_heads", "num_kv_heads"), [(64, 3, 1), (16, 4, 2), (80, 4, 2), (8, 12, 3)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_of_other_types_are_the_fp32_rows_rounded(
    isa: str, head_size: int, num_heads: int, num_kv_heads: int, num_threads: int
) -> None:
    _native.set_isa(isa)
    shape = Shape(num_heads, num_kv_heads, head_size, 16)
    lengths = [40, 3]
    tokens = random_tokens(shape, lengths)
    results = {
        kind: run_steps(Pool(shape, lengths), tokens, whole(lengths), Extras(out_type=kind), num_threads=num_threads)
        for kind in ("f32", "bf16", "q8")
    }
    for exact, halves, blocks in zip(*results.values(), strict=True):
        values = exact.view(torch.float32)
        assert torch.equal(halves.view(torch.bfloat16), values.bfloat16())
        block = blocks.numpy().view(ACT_BLOCK).reshape(len(values), -1)
        wide = values.numpy().reshape(len(values), -1, 32)
        highest = np.abs(wide).max(-1, keepdims=True)
        np.testing.assert_array_equal(block["scale"], (highest / np.float32(127))[..., 0])
        np.testing.assert_array_equal(block["q"], np.rint(wide * (np.float32(127) / highest)))


@pytest.mark.parametrize("isa", VECTOR_ISAS)
@pytest.mark.parametrize("kv_format", ALL_FORMATS)
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_reaches_the_rows_that_see_it_and_no_other_request(isa: str, kv_format: str, where: str) -> None:
    _native.set_isa(isa)
    shape, lengths = Shape(2, 1, 16, 16, kv_format), [40, 40]
    check_nan_stays(lambda tokens: run_steps(Pool(shape, lengths), tokens, whole(lengths)), shape, lengths, where)


def test_blocks_far_into_a_large_pool() -> None:
    shape = Shape(2, 1, 16, 16, "bf16")
    pool = Pool(shape, [20])
    tokens = random_tokens(shape, [20])
    expected = run_steps(pool, tokens, whole([20]))[0]
    far = Pool(shape, [20])
    far.stride_bytes = 3 << 20
    # Pages that are never touched take no memory.
    far.memory, far.first_byte = torch.empty(1001 * far.stride_bytes, dtype=torch.uint8), 0
    far.tables[0, :2] = torch.tensor([1000, 999])
    assert torch.equal(run_steps(far, tokens, whole([20]))[0], expected)


def test_step_without_tokens() -> None:
    pool = Pool(Shape(), [4])
    Runner(pool, Extras(), max_tokens=1, num_threads=2).run([(0, 0, 0)])
    assert (pool.bytes == pool.fill).all()
