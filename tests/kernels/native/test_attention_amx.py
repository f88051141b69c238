"""Native attention of many rows in AMX's BF16 tiles, against fp64, and the same bits however the rows are cut.

Queries and weights are rounded to bf16, so that errors are compared with those of PyTorch's attention in bf16.
"""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from quire import _native
from tests.kernels.native.kv_steps import (
    Extras,
    Pool,
    Requests,
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
from tests.kernels.native.packed_weights import ISAS
from tests.kernels.native.test_attention import floats, in_chunks, whole

AMX_ISAS = [isa for isa in ISAS if isa.startswith("amx")]
TILES = Extras(batch_invariant=False)

pytestmark = pytest.mark.skipif(not AMX_ISAS, reason="emulated tiles need AVX-512")


@pytest.fixture(autouse=True, params=AMX_ISAS)
def chosen_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa()
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)


def attended(
    shape: Shape, tokens: Sequence[torch.Tensor], steps: Sequence[Requests], extras: Extras = TILES, threads: int = 1
) -> list[torch.Tensor]:
    lengths = [len(rows) for rows in tokens]
    return floats(run_steps(Pool(shape, lengths), tokens, steps, extras, num_threads=threads))


def expected(rows: torch.Tensor, shape: Shape, extras: Extras, dtype: torch.dtype) -> torch.Tensor:
    """[T, H D] of one request; in bf16 PyTorch's own attention, which has neither soft cap nor sinks."""
    if dtype != torch.bfloat16:
        return attention(rows, shape, extras, dtype)
    q, k, v = split(rows, shape)
    k, v = as_stored(k, shape.format).to(dtype), as_stored(v, shape.format).to(dtype)
    mask = visible(len(rows), extras.window)
    return scaled_dot_product_attention(q.to(dtype), k, v, attn_mask=mask).transpose(0, 1).flatten(1)


SHAPES = [
    (9, 3, 64, 32),
    (9, 3, 64, 16),
    (7, 1, 80, 32),
    (14, 2, 96, 32),
    (2, 1, 256, 16),
    (4, 1, 512, 16),
    (4, 2, 8, 16),
    (40, 1, 18, 32),
]


@pytest.mark.parametrize("kv_format", ["bf16", "i8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "extras",
    [
        TILES,
        Extras(window=21, batch_invariant=False),
        Extras(soft_cap=3.0, sinks=torch.ones(40), batch_invariant=False),
    ],
    ids=["plain", "window", "soft-cap-and-sinks"],
)
def test_error_is_at_most_twice_that_of_torch_in_bf16(
    kv_format: str, shape: tuple[int, int, int, int], extras: Extras
) -> None:
    kind = Shape(*shape, kv_format)
    if extras.sinks is not None:
        extras = Extras(soft_cap=extras.soft_cap, sinks=torch.linspace(-9, 4, kind.num_heads), batch_invariant=False)
    tokens = random_tokens(kind, [300, 33])
    found = torch.cat(attended(kind, tokens, whole([300, 33]), extras, threads=2)).double()
    exact = torch.cat([expected(rows, kind, extras, torch.float64) for rows in tokens])
    plain = Extras(window=extras.window)
    allowed = torch.cat([expected(rows, kind, plain, torch.bfloat16) for rows in tokens]).double()
    allowed = (allowed - torch.cat([expected(rows, kind, plain, torch.float64) for rows in tokens])).abs()
    error = (found - exact).abs()
    assert 0 < error.max() <= 2 * allowed.max()
    assert error.mean() <= 2 * allowed.mean()


@pytest.mark.parametrize("rising", [1, -1], ids=["rising", "falling"])
def test_scores_that_rise_or_fall_from_tile_to_tile(rising: int) -> None:
    """Rows' references are raised again and again, or never; the last segment's are merged with the first's."""
    shape, length = Shape(2, 1, 64, 16), 1500
    tokens = rising_tokens(shape, length, 16 * rising)
    (output,) = attended(shape, [tokens], whole([length]), threads=2)
    exact = expected(tokens, shape, TILES, torch.float64)
    allowed = (expected(tokens, shape, TILES, torch.bfloat16).double() - exact).abs().max()
    assert (output.double() - exact).abs().max() <= 2 * allowed


@pytest.mark.parametrize("kv_format", ["bf16", "i8"])
@pytest.mark.parametrize("window", [0, 50])
def test_bits_depend_on_neither_large_chunks_nor_neighbours_nor_threads(kv_format: str, window: int) -> None:
    """Chunks have at least 16 rows per KV head, on AMX and its emulation; also a row's first segment of two."""
    shape, lengths = Shape(6, 2, 32, 16, kv_format), [1150, 64, 17]
    tokens = random_tokens(shape, lengths)
    extras = Extras(window=window, batch_invariant=False)
    wanted = attended(shape, tokens, whole(lengths), extras)
    ways = [
        (whole(lengths), 3),
        ([*in_chunks(lengths[:1], [70, 200, 6, 300]), whole(lengths)[0][1:]], 2),
        ([[(row, 0, length)] for row, length in enumerate(lengths)], 2),
        ([[(1, 0, 64), (0, 0, 1100)], [(2, 0, 17), (0, 1100, 50)]], 5),
    ]
    for isa in AMX_ISAS:
        _native.set_isa(isa)
        for steps, threads in ways:
            for got, row in zip(attended(shape, tokens, steps, extras, threads), wanted, strict=True):
                assert torch.equal(got, row)


def test_few_rows_and_batch_invariant_steps_take_the_exact_kernels(chosen_isa: str) -> None:
    shape, lengths = Shape(6, 2, 32, 16), [150]
    tokens = random_tokens(shape, lengths)
    exact = attended(shape, tokens, whole(lengths), Extras(batch_invariant=True))
    tiles = attended(shape, tokens, whole(lengths))
    assert not torch.equal(exact[0], tiles[0])
    assert torch.equal(attended(shape, tokens, in_chunks(lengths, [5]))[0], exact[0])
    _native.set_isa("avx512")
    assert torch.equal(attended(shape, tokens, whole(lengths))[0], exact[0])


@pytest.mark.parametrize("kv_format", ["bf16", "i8"])
def test_what_is_in_unwritten_slots_and_left_of_the_window_does_not_matter(kv_format: str) -> None:
    shape = Shape(4, 2, 16, 16, kv_format)
    tokens = random_tokens(shape, [200])
    extras = Extras(window=40, batch_invariant=False)
    wanted = run_steps(Pool(shape, [200]), tokens, whole([200]), extras)[0]
    assert wanted.view(torch.float32).isfinite().all()
    for fill in (0x00, 0x7F, 0x45):
        pool = Pool(shape, [200], fill)
        assert torch.equal(run_steps(pool, tokens, in_chunks([200], [40, 10]), extras)[0], wanted)
        # The null block is not written.
        pool.tables[0, : (120 - 40 + 1) // 16] = 0
        got = run_steps(pool, tokens, [[(0, 120, 8)]], extras)[0]
        assert torch.equal(got[120:128], wanted[120:128])


@pytest.mark.parametrize("kv_format", ["bf16", "i8"])
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_reaches_the_rows_that_see_it_and_no_other_request(kv_format: str, where: str) -> None:
    shape, lengths = Shape(2, 1, 16, 16, kv_format), [60, 40]
    check_nan_stays(lambda tokens: attended(shape, tokens, whole(lengths)), shape, lengths, where)
