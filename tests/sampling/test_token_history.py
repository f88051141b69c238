from collections import Counter

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.sampling.reference import apply_penalties
from quire.sampling.token_history import BadWords, TokenCounts
from tests.sampling.builders import params

VOCAB_SIZE = 30
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)


def counts_of(prompt: list[int], output: list[int]) -> TokenCounts:
    counts = TokenCounts(prompt)
    for token_id in output:
        counts.add(token_id)
    return counts


@given(
    seed=st.integers(0, 1000),
    repetition=st.floats(0.125, 3, width=32),
    frequency=st.floats(-2, 2, width=32),
    presence=st.floats(-2, 2, width=32),
    prompt=TOKENS,
    output=TOKENS,
)
def test_penalties_equal_the_definition(
    seed: int, repetition: float, frequency: float, presence: float, prompt: list[int], output: list[int]
) -> None:
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    expected = logits.numpy().astype(np.float64)
    wanted = params(repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence)
    for token_id in {*prompt, *output}:
        value = expected[token_id]
        expected[token_id] = value / repetition if value > 0 else value * repetition
    for token_id, count in Counter(output).items():
        expected[token_id] -= frequency * count + presence
    apply_penalties(logits, wanted, counts_of(prompt, output))
    np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-5, atol=1e-5)


def banned_by_definition(sequences: list[list[int]], output: list[int]) -> set[int]:
    """Return the tokens after which the output would end with a bad sequence."""
    return {
        token_id for token_id in range(3) for sequence in sequences if [*output, token_id][-len(sequence) :] == sequence
    }


@given(
    sequences=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=5),
    output=st.lists(st.integers(0, 2), max_size=8),
)
def test_bad_words_ban_exactly_the_tokens_that_complete_them(sequences: list[list[int]], output: list[int]) -> None:
    assert BadWords(sequences).banned_next(output) == banned_by_definition(sequences, output)
