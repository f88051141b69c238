"""Routing and the products of experts: against float64, and the same bits in any step, on any threads and ISA."""

import ctypes
import mmap
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from quire import _native
from quire._native import Activation
from tests.kernels.native.packed_weights import (
    Packed,
    aligned,
    dequantised,
    each_isa,
    empty_rows,
    finite_rows,
    quantised,
    rows_of,
    run,
    whole_blocks,
)

STORED = {"f32": "F32", "bf16": "BF16", "q4": "Q4_0", "q4m": "Q4_1", "q5m": "Q5_1", "q8": "Q8_0", "q4k": "Q4_K",
          "mxfp4": "MXFP4", "iq4xs": "IQ4_XS"}  # fmt: skip
FORMATS = list(STORED)


@dataclass
class Experts:
    """X experts of F columns, of which each token chooses `top_k`."""

    format_name: str
    num_experts: int = 6
    top_k: int = 2
    width: int = 64
    inner: int = 32
    is_clamped: bool = False
    up: Packed = field(init=False)
    down: Packed = field(init=False)

    def __post_init__(self) -> None:
        stored = STORED[self.format_name]
        self.width, self.inner = (whole_blocks(self.format_name, width) for width in (self.width, self.inner))
        up_rows, down_rows = self.num_experts * 2 * self.inner, self.num_experts * self.width
        self.up = Packed(self.format_name, up_rows, self.width)
        self.up.add_rows(stored, finite_rows(stored, up_rows, self.width, seed=1))
        self.down = Packed(self.format_name, down_rows, self.inner)
        self.down.add_rows(stored, finite_rows(stored, down_rows, self.inner, seed=2))
        random = np.random.default_rng(3)
        self.up_bias = 9 * random.standard_normal(up_rows, dtype=np.float32)
        self.down_bias = random.standard_normal(down_rows, dtype=np.float32)

    @property
    def row_type(self) -> str:
        """Of the rows that the weights want."""
        return _native.wanted_rows(self.up.format).name

    def rows(self, values: np.ndarray) -> np.ndarray:
        """fp32 values as the rows that the weights want."""
        if self.row_type == "q8":
            return quantised(values)
        if self.format_name == "f32":
            return values
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    def run(
        self, values: np.ndarray, logits: np.ndarray, *, threads: int = 1, add: bool = False, fetches: bool = False,
        sums: bool = True,
    ) -> np.ndarray:  # fmt: skip
        """Results [T, width], added to ones with `add`, of fp32 values [T, width] and logits [T, X]."""
        num_tokens, kind = len(values), self.row_type
        x, num_rows = self.rows(values), num_tokens * self.top_k
        # No columns beside: those of a row of q8 follow each other.
        inner = empty_rows(kind, max(1, num_rows), self.inner)
        out = np.ones((num_tokens, self.width), np.float32)
        choices = np.zeros((max(1, num_tokens), 2 * self.top_k), np.int32)
        routed, self.counts = aligned(8 * num_rows + 64), np.zeros(self.num_experts, np.int32)
        plan = _native.Plan(threads, max(1, num_tokens), 1)
        if fetches:
            plan.fetch_experts()
        chosen = _native.Rows(choices.ctypes.data, choices.strides[0], _native.RowType.f32)
        common = (routed.ctypes.data, self.counts.ctypes.data, self.num_experts)
        plan.route(rows_of(logits), chosen, *common, self.top_k, True, factor=1.0)
        biases = [bias.ctypes.data if self.is_clamped else 0 for bias in (self.up_bias, self.down_bias)]
        gates = (Activation.silu, 1.702, 7.0 if self.is_clamped else 0.0)
        plan.expert_up(self.up.weight, biases[0], rows_of(x), rows_of(inner), *common, *gates, self.down.weight)
        if sums:
            plan.expert_down(self.down.weight, biases[1], rows_of(inner), rows_of(out), *common, add)
        run(plan, np.zeros(num_tokens))
        return out

    def expected(self, values: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """Compute the results in float64, with activations rounded as the rows are."""
        x = self.rounded(values)
        up, down = self.up.decoded().astype(np.float64), self.down.decoded().astype(np.float64)
        out = np.zeros((len(values), self.width))
        for token, row in enumerate(logits.astype(np.float64)):
            chosen = np.argsort(-row, kind="stable")[: self.top_k]
            weights = np.exp(row[chosen] - row.max())
            for expert, weight in zip(chosen, weights / weights.sum(), strict=True):
                rows = slice(expert * 2 * self.inner, (expert + 1) * 2 * self.inner)
                gate, other = np.split(up[rows] @ x[token] + self.is_clamped * self.up_bias[rows], 2)
                if self.is_clamped:
                    gate, other = np.minimum(gate, 7), np.clip(other, -7, 7)
                    inner = gate / (1 + np.exp(-1.702 * gate)) * (other + 1)
                else:
                    inner = gate / (1 + np.exp(-gate)) * other
                rows = slice(expert * self.width, (expert + 1) * self.width)
                product = down[rows] @ self.rounded(inner.astype(np.float32)[None])[0]
                out[token] += weight * (product + self.is_clamped * self.down_bias[rows])
        return out

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """fp32 values in float64, as rows of the weights' type hold them."""
        rows = self.rows(np.ascontiguousarray(values))
        if self.row_type == "q8":
            return dequantised(rows)
        return (rows if self.format_name == "f32" else (rows.astype(np.uint32) << 16).view(np.float32)).astype(float)


def random_step(num_tokens: int, experts: Experts) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(num_tokens)
    values = random.standard_normal((num_tokens, experts.width), dtype=np.float32)
    return values, 2 * random.standard_normal((num_tokens, experts.num_experts), dtype=np.float32)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 150])
@pytest.mark.parametrize("is_clamped", [False, True])
def test_results_are_those_of_each_tokens_experts(format_name: str, num_tokens: int, is_clamped: bool) -> None:
    experts = Experts(format_name, is_clamped=is_clamped)
    values, logits = random_step(num_tokens, experts)
    expected = experts.expected(values, logits)
    # bf16 rows and int8 blocks of the products between may round to a neighbour.
    tolerance = {"f32": 1e-5, "bf16": 1e-2}.get(format_name, 2e-2) * np.abs(expected).max(initial=0)
    np.testing.assert_allclose(experts.run(values, logits), expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(experts.run(values, logits, add=True), 1 + expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("format_name", FORMATS)
def test_results_do_not_depend_on_fetching(format_name: str) -> None:
    experts = Experts(format_name)
    values, logits = random_step(9, experts)
    assert np.array_equal(experts.run(values, logits), experts.run(values, logits, threads=2, fetches=True))


def test_experts_that_tokens_chose_are_fetched_from_their_file(tmp_path: Path) -> None:
    experts = Experts("f32", inner=64, width=512)
    (tmp_path / "weights").write_bytes(experts.down.data.tobytes())
    with (tmp_path / "weights").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_RANDOM)  # the system reads nothing beside
    experts.down.data = np.frombuffer(mapped, np.uint8)
    if resident_pages(experts.down.data).any():
        pytest.skip("this file system keeps files in memory")
    values, logits = random_step(1, experts)
    logits[0, [1, 4]] = 9
    deadline = time.monotonic() + 30
    while not resident_pages(experts.down.data).any() and time.monotonic() < deadline:
        experts.run(values, logits, fetches=True, sums=False)  # the end of a step stops what is not needed any more
    is_fetched = resident_pages(experts.down.data).reshape(experts.num_experts, -1).any(1)
    assert is_fetched[[1, 4]].any()
    assert not is_fetched[[0, 2, 3, 5]].any()


def resident_pages(memory: np.ndarray) -> np.ndarray:
    """Return for each page whether it is in memory."""
    found = np.zeros(-(-memory.nbytes // mmap.PAGESIZE), np.uint8)
    assert ctypes.CDLL(None).mincore(*map(ctypes.c_void_p, (memory.ctypes.data, memory.nbytes, found.ctypes.data))) == 0
    return found & 1 > 0


@pytest.mark.parametrize(("format_name", "inner"), [*((name, 32) for name in FORMATS), ("f32", 21), ("bf16", 21)])
def test_token_has_the_bits_that_it_has_alone(format_name: str, inner: int) -> None:
    """On any number of threads and instruction set. 21 columns begin within a tile of the experts before."""
    experts = Experts(format_name, inner=inner, width=96 if inner == 32 else 35, is_clamped=format_name == "q8")
    values, logits = random_step(70, experts)

    def found() -> np.ndarray:
        alone = np.concatenate([experts.run(values[t : t + 1], logits[t : t + 1]) for t in range(0, 70, 9)])
        for threads in (1, 3):
            results = experts.run(values, logits, threads=threads)
            np.testing.assert_array_equal(results[::9].view(np.uint32), alone.view(np.uint32))
        return alone

    first, *others = each_isa(found)
    for other in [] if format_name == "bf16" else others:
        np.testing.assert_array_equal(other.view(np.uint32), first.view(np.uint32))


@pytest.mark.parametrize("format_name", FORMATS)
def test_weights_of_experts_that_no_token_chose_are_not_used(format_name: str) -> None:
    experts = Experts(format_name)
    values, logits = random_step(9, experts)
    logits[:, [0, 2, 5]] -= 100
    expected = experts.run(values, logits)
    assert [count > 0 for count in experts.counts] == [False, True, False, True, True, False]
    assert experts.counts.sum() == 2 * 9
    for packed in (experts.up, experts.down):
        for expert in (0, 2, 5):
            size = len(packed.data) // experts.num_experts
            packed.data[expert * size : (expert + 1) * size] = 0xFF  # NaN
    np.testing.assert_array_equal(experts.run(values, logits), expected)


@pytest.mark.parametrize("num_tokens", [3, 20])
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, 17])
def test_tokens_are_routed_to_their_largest_logits(top_k: int, num_tokens: int, renormalise: bool) -> None:
    """Equal logits go to the lower index, and pairs of token and weight are sorted by expert, then token."""
    random = np.random.default_rng(top_k)
    logits = random.integers(-3, 4, (num_tokens, 17)).astype(np.float32)
    exponentials = np.exp(logits.astype(np.float64))
    order = np.argsort(-logits, kind="stable", axis=1)[:, :top_k]
    shares = exponentials / (
        np.take_along_axis(exponentials, order, 1) if renormalise else exponentials
    ).sum(1, keepdims=True)  # fmt: skip
    expected = sorted((expert, token) for token in range(num_tokens) for expert in order[token])

    def routed() -> np.ndarray:
        choices, counts = np.zeros((num_tokens, 2 * top_k), np.int32), np.zeros(17, np.int32)
        found = np.zeros(num_tokens * top_k, np.dtype([("token", "i4"), ("weight", "f4")]))
        plan = _native.Plan(2, num_tokens, 1)
        chosen = _native.Rows(choices.ctypes.data, choices.strides[0], _native.RowType.f32)
        plan.route(rows_of(logits), chosen, found.ctypes.data, counts.ctypes.data, 17, top_k, renormalise, factor=1.0)
        run(plan, np.zeros(num_tokens))
        assert counts.tolist() == [sum(expert == e for expert, _ in expected) for e in range(17)]
        return found

    first, *others = each_isa(routed)
    assert first["token"].tolist() == [token for _, token in expected]
    np.testing.assert_allclose(first["weight"], [shares[token, expert] for expert, token in expected], rtol=1e-6)
    for other in others:
        np.testing.assert_array_equal(other.view(np.uint8), first.view(np.uint8))


def test_token_whose_logits_are_nan_gives_nan_and_leaves_others() -> None:
    experts = Experts("f32")
    values, logits = random_step(6, experts)
    expected = experts.run(values, logits)
    logits[2] = np.nan
    found = experts.run(values, logits)
    assert np.isnan(found[2]).all()
    np.testing.assert_array_equal(np.delete(found, 2, 0), np.delete(expected, 2, 0))
