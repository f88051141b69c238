"""Plans by themselves: which ops run, what a step may hold. What ops compute is tested beside this."""

from typing import Any

import numpy as np
import pytest

from quire import _native
from tests.kernels.native.packed_weights import rows_of


def step(plan: _native.Plan, counts: list[int], num_logit_rows: int = 0, parts: int = 1, nanoseconds: int = 0) -> None:
    """Run requests with `counts` tokens each, from position 0 on."""
    rows, starts = np.arange(len(counts), dtype=np.int32), np.zeros(len(counts), np.int32)
    lengths, tokens = np.array(counts, np.int32), np.zeros((len(counts), max(counts, default=1)), np.int32)
    logit_rows = np.zeros(num_logit_rows, np.int32)
    plan.run(
        parts, len(counts), num_logit_rows, rows.ctypes.data, starts.ctypes.data, lengths.ctypes.data,
        logit_rows.ctypes.data, tokens.ctypes.data, tokens.shape[1], 0, 0, 0, nanoseconds,
    )  # fmt: skip


def doubling(num_threads: int, max_tokens: int, max_requests: int) -> tuple[_native.Plan, np.ndarray, np.ndarray]:
    """Return a plan that doubles ones, with its input and its output."""
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
def test_step_larger_than_the_plan_is_refused(counts: list[int], num_logit_rows: int, message: str) -> None:
    plan, _, out = doubling(2, 8, 3)
    with pytest.raises(ValueError, match=message):
        step(plan, counts, num_logit_rows)
    assert (out == 0).all()
    step(plan, [4, 3, 1], 3)
    assert (out[:8] == 2).all()
    assert (out[8:] == 0).all()


def test_op_runs_for_any_of_its_parts_and_in_order() -> None:
    values = np.ones((1, 5), np.float32)
    plan = _native.Plan(3, 1, 1)
    plan.add(rows_of(values), rows_of(values), rows_of(values), 5, parts=1 | 2)
    plan.activate(rows_of(values), rows_of(values), 5, _native.Activation.relu, parts=4)
    plan.add(rows_of(values), rows_of(values), rows_of(values), 5, parts=2)
    for parts, factor in ((1, 2), (2, 4), (3, 4), (4, 1), (8, 1)):
        values[:] = 1
        step(plan, [1], parts=parts)
        assert (values == factor).all(), parts


def test_timed_run_gives_the_nanoseconds_of_each_op_that_ran() -> None:
    values = np.ones((8, 64), np.float32)
    plan = _native.Plan(2, 8, 1)
    for parts in (1, 2, 1):
        plan.scale(rows_of(values), rows_of(values), 64, 2.0, parts=parts)
    times = np.zeros(3, np.int64)
    step(plan, [8], nanoseconds=times.ctypes.data)
    assert (times > 0).tolist() == [True, False, True]
    assert (values == 4).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda plan: plan.norm(3), "norm.. takes no such value as x"),
        (lambda plan: plan.norm(wdith=3), "norm.. has no field wdith"),
        (lambda plan: plan.add(*range(20)), "add.. has 5 fields"),
    ],
)
def test_wrong_fields_of_an_op_are_errors(call: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call(_native.Plan(1, 1, 1))
