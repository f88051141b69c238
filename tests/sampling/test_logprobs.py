"""Log-probabilities as reported, by the native sampler and by the reference."""

from typing import Any

import pytest
import torch

from quire.sampling.native import NativeRowSampler
from quire.sampling.reference import ReferenceRowSampler
from quire.types import TokenLogprobs


@pytest.fixture(params=["native", "reference"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def logprobs_of(kind: str, logits: torch.Tensor, token_ids: list[int], num: int) -> list[TokenLogprobs]:
    rows: Any = NativeRowSampler(logits.shape[-1]) if kind == "native" else ReferenceRowSampler()
    return rows.logprobs(logits.float() if kind == "native" else logits, token_ids, num)


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
