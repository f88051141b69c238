import pytest
import torch
from scipy import stats

from quire.sampling.filters import filtered_probabilities
from quire.sampling.nucleus import draw_from_nucleus, ranked_before
from tests.sampling.builders import params


def test_ranked_before() -> None:
    weights = torch.tensor([[5, 7, 5, 9, 5, 0]] * 3)
    before = ranked_before(weights, torch.tensor([2, 3, 5]))
    assert before.nonzero().tolist() == [[0, 0], [0, 1], [0, 3], [2, 0], [2, 1], [2, 2], [2, 3], [2, 4]]


@pytest.mark.parametrize("top_p", [0.05, 0.4, 0.9, 0.99])
def test_draws_have_the_distribution_of_top_p(top_p: float) -> None:
    # Five-fold ties at the edge; top_p decides between them by id.
    logits = torch.arange(10).repeat_interleave(5).flip(0) / 4.0
    count = 8000
    found = draw_from_nucleus(logits.softmax(-1).expand(count, -1), [top_p] * count, list(range(count)), [17] * count)
    expected = filtered_probabilities(logits[None, :], [params(top_p=top_p)])[0]
    counts = torch.bincount(torch.tensor(found), minlength=50)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    if kept.sum() > 1:
        frequencies = (expected[kept].double() / expected[kept].double().sum() * count).numpy()
        assert stats.chisquare(counts[kept].numpy(), frequencies).pvalue > 1e-4


def test_a_row_does_not_depend_on_the_others() -> None:
    probabilities = torch.randn(16, 3000, generator=torch.Generator().manual_seed(0)).softmax(-1)
    top_p = [0.05 + 0.06 * row for row in range(16)]
    seeds, positions = list(range(100, 116)), list(range(16))
    together = draw_from_nucleus(probabilities, top_p, seeds, positions)
    for row in range(16):
        one = slice(row, row + 1)
        assert draw_from_nucleus(probabilities[one], top_p[one], seeds[one], positions[one]) == [together[row]]


@pytest.mark.parametrize("top_p", [5e-324, 1e-30, 1e-6])
def test_the_best_token_is_always_inside(top_p: float) -> None:
    assert draw_from_nucleus(torch.full((1, 1000), 1e-3), [top_p], [0], [0]) == [0]
