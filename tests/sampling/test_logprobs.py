import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.sampling import logprobs as logprobs_module
from quire.sampling.logprobs import prompt_logprobs, raw_logprobs, token_logprobs
from quire.types import TokenLogprobs
from tests.sampling.builders import EXAMPLE

EXAMPLE_ROW = EXAMPLE.log()[None, :]


def one(token_id: int, num: int) -> TokenLogprobs:
    return token_logprobs(raw_logprobs(EXAMPLE_ROW), [token_id], [num])[0]


def test_the_token_comes_first_then_the_likeliest() -> None:
    found = one(3, 2)
    assert found.token_ids == (3, 0, 1)
    assert found.ranks == (4, 1, 2)
    assert found.logprobs == pytest.approx([math.log(p) for p in (0.10, 0.40, 0.30)])


def test_the_token_is_not_repeated() -> None:
    found = one(1, 3)
    assert found.token_ids == (1, 0, 2)
    assert found.ranks == (2, 1, 3)


def test_zero_reports_the_token_alone() -> None:
    assert one(4, 0).token_ids == (4,)
    assert one(4, 0).ranks == (5,)


@pytest.mark.parametrize("num", [-1, 5, 1000])
def test_all_of_the_vocabulary(num: int) -> None:
    found = one(2, num)
    assert found.token_ids == (2, 0, 1, 3, 4)
    assert found.ranks == (3, 1, 2, 4, 5)
    assert math.fsum(math.exp(value) for value in found.logprobs) == pytest.approx(1)


def test_equal_logprobs_share_a_rank_and_come_by_lower_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]])
    found = token_logprobs(raw_logprobs(logits), [5], [-1])[0]
    assert found.token_ids == (5, 1, 3, 2, 4, 0)
    assert found.ranks == (3, 1, 1, 3, 3, 6)


@given(
    seed=st.integers(0, 1000),
    asked=st.lists(st.tuples(st.integers(0, 29), st.integers(-1, 35)), min_size=1, max_size=5),
)
def test_rows_with_different_numbers_equal_rows_alone(seed: int, asked: list[tuple[int, int]]) -> None:
    # Whole numbers: many ties.
    logits = torch.randint(-3, 3, (len(asked), 30), generator=torch.Generator().manual_seed(seed)).float()
    values = raw_logprobs(logits)
    together = token_logprobs(values, [token_id for token_id, _ in asked], [num for _, num in asked])
    for row, (token_id, num) in enumerate(asked):
        assert together[row] == token_logprobs(values[row : row + 1], [token_id], [num])[0]
        ranked = sorted(range(30), key=lambda i: (-values[row, i].item(), i))[: 30 if num == -1 else num]
        assert together[row].token_ids == (token_id, *(i for i in ranked if i != token_id))
        for place, rank in zip(together[row].token_ids, together[row].ranks, strict=True):
            assert rank == 1 + int((values[row] > values[row, place]).sum())


def test_prompt_logprobs_by_slices_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    token_ids = [row % 40 for row in range(50)]
    whole = prompt_logprobs(logits, token_ids, 3)
    calls = []

    def counted(values: torch.Tensor) -> torch.Tensor:
        calls.append(len(values))
        return values.float().log_softmax(dim=-1)

    monkeypatch.setattr("quire.sampling.row_slices.SLICE_ELEMENTS", 7 * 40)
    monkeypatch.setattr(logprobs_module, "raw_logprobs", counted)
    assert prompt_logprobs(logits, token_ids, 3) == whole
    assert calls == [7] * 7 + [1]
    expected = logits.double().log_softmax(-1)
    for row, found in enumerate(whole):
        assert found.token_ids[0] == token_ids[row]
        assert found.logprobs[0] == pytest.approx(expected[row, token_ids[row]].item(), abs=1e-5)


def test_low_precision_logits_are_normalised_in_fp32() -> None:
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = prompt_logprobs(logits, [1, 2], -1)
    for position in found:
        assert math.fsum(math.exp(value) for value in position.logprobs) == pytest.approx(1, abs=1e-5)
