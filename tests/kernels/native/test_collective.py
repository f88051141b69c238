"""Collectives in shared memory against numpy: ranks in threads, and once in processes, more than there are cores."""

import subprocess
import sys
import threading
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import _native
from quire.runtime.links import RankMemory
from tests.kernels.native.packed_weights import reduce_once, rows_of, run
from tests.parallel.thread_ranks import exchanges, on_ranks

FLOATS = NDArray[np.float32]
SIZES = [(1, 1), (1, 576), (3, 63), (7, 65), (32, 576), (129, 1000)]
PIECE_FLOATS = 32768


def values_of(rank: int, rows: int, width: int, seed: int = 0) -> FLOATS:
    return np.random.default_rng([rank, rows, width, seed]).standard_normal((rows, width), np.float32)


def gather_once(views: list[_native.Exchange], parts: list[FLOATS], out_width: int, rank: int) -> FLOATS:
    x = parts[rank]
    out = np.full((len(x), out_width), np.nan, np.float32)
    plan = _native.Plan(2, len(x), 1)
    plan.all_gather(rows_of(x), rows_of(out), x.shape[1], out_width, views[rank].address)
    run(plan, np.zeros(len(x)))
    return out


def norm_once(views: list[_native.Exchange], parts: list[FLOATS], weights: list[FLOATS], rank: int) -> FLOATS:
    x, weight = parts[rank], weights[rank]
    out = np.full_like(x, np.nan)
    plan = _native.Plan(2, len(x), 1)
    plan.shared_norm(rows_of(x), rows_of(out), weight.ctypes.data, x.shape[1], 1e-5, views[rank].address)
    run(plan, np.zeros(len(x)))
    return out


def reduce_on_ranks(views: list[_native.Exchange], parts: list[FLOATS], into: FLOATS | None = None) -> list[FLOATS]:
    return on_ranks(len(views), lambda rank: reduce_once(views[rank], parts[rank], into))


def in_rank_order(parts: list[FLOATS]) -> FLOATS:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_sums_have_the_bits_of_sums_in_rank_order(num_ranks: int, num_threads: int) -> None:
    views = exchanges(num_ranks, num_threads)
    for rows, width in (*SIZES, (3, PIECE_FLOATS + 70)):
        parts = [values_of(rank, rows, width) for rank in range(num_ranks)]
        base = values_of(99, rows, width)
        expected = in_rank_order(parts)
        for found in reduce_on_ranks(views, parts):
            assert np.array_equal(found, expected)
        for found in reduce_on_ranks(views, parts, base):
            assert np.array_equal(found, base + expected)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gathered_columns_stand_in_rank_order_without_padding(num_ranks: int) -> None:
    views = exchanges(num_ranks, 2)
    for rows, width in SIZES:
        parts = [values_of(rank, rows, width) for rank in range(num_ranks)]
        for out_width in {num_ranks * width, max(1, num_ranks * width - width // 2), 1}:
            gather = partial(gather_once, views, parts, out_width)
            for found in on_ranks(num_ranks, gather):
                assert np.array_equal(found, np.concatenate(parts, 1)[:, :out_width])


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_norms_of_parts_equal_the_norm_of_the_whole(num_ranks: int) -> None:
    views = exchanges(num_ranks, 2)
    for rows, width in SIZES:
        parts = [values_of(rank, rows, width) for rank in range(num_ranks)]
        weights = [values_of(rank, 1, width, seed=1)[0] for rank in range(num_ranks)]
        whole = np.concatenate(parts, 1).astype(np.float64)
        scales = 1 / np.sqrt((whole**2).mean(1, keepdims=True) + 1e-5)
        for rank, found in enumerate(on_ranks(num_ranks, partial(norm_once, views, parts, weights))):
            assert np.allclose(found, parts[rank] * scales * weights[rank], rtol=1e-5, atol=1e-6)


def test_many_collectives_in_one_plan_do_not_mix_their_values() -> None:
    """The slots of a thread take turns; sums of different sizes follow each other at once."""
    num_ranks, shapes = 3, [(5, 40 + 100 * (index % 4)) for index in range(60)]
    views = exchanges(num_ranks, 2)

    def of_rank(rank: int) -> list[FLOATS]:
        plan = _native.Plan(2, 5, 1)
        inputs = [values_of(rank, *shape, seed=index) for index, shape in enumerate(shapes)]
        outputs = [np.full_like(x, np.nan) for x in inputs]
        for x, out in zip(inputs, outputs, strict=True):
            plan.all_reduce(rows_of(x), rows_of(out), x.shape[1], views[rank].address)
        run(plan, np.zeros(5))
        return outputs

    found = on_ranks(num_ranks, of_rank)
    for index, shape in enumerate(shapes):
        expected = in_rank_order([values_of(rank, *shape, seed=index) for rank in range(num_ranks)])
        assert all(np.array_equal(outputs[index], expected) for outputs in found)


@pytest.mark.parametrize("count", [1, 3, 40_000])
def test_broadcast_gives_all_ranks_the_values_of_rank_0(count: int) -> None:
    views = exchanges(3)

    def of_rank(rank: int) -> list[NDArray[np.int32]]:
        rounds = [np.arange(count, dtype=np.int32) * (index + 1) + rank for index in range(5)]
        assert all(views[rank].broadcast(values.ctypes.data, count) for values in rounds)
        return rounds

    for rounds in on_ranks(3, of_rank):
        for index, values in enumerate(rounds):
            assert np.array_equal(values, np.arange(count) * (index + 1))


def test_waiting_ends_when_the_ranks_give_up() -> None:
    views = exchanges(2)
    x = values_of(0, 4, 64)
    waiting = threading.Thread(target=reduce_once, args=(views[0], x))
    waiting.start()
    views[1].give_up()
    waiting.join(60)
    assert not waiting.is_alive()
    assert views[0].has_given_up
    values = np.zeros(1, np.int32)
    assert not views[1].broadcast(values.ctypes.data, 1)


def test_no_such_rank_is_refused() -> None:
    for rank, num_ranks in ((2, 2), (-1, 2), (0, 65)):
        with pytest.raises(ValueError, match="rank"):
            _native.Exchange(0, rank, num_ranks, 1, 0)


_CHILD = """
import sys
import numpy as np
from quire.runtime.links import RankMemory
from tests.kernels.native.packed_weights import reduce_once

rank, num_ranks, fd, steps = map(int, sys.argv[1:])
memory = RankMemory(1, num_ranks, 1, fd)
for step in range(1, steps):
    reduce_once(memory.links(rank, 0).exchange, np.full((step, 576), rank + 0.1, np.float32))
"""


def test_processes_share_sums_also_on_fewer_cores() -> None:
    num_ranks, steps = 4, 50
    memory = RankMemory(1, num_ranks, 1)
    children = []
    for rank in range(1, num_ranks):
        words = [sys.executable, "-c", _CHILD, *map(str, (rank, num_ranks, memory.fd, steps))]
        children.append(subprocess.Popen(words, pass_fds=[memory.fd]))
    exchange = memory.links(0, 400).exchange
    assert exchange is not None
    expected = in_rank_order([np.float32(rank + 0.1) for rank in range(num_ranks)])
    try:
        for step in range(1, steps):
            assert (reduce_once(exchange, np.full((step, 576), 0.1, np.float32)) == expected).all()
        assert [child.wait(60) for child in children] == [0] * 3
    finally:
        for child in children:
            child.kill()
            child.wait()
