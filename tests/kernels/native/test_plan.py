"""Plans by themselves: which ops run, what a step may hold. What ops compute is tested beside this."""

import numpy as np
import pytest

from quire import _native
from tests.kernels.native.packed_weights import rows_of


def step(plan: _native.Plan, counts: list[int], num_logit_rows: int = 0, parts: int = 1) -> None:
    """Requests with so many tokens each, from position 0 on."""
    rows, starts = np.arange(len(counts), dtype=np.int32), np.zeros(len(counts), np.int32)
    lengths, tokens = np.array(counts, np.int32), np.zeros((len(counts), max(counts, default=1)), np.int32)
    logit_rows = np.zeros(num_logit_rows, np.int32)
    plan.run(
        parts, len(counts), num_logit_rows, rows.ctypes.data, starts.ctypes.data, lengths.ctypes.data,
        logit_rows.ctypes.data, tokens.ctypes.data, tokens.shape[1], 0, 0, 0,
    )  # fmt: skip


def doubling(num_threads: int, max_tokens: int, max_requests: int) -> tuple[_native.Plan, np.ndarray, np.ndarray]:
    """A plan that adds ones to themselves, its input and its output."""
    ones, out = np.ones((max_tokens + 2, 5), np.float32), np.zeros((max_tokens + 2, 5), np.float32)
    plan = _native.Plan(num_threads, max_tokens, max_requests)
    plan.add(rows_of(ones), rows_of(ones), rows_of(out), 5)
    return plan, ones, out


@pytest.mark.parametrize(
    ("counts", "num_logit_rows", "message"),
    [
        ([1, 1, 1, 1], 0, "4 requests, 4 tokens and 0 rows"),
        ([4, 5], 0, "2 requests, 9 tokens and 0 rows"),
        ([2], 4, "1 requests, 2 tokens and 4 rows"),
    ],
)
def test_a_step_larger_than_the_plan_is_refused(counts: list[int], num_logit_rows: int, message: str) -> None:
    plan, _, out = doubling(2, 8, 3)
    with pytest.raises(ValueError, match=message):
        step(plan, counts, num_logit_rows)
    assert (out == 0).all()
    step(plan, [4, 3, 1], 3)
    assert (out[:8] == 2).all()
    assert (out[8:] == 0).all()


def test_an_op_runs_for_any_of_its_parts_and_in_order() -> None:
    values = np.ones((1, 5), np.float32)
    plan = _native.Plan(3, 1, 1)
    plan.add(rows_of(values), rows_of(values), rows_of(values), 5, parts=1 | 2)
    plan.activate(rows_of(values), rows_of(values), 5, _native.Activation.relu, parts=4)
    plan.add(rows_of(values), rows_of(values), rows_of(values), 5, parts=2)
    for parts, factor in ((1, 2), (2, 4), (3, 4), (4, 1), (8, 1)):
        values[:] = 1
        step(plan, [1], parts=parts)
        assert (values == factor).all(), parts
    assert plan.op_names() == ["add", "activate", "add"]


def test_ops_are_timed_only_while_they_are_profiled() -> None:
    plan, _, _ = doubling(2, 8, 1)
    step(plan, [8])
    assert plan.nanoseconds() == []
    plan.set_profiling(True)
    step(plan, [8], parts=2)
    assert plan.nanoseconds() == [0], "an op that did not run"
    step(plan, [8])
    assert plan.nanoseconds()[0] > 0
    plan.set_profiling(False)
    assert plan.nanoseconds() == []
