from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from quire.sampling.reference import draw_from_nucleus, fixed_point, tempered_probabilities
from tests.sampling.builders import filtered_probabilities, gaussian, params

COMBINATIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.7},
    {"top_k": 7},
    {"top_k": 200},
    {"top_k": 3000},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.99},
    {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 1500, "top_p": 0.95},
    {"temperature": 0.6, "min_p": 0.02, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.05, "top_k": 20, "top_p": 0.7},
]


def by_definition(logits: torch.Tensor, **fields: Any) -> list[float]:
    """Return the kept tokens of one row, by a plain sort in fp64."""
    wanted = params(**fields)
    probabilities = (logits.double() / wanted.temperature).softmax(-1)
    probabilities[probabilities < wanted.min_p * probabilities.max()] = 0
    ranked = sorted(range(len(logits)), key=lambda i: (-probabilities[i].item(), i))
    ranked = ranked[: wanted.top_k if wanted.top_k > 0 else None]
    total = sum(probabilities[i].item() for i in ranked)
    kept, mass = [], 0.0
    for i in ranked:
        if wanted.top_p < 1 and mass >= wanted.top_p * total * (1 - 1e-6):
            break
        kept.append(i)
        mass += probabilities[i].item()
    return [probabilities[i].item() / mass if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize("fields", COMBINATIONS, ids=str)
def test_equals_transformers(fields: dict[str, Any]) -> None:
    logits = gaussian(6, 6000)
    expected = logits.double() / fields.get("temperature", 1.0)
    unused = torch.zeros(6, 1, dtype=torch.long)
    if "min_p" in fields:
        expected = MinPLogitsWarper(fields["min_p"])(unused, expected)
    if "top_k" in fields:
        expected = TopKLogitsWarper(fields["top_k"])(unused, expected)
    if "top_p" in fields:
        expected = TopPLogitsWarper(fields["top_p"])(unused, expected)
    found = filtered_probabilities(logits, [params(**fields)] * 6)
    torch.testing.assert_close(found, expected.softmax(-1).float(), rtol=1e-4, atol=1e-9)


@given(
    seed=st.integers(0, 10_000),
    vocab_size=st.integers(1, 60),
    temperature=st.floats(0.05, 2),
    top_k=st.integers(-1, 70),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)
def test_equals_the_definition_with_ties(
    seed: int, vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    # Whole numbers: many ties, which the definition breaks by id.
    logits = torch.randint(-3, 4, (1, vocab_size), generator=torch.Generator().manual_seed(seed)).float()
    fields = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    found = filtered_probabilities(logits, [params(**fields)])[0]
    assert found.tolist() == pytest.approx(by_definition(logits[0], **fields), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_row_that_cannot_be_drawn_from_is_nan_and_others_are_not(bad: float) -> None:
    logits = gaussian(3, 1000)
    logits[1, 700] = bad
    probabilities = tempered_probabilities(logits, [params(), params(), params(min_p=0.1)])
    assert probabilities.isnan().all(-1).tolist() == [False, True, False]
    assert not probabilities[[0, 2]].isnan().any()


@pytest.mark.parametrize("top_p", [5e-324, 1e-30, 1e-6])
def test_best_token_is_always_in_the_nucleus(top_p: float) -> None:
    assert draw_from_nucleus(fixed_point(torch.full((1000,), 1e-3)), top_p, 0, 0) == 0
