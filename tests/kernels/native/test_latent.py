"""Native latent attention: against float64, and the same bits in any step, on any threads and instruction set."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from quire import _native
from quire._native import KvFormat, latent_cost
from tests.kernels.native import packed_weights
from tests.kernels.native.packed_weights import (
    EXACT_ISAS,
    Packed,
    aligned,
    each_isa,
    finite_rows,
    rows_of,
    whole_blocks,
)

STORED = packed_weights.FLOATS_STORED | packed_weights.STORED
KV_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1, "e4m3": 1, "e5m2": 1}
BLOCK = 16
Work = list[tuple[int, int, int]]
"""Of one step: (row of the block tables, first position, number of tokens)."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer: heads, and R, C, U and O of native/ops/latent_work.h."""

    heads: int = 3
    rank: int = 64
    rotary: int = 16
    nope: int = 32
    value: int = 32

    @property
    def entry(self) -> int:
        return self.rank + self.rotary


class Layer:
    """A projection, and a pool of NaN for requests of up to 160 tokens."""

    def __init__(self, sizes: Sizes = Sizes(), weights: str = "f32", kv: str = "f32", num_requests: int = 3) -> None:
        sizes = replace(sizes, rank=whole_blocks(weights, sizes.rank))
        self.sizes, self.kv_format = sizes, kv
        num_rows = sizes.heads * (sizes.nope + sizes.value)
        raw = finite_rows(STORED[weights], num_rows, sizes.rank, seed=1)
        self.up = Packed(weights, num_rows, sizes.rank).add_rows(STORED[weights], raw)
        random = np.random.default_rng(2)
        self.inputs = random.standard_normal((num_requests, 160, sizes.heads, sizes.rotary + sizes.nope), np.float32)
        self.entries = random.standard_normal((num_requests, 160, sizes.entry), np.float32)
        self.block_bytes = BLOCK * (sizes.entry * KV_BYTES[kv] + (4 if kv == "i8" else 0))
        self.pool = aligned((num_requests * 10 + 1) * self.block_bytes)
        self.tables = 1 + random.permutation(num_requests * 10).reshape(1, num_requests, 10).astype(np.int32)
        # Scores of a few units, however large the random weights are.
        self.scale = float(1 / (sizes.nope**0.5 * self.up.decoded().std() * sizes.rank**0.5 + sizes.rotary**0.5))

    def run(self, work: Work, *, threads: int = 1) -> np.ndarray:
        """Results [tokens, heads, O] of a step, whose entries are written first."""
        sizes, count = self.sizes, sum(item[2] for item in work)
        q = np.concatenate([self.inputs[row, start : start + num] for row, start, num in work])
        entries = np.concatenate([self.entries[row, start : start + num] for row, start, num in work])
        out = np.full((count, sizes.heads * sizes.value + 3), np.nan, np.float32)
        size = max(-(-sizes.entry // 16) * 16, 32 + -(-sizes.value // 16) * 16)
        scratch = np.full((count, sizes.heads * size), np.nan, np.float32)
        kv = _native.KvLayer(
            self.pool.ctypes.data, self.block_bytes, BLOCK, 1, sizes.entry, KvFormat[self.kv_format], 0
        )
        plan = _native.Plan(threads, max(1, count), max(1, len(work)))
        plan.write_latent(
            q=q.ctypes.data, rotary=entries[:, sizes.rank :].ctypes.data, latent=entries.ctypes.data,
            q_stride=q.strides[0] // 4, rotary_stride=sizes.entry, latent_stride=sizes.entry, num_heads=sizes.heads,
            head_size=sizes.rotary + sizes.nope, cos=0, sin=0, half=0, rank=sizes.rank, kv=kv,
        )  # fmt: skip
        plan.latent_attend(
            q=q.ctypes.data, q_stride=q.strides[0] // 4, up=self.up.weight, out=rows_of(out),
            work=scratch.ctypes.data, work_stride=scratch.strides[0] // 4, num_heads=sizes.heads, rank=sizes.rank,
            rotary=sizes.rotary, nope=sizes.nope, value=sizes.value, scale=self.scale, kv=kv,
        )  # fmt: skip
        rows, starts, counts = np.array(work, np.int32).reshape(-1, 3).T.copy()
        tokens = np.zeros((len(self.inputs), 160), np.int32)
        plan.run(
            1, len(work), 0, rows.ctypes.data, starts.ctypes.data, counts.ctypes.data, 0, tokens.ctypes.data, 160,
            self.tables.ctypes.data, 10, self.tables.strides[0] // 4,
        )  # fmt: skip
        return out[:, : sizes.heads * sizes.value].reshape(count, sizes.heads, sizes.value)

    def expected(self, row: int, length: int) -> np.ndarray:
        """Compute the plain form in float64, with the weights as they are decoded."""
        sizes = self.sizes
        up = self.up.decoded().astype(np.float64).reshape(sizes.heads, -1, sizes.rank)
        entries, q = self.entries[row, :length].astype(np.float64), self.inputs[row, :length].astype(np.float64)
        expanded = np.einsum("hnr,pr->hpn", up, entries[:, : sizes.rank])
        rotary = np.broadcast_to(entries[:, sizes.rank :], (sizes.heads, length, sizes.rotary))
        keys = np.concatenate((rotary, expanded[:, :, : sizes.nope]), 2)
        scores = self.scale * np.einsum("thd,hpd->htp", q, keys)
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(2, keepdims=True))
        weights /= weights.sum(2, keepdims=True)
        return np.einsum("htp,hpv->thv", weights, expanded[:, :, sizes.nope :])


def steps_of(length: int, chunk: int) -> list[Work]:
    return [[(0, start, min(chunk, length - start))] for start in range(0, length, chunk)]


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("kv", KV_BYTES)
@pytest.mark.parametrize("weights", STORED)
def test_both_forms_are_near_float64(weights: str, kv: str) -> None:
    rounding = {"f32": 1e-6, "f16": 1e-3, "bf16": 1e-2, "i8": 1e-2, "e4m3": 4e-2, "e5m2": 8e-2}[kv]
    allowed = 4 * rounding + {"f32": 1e-5, "f16": 1e-5, "bf16": 1e-2}.get(weights, 1e-2)
    layer = Layer(weights=weights, kv=kv)
    expected = layer.expected(0, 150)
    for found in each_isa(lambda: np.concatenate([layer.run(work, threads=2) for work in steps_of(150, 150)])):
        assert distance(found, expected) < allowed
    for found in each_isa(lambda: np.concatenate([layer.run(work) for work in steps_of(150, 11)])):
        assert distance(found, expected) < allowed


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(heads=1), Sizes(2, 22, 6, 10, 9), Sizes(5, 16, 8, 40, 24)])
def test_sizes_that_are_not_whole_vectors_or_tiles(sizes: Sizes) -> None:
    layer = Layer(sizes)
    expected = layer.expected(0, 133)
    for chunk in (1, 40, 133):
        found = np.concatenate([layer.run(work, threads=3) for work in steps_of(133, chunk)])
        assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("weights", STORED)
def test_bits_depend_on_the_form_alone(weights: str) -> None:
    """Other requests, threads, chunks of one form and instruction sets change nothing."""
    layer = Layer(weights=weights, kv="bf16")
    sizes = layer.sizes
    layer.run([(0, 0, 160)])
    layer.run([(1, 0, 160)])
    per_head = (sizes.rank, sizes.rotary, sizes.nope, sizes.value)
    for start, count, is_plain in ((100, 12, False), (30, 130, True)):
        assert latent_cost(start, count, *per_head)[0] == is_plain
        alone = layer.run([(0, start, count)])
        for threads in (1, 2, 5):
            mixed = layer.run([(1, 140, 1), (0, start, count), (1, 0, 33)], threads=threads)
            assert np.array_equal(mixed[1 : count + 1], alone)
        for found in each_isa(lambda start=start, count=count: layer.run([(0, start, count)]), EXACT_ISAS):
            assert np.array_equal(found, alone) or weights == "bf16"
    singly = np.concatenate([layer.run([(0, at, 1)]) for at in range(100, 112)])
    assert np.array_equal(singly, layer.run([(0, 100, 12)]))
    shorter = layer.run([(0, 30, 120)])
    assert np.array_equal(shorter, layer.run([(0, 30, 130)])[:120])


@pytest.mark.parametrize("weights", ["q8", "q4m", "q5m", "q4k", "q6k", "nvfp4"])
def test_one_token_has_the_bits_of_many_where_heads_begin_within_tiles(weights: str) -> None:
    layer = Layer(Sizes(heads=3, rotary=16, nope=40, value=24), weights)
    layer.run([(0, 0, 110)])
    together = layer.run([(0, 100, 10)])
    assert distance(together, layer.expected(0, 110)[100:]) < 1e-2
    for found in each_isa(lambda: np.concatenate([layer.run([(0, at, 1)]) for at in range(100, 110)]), EXACT_ISAS):
        assert np.array_equal(found, together)


def test_form_is_that_of_fewer_operations() -> None:
    """DeepSeek-V2-Lite: prompts plain, decodes and short chunks after a long prefix absorbed."""
    for start, count, is_plain in (
        (0, 512, True),
        (4096, 1, False),
        (4096, 100, False),
        (4096, 512, True),
        (0, 1, True),
    ):
        found, flops = latent_cost(start, count, 512, 64, 128, 128)
        scores = sum(range(start + 1, start + count + 1))
        absorbed = 2 * (count * 512 * 256 + scores * (512 + 64 + 512))
        plain = 2 * ((start + count) * 512 * 256 + scores * (128 + 64 + 128))
        assert (found, flops) == (is_plain, min(absorbed, plain))
