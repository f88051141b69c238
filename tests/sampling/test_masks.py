import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.sampling.masks import BadWords, ban, keep_only, leaves_a_token

TOKENS = st.integers(0, 2)


def banned_by_definition(sequences: list[list[int]], output: list[int]) -> set[int]:
    """Every token after which the output would end with a bad sequence."""
    return {
        token_id for token_id in range(3) for sequence in sequences if [*output, token_id][-len(sequence) :] == sequence
    }


@given(
    sequences=st.lists(st.lists(TOKENS, min_size=1, max_size=4), max_size=5),
    output=st.lists(TOKENS, max_size=8),
)
def test_bad_words_ban_exactly_what_completes_them(sequences: list[list[int]], output: list[int]) -> None:
    assert BadWords(sequences).banned_next(output) == banned_by_definition(sequences, output)


def test_keep_only() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    keep_only(logits, [0, 2], [(2,), (0, 1)])
    inf = torch.inf
    assert logits.tolist() == [[-inf, -inf, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, -inf]]


def test_ban() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    ban(logits, [0, 2], [{0, 2}, {1}])
    inf = torch.inf
    assert logits.tolist() == [[-inf, 2.0, -inf], [4.0, 5.0, 6.0], [7.0, -inf, 9.0]]


def test_ban_nothing() -> None:
    logits = torch.ones(1, 3)
    ban(logits, [0], [set()])
    assert logits.tolist() == [[1.0, 1.0, 1.0]]


def test_leaves_a_token() -> None:
    assert leaves_a_token({0, 1}, None, 3)
    assert not leaves_a_token({0, 1, 2}, None, 3)
    assert leaves_a_token({0, 1}, (1, 2), 3)
    assert not leaves_a_token({0, 1}, (0, 1), 3)
