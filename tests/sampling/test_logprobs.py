"""Log-probabilities as reported, by the native sampler and by the reference."""

import math
from typing import Any

import pytest
import torch

from quire.sampling.native import NativeRowSampler
from quire.sampling.reference import ReferenceRowSampler
from quire.types import TokenLogprobs
from tests.sampling.builders import EXAMPLE


@pytest.fixture(params=["native", "reference"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def logprobs_of(kind: str, logits: torch.Tensor, token_ids: list[int], num: int) -> list[TokenLogprobs]:
    rows: Any = NativeRowSampler(logits.shape[-1]) if kind == "native" else ReferenceRowSampler()
    return rows.logprobs(logits.float() if kind == "native" else logits, token_ids, num)


@pytest.mark.parametrize(
    ("token_id", "num", "token_ids", "ranks"),
    [
        (3, 2, (3, 0, 1), (4, 1, 2)),
        (1, 3, (1, 0, 2), (2, 1, 3)),
        (4, 0, (4,), (5,)),
        (2, -1, (2, 0, 1, 3, 4), (3, 1, 2, 4, 5)),
        (2, 1000, (2, 0, 1, 3, 4), (3, 1, 2, 4, 5)),
    ],
)
def test_the_token_comes_first_then_the_likeliest(
    kind: str, token_id: int, num: int, token_ids: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    (found,) = logprobs_of(kind, EXAMPLE.log()[None, :], [token_id], num)
    assert found.token_ids == token_ids
    assert found.ranks == ranks
    assert found.logprobs == pytest.approx([math.log(EXAMPLE[i]) for i in token_ids], abs=1e-5)


def test_equal_logprobs_share_a_rank_and_come_by_lower_id(kind: str) -> None:
    (found,) = logprobs_of(kind, torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]]), [5], -1)
    assert found.token_ids == (5, 1, 3, 2, 4, 0)
    assert found.ranks == (3, 1, 1, 3, 3, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_equal_the_definition_in_fp64(kind: str, dtype: torch.dtype) -> None:
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    token_ids = [row % 40 for row in range(50)]
    expected = logits.double().log_softmax(-1)
    for row, found in enumerate(logprobs_of(kind, logits, token_ids, -1)):
        assert found.token_ids[0] == token_ids[row]
        assert found.logprobs == pytest.approx(expected[row, list(found.token_ids)].tolist(), abs=1e-5)
