from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from quire.sampling.penalties import TokenCounts, apply_logit_bias, apply_penalties
from tests.sampling.builders import params

VOCAB_SIZE = 30
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)


def counts_of(prompt: list[int], output: list[int]) -> TokenCounts:
    counts = TokenCounts(prompt)
    for token_id in output:
        counts.add(token_id)
    return counts


@given(prompt=TOKENS, output=TOKENS)
def test_counts(prompt: list[int], output: list[int]) -> None:
    counts = counts_of(prompt, output)
    expected = Counter(output)
    assert sorted(counts.ids.tolist()) == sorted({*prompt, *output})
    assert {i: int(c) for i, c in zip(counts.ids.tolist(), counts.counts.tolist(), strict=True) if c} == dict(expected)


def test_counts_grow_past_their_first_capacity() -> None:
    counts = counts_of([], [*range(1000), 999])
    assert counts.ids.tolist() == list(range(1000))
    assert counts.counts.tolist() == [1.0] * 999 + [2.0]


@given(
    seed=st.integers(0, 1000),
    repetition=st.floats(0.125, 3, width=32),
    frequency=st.floats(-2, 2, width=32),
    presence=st.floats(-2, 2, width=32),
    texts=st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=4),
)
def test_penalties_equal_the_definition(
    seed: int, repetition: float, frequency: float, presence: float, texts: list[tuple[list[int], list[int]]]
) -> None:
    logits = torch.randn(len(texts) + 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    expected = logits.numpy().astype(np.float64)
    wanted = params(repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence)
    for row, (prompt, output) in enumerate(texts):
        for token_id in {*prompt, *output}:
            value = expected[row, token_id]
            expected[row, token_id] = value / repetition if value > 0 else value * repetition
        for token_id, count in Counter(output).items():
            expected[row, token_id] -= frequency * count + presence
    rows = range(len(texts))
    apply_penalties(logits, rows, [wanted for _ in rows], [counts_of(*text) for text in texts])
    np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("penalty", [0.5, 1.2, 2.0])
def test_repetition_equals_transformers(penalty: float) -> None:
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    prompt, output = [1, 5, 5, 9], [2, 9, 2]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())
    apply_penalties(logits, [0], [params(repetition_penalty=penalty)], [counts_of(prompt, output)])
    torch.testing.assert_close(logits, expected)


def test_each_row_has_its_own_penalty() -> None:
    logits = torch.ones(3, 2)
    wanted = [params(frequency_penalty=0.5), params(presence_penalty=2.0)]
    apply_penalties(logits, [0, 2], wanted, [counts_of([], [0, 0, 0]), counts_of([], [1, 1])])
    assert logits.tolist() == [[-0.5, 1.0], [1.0, 1.0], [1.0, -1.0]]


def test_frequency_and_presence_ignore_the_prompt() -> None:
    logits = torch.zeros(1, 4)
    wanted = params(repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=1.0)
    apply_penalties(logits, [0], [wanted], [counts_of([0, 1], [1])])
    assert logits.tolist() == [[0.0, -2.0, 0.0, 0.0]]


def test_no_tokens_no_change() -> None:
    logits = torch.ones(1, 4)
    apply_penalties(logits, [0], [params(presence_penalty=1.0)], [TokenCounts()])
    assert logits.tolist() == [[1.0] * 4]


def test_masked_logits_stay_masked() -> None:
    logits = torch.tensor([[-torch.inf, 1.0]])
    wanted = params(repetition_penalty=1.5, frequency_penalty=-2.0, presence_penalty=-2.0)
    apply_penalties(logits, [0], [wanted], [counts_of([], [0])])
    apply_logit_bias(logits, [0], [{0: 100.0}])
    assert logits.tolist() == [[-torch.inf, 1.0]]


def test_logit_bias() -> None:
    logits = torch.zeros(3, 4)
    apply_logit_bias(logits, [0, 2], [{1: 2.5, 3: -1.0}, {0: 100.0}])
    assert logits.tolist() == [[0.0, 2.5, 0.0, -1.0], [0.0] * 4, [100.0, 0.0, 0.0, 0.0]]
