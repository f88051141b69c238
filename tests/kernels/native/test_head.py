"""The head that only compares: its answers are the argmax of the logits that the same product writes."""

import numpy as np
import pytest

from quire import _native
from tests.kernels.native.packed_weights import (
    ISAS,
    STORED,
    Packed,
    each_isa,
    finite_rows,
    random_acts,
    random_weights,
    rows_of,
    run,
    whole_blocks,
)


def likeliest(
    packed: Packed, acts: np.ndarray, *, bias: np.ndarray | None = None, threads: int = 1, soft_cap: float = 0.0
) -> np.ndarray:
    """Shapes: int32 `[S]`."""
    num_rows = len(acts)
    max_rows = num_rows + 2
    values, ids = np.full((threads, max_rows), np.nan, np.float32), np.full((threads, max_rows), -7, np.int32)
    tokens = np.full(max_rows, -7, np.int32)
    plan = _native.Plan(threads, max_rows, max_rows)
    plan.head(
        packed.weight, 0 if bias is None else bias.ctypes.data, rows_of(acts), values.ctypes.data, ids.ctypes.data,
        max_rows, soft_cap=soft_cap,
    )  # fmt: skip
    plan.argmax(values.ctypes.data, ids.ctypes.data, max_rows, tokens.ctypes.data)
    run(plan, np.zeros(1), num_logit_rows=num_rows)
    assert (tokens[num_rows:] == -7).all()
    return tokens[:num_rows]


def logits_of(packed: Packed, acts: np.ndarray) -> np.ndarray:
    out = np.zeros((len(acts), packed.num_outputs), dtype=np.float32)
    plan = _native.Plan(1, max(1, len(acts)), 1)
    plan.gemm(packed.weight, 0, rows_of(acts), rows_of(out))
    run(plan, np.zeros(len(acts)))
    return out


@pytest.mark.parametrize("format_name", [*STORED, "f32"])
@pytest.mark.parametrize("shape", [(1, 49), (2, 1), (3, 700), (9, 96), (70, 200), (150, 700)])
def test_largest_logit_wins(format_name: str, shape: tuple[int, int]) -> None:
    num_rows, num_outputs = shape
    width = whole_blocks(format_name, 64)
    if format_name == "f32":
        packed = Packed("f32", num_outputs, 64).add_rows("F32", finite_rows("F32", num_outputs, 64))
        acts = np.random.default_rng(0).standard_normal((num_rows, 64)).astype(np.float32)
    else:
        packed, acts = random_weights(format_name, num_outputs, width), random_acts(num_rows, width)
    wanted = logits_of(packed, acts).argmax(1)
    for threads in (1, 2, 3):
        for found in each_isa(lambda: likeliest(packed, acts, threads=threads)):  # noqa: B023
            assert np.array_equal(found, wanted)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("period", [7, 40])
def test_of_equal_logits_the_lowest_id_wins(isa: str, threads: int, period: int) -> None:
    """Within the 32 that are compared together, and among them."""
    raw = finite_rows("Q8_0", period, 32)
    packed = Packed("q8", 200, 32).add_rows("Q8_0", raw, np.arange(200, dtype=np.int32) % period)
    acts = random_acts(6, 32)
    for found in each_isa(lambda: likeliest(packed, acts, threads=threads), [isa]):
        assert (found < period).all()
        assert np.array_equal(found, logits_of(packed, acts).argmax(1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cap", [5.0, 0.01])
def test_logits_that_a_cap_makes_equal_count_as_equal(isa: str, cap: float) -> None:
    """The answer is that of the op `soft_cap` over the logits."""
    packed, acts = random_weights("q8", 90, 32), random_acts(5, 32)

    def both_ways() -> np.ndarray:
        logits = logits_of(packed, acts)
        out = np.zeros_like(logits)
        plan = _native.Plan(1, len(logits), 1)
        plan.soft_cap(rows_of(logits), rows_of(out), logits.shape[1], cap)
        run(plan, np.zeros(len(logits)))
        return np.stack([likeliest(packed, acts, threads=2, soft_cap=cap), out.argmax(1)])

    for found, wanted in each_isa(both_ways, [isa]):
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("num_outputs", [17, 33, 63])
def test_outputs_past_the_last_never_win(num_outputs: int) -> None:
    packed, acts = random_weights("q4m", num_outputs, 32), random_acts(4, 32)
    bias = np.full(num_outputs, -1e6, np.float32)
    bias[num_outputs - 2] = -1e5
    for found in each_isa(lambda: likeliest(packed, acts, bias=bias)):
        assert (found == num_outputs - 2).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_without_a_largest_finite_logit_have_no_answer(isa: str, threads: int) -> None:
    packed, acts = random_weights("q8", 130, 32), random_acts(4, 32)
    wanted = likeliest(packed, acts)
    acts["scale"][2] = np.nan
    infinite = np.zeros(130, np.float32)
    infinite[100] = np.inf
    not_a_number = np.zeros(130, np.float32)
    not_a_number[3] = np.nan
    nothing = np.full(130, -np.inf, np.float32)
    only = nothing.copy()
    only[77] = 0

    def all_ways() -> np.ndarray:
        ways = [None, infinite, not_a_number, nothing, only]
        return np.stack([likeliest(packed, acts, bias=bias, threads=threads) for bias in ways])

    for found in each_isa(all_ways, [isa]):
        assert found[0].tolist() == [wanted[0], wanted[1], -1, wanted[3]]
        assert (found[1:4] == -1).all()
        assert found[4].tolist() == [77, 77, -1, 77]


def test_step_that_samples_nothing() -> None:
    assert likeliest(random_weights("q8", 40, 32), random_acts(0, 32), threads=2).shape == (0,)
