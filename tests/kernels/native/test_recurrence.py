"""Native recurrences: against float64, and the same bits in any step, on any threads and instruction set."""

from dataclasses import dataclass

import numpy as np
import pytest

from quire import _native
from quire._native import KvFormat
from quire.kernels.recurrence import CHUNK_TOKENS, recurrent_state_bytes
from tests.kernels.native.packed_weights import EXACT_ISAS, aligned, each_isa, rows_of

LENGTH, OFFSET = 150, 64
Work = list[tuple[int, int, int]]
"""Of one step: (row of the block tables, first position, number of tokens)."""


@dataclass(frozen=True)
class Sizes:
    """K key heads of D, H heads of V. `kind`: "delta", "space" with time steps and skips, or plain "attention"."""

    kind: str = "delta"
    key_heads: int = 2
    heads: int = 4
    key: int = 32
    value: int = 80


KINDS = [Sizes(), Sizes("space", 1, 6), Sizes("attention", 3, 3, 48, 64)]
ODD = [Sizes("delta", 1, 1, 10, 6), Sizes("space", 2, 6, 21, 130), Sizes("delta", 3, 3, 19, 33)]


class Layer:
    """Values of requests, and a pool of NaN for their states."""

    def __init__(self, sizes: Sizes, num_requests: int = 3, strength: float = 1.0) -> None:
        self.sizes, is_delta = sizes, sizes.kind == "delta"
        random = np.random.default_rng(sizes.heads)

        def values(*shape: int) -> np.ndarray:
            return random.standard_normal(shape, np.float32)

        scale = np.float32(1 if is_delta else sizes.key**-0.5)
        self.q, self.k = (scale * values(num_requests, LENGTH, sizes.key_heads * sizes.key) for _ in range(2))
        self.v = values(num_requests, LENGTH, sizes.heads * sizes.value)
        self.gates = strength * values(num_requests, LENGTH, (1 + is_delta) * sizes.heads)
        self.rates, self.bias, self.skip = values(3, sizes.heads)
        num_bytes = recurrent_state_bytes(sizes.key_heads, sizes.heads, sizes.key, sizes.value)
        self.page_bytes = OFFSET + -(-num_bytes // 64) * 64
        self.pool = aligned((num_requests + 1) * self.page_bytes)
        self.tables = 1 + random.permutation(num_requests).reshape(1, num_requests, 1).astype(np.int32)

    def run(self, work: Work, *, threads: int = 1) -> np.ndarray:
        """Results [tokens, H * V] of a step."""
        sizes, count = self.sizes, sum(item[2] for item in work)
        parts = [
            np.concatenate([part[row, start : start + num] for row, start, num in work])
            for part in (self.q, self.k, self.v, self.gates)
        ]
        has_gates, is_space = sizes.kind != "attention", sizes.kind == "space"
        out = np.full((count, sizes.heads * sizes.value + 3), np.nan, np.float32)
        kv = _native.KvLayer(self.pool.ctypes.data, self.page_bytes, 16, 1, 16, KvFormat.f32, 0)
        plan = _native.Plan(threads, max(1, count), max(1, len(work)))
        gates = {"gates": rows_of(parts[3])} if has_gates else {}
        plan.recurrence(
            **dict(zip("qkv", map(rows_of, parts), strict=False)), **gates, out=rows_of(out),
            log_rates=self.rates.ctypes.data, time_bias=self.bias.ctypes.data if has_gates else 0,
            skip=self.skip.ctypes.data if is_space else 0, kv=kv, offset=OFFSET, num_key_heads=sizes.key_heads,
            num_heads=sizes.heads, key_size=sizes.key, value_size=sizes.value, delta=sizes.kind == "delta",
        )  # fmt: skip
        rows, starts, counts = np.array(work, np.int32).reshape(-1, 3).T.copy()
        tokens = np.zeros((len(self.q), LENGTH), np.int32)
        plan.run(
            1, len(work), 0, rows.ctypes.data, starts.ctypes.data, counts.ctypes.data, 0, tokens.ctypes.data, LENGTH,
            self.tables.ctypes.data, 1, self.tables.strides[0] // 4,
        )  # fmt: skip
        assert np.isnan(out[:, sizes.heads * sizes.value :]).all()
        return out[:, : sizes.heads * sizes.value]

    def expected(self, row: int) -> np.ndarray:
        """Token by token, in float64."""
        sizes, is_delta = self.sizes, self.sizes.kind == "delta"
        repeats = sizes.heads // sizes.key_heads
        q, k = (
            part[row].astype(np.float64).reshape(LENGTH, -1, sizes.key).repeat(repeats, 1) for part in (self.q, self.k)
        )
        v, gates = self.v[row].astype(np.float64).reshape(LENGTH, sizes.heads, -1), self.gates[row].astype(np.float64)
        dt = np.log1p(np.exp(gates[:, : sizes.heads] + self.bias)) if sizes.kind != "attention" else np.ones(1)
        decays = np.broadcast_to(np.exp(-np.exp(self.rates.astype(np.float64)) * dt), (LENGTH, sizes.heads))
        strengths = np.broadcast_to(dt, decays.shape)
        if is_delta:
            strengths = 1 / (1 + np.exp(-gates[:, sizes.heads :]))
            q, k = (part / np.sqrt((part * part).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
            q = q / sizes.key**0.5
        state, out = np.zeros((sizes.heads, sizes.key, sizes.value)), np.empty_like(v)
        for t in range(LENGTH):
            state = state * decays[t, :, None, None]
            known = np.einsum("hd,hdv->hv", k[t], state) if is_delta else 0
            state += np.einsum("hd,hv->hdv", k[t], strengths[t, :, None] * (v[t] - known))
            out[t] = np.einsum("hd,hdv->hv", q[t], state)
        out = out + (self.skip[:, None] * v if sizes.kind == "space" else 0)
        return out.reshape(LENGTH, -1)


def cut(row: int, ends: list[int]) -> list[Work]:
    """Steps of one request that end at these positions."""
    return [[(row, start, end - start)] for start, end in zip([0, *ends], ends, strict=False)]


def run_all(layer: Layer, steps: list[Work], threads: int = 1) -> np.ndarray:
    return np.concatenate([layer.run(work, threads=threads) for work in steps])


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint32)


@pytest.mark.parametrize("sizes", [*KINDS, *ODD])
@pytest.mark.parametrize("strength", [0.1, 8.0])
def test_results_are_those_of_one_token_after_another(sizes: Sizes, strength: float) -> None:
    """Decays from nearly 1 to 0 within a token."""
    layer = Layer(sizes, strength=strength)
    expected = layer.expected(1)
    for found in each_isa(lambda: layer.run([(1, 0, LENGTH)], threads=2), EXACT_ISAS):
        assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("sizes", [*KINDS, *ODD])
def test_bits_do_not_depend_on_steps_threads_and_instruction_sets(sizes: Sizes) -> None:
    layer, ends = Layer(sizes), [5, 6, 7, 8, 9, 11, 20, 37, 40, 104, 105, 121, LENGTH]
    whole = layer.run([(0, 0, LENGTH)])
    for found in each_isa(lambda: run_all(layer, cut(0, ends), threads=3), EXACT_ISAS):
        np.testing.assert_array_equal(bits(found), bits(whole))
    decoded = run_all(layer, cut(0, [33, *range(34, LENGTH + 1)]))
    np.testing.assert_array_equal(bits(decoded), bits(whole))


@pytest.mark.parametrize("sizes", KINDS)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_requests_of_a_step_have_the_bits_that_they_have_alone(sizes: Sizes, threads: int) -> None:
    layer = Layer(sizes)
    alone = [layer.run([(row, 0, LENGTH)]) for row in range(3)]
    steps: list[Work] = [
        [(2, 0, 3), (0, 0, 70)],
        [(0, 70, 1), (1, 0, 1), (2, 3, 60)],
        [(1, 1, 149), (2, 63, 8), (0, 71, 4)],
        [(2, 71, 79), (0, 75, 75)],
    ]
    found: dict[int, list[np.ndarray]] = {0: [], 1: [], 2: []}
    for work in steps:
        results = np.split(layer.run(work, threads=threads), np.cumsum([count for _, _, count in work])[:-1])
        for (row, _, _), result in zip(work, results, strict=True):
            found[row].append(result)
    for row, parts in found.items():
        np.testing.assert_array_equal(bits(np.concatenate(parts)), bits(alone[row]))


def test_chunks_matrices_are_written_when_it_is_full() -> None:
    """A decode reads a state's matrices, and writes what its token adds beside them."""
    layer = Layer(Sizes())
    size = 4 * layer.sizes.heads * layer.sizes.key * layer.sizes.value

    def matrices() -> bytes:
        first = int(layer.tables[0, 0, 0]) * layer.page_bytes + OFFSET
        return layer.pool[first : first + size].tobytes()

    layer.run([(0, 0, CHUNK_TOKENS)])
    before = matrices()
    for start in range(CHUNK_TOKENS, 2 * CHUNK_TOKENS):
        assert matrices() == before
        layer.run([(0, start, 1)])
    assert matrices() != before
