import random

import pytest

from quire.drafts.token_index import END, KEY_TOKENS, LONGEST_MATCH, MAX_PLACES, TokenIndex


def match_len(tokens: list[int], position: int, context: list[int]) -> int:
    most = min(LONGEST_MATCH, len(context), position)
    return next((n for n in range(most) if tokens[position - 1 - n] != context[-1 - n]), most)


@pytest.mark.parametrize("vocab_size", [2, 5, 1000])
def test_found_place_has_the_longest_match_of_the_newest_places(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    num_found = 0
    for _ in range(100):
        index, tokens = TokenIndex(), []
        for _ in range(rng.randrange(1, 8)):  # in long pieces and in short ones, which are linked in two ways
            new = [rng.randrange(vocab_size) for _ in range(rng.choice((1, 2, 5, 40, 900)))]
            index.extend(new)
            tokens += new
        start = rng.randrange(len(tokens))
        context = tokens[start : start + rng.randrange(50)]
        found = index.find(context)
        places = [
            position
            for position in range(len(tokens) - 1, KEY_TOKENS - 1, -1)
            if len(context) >= KEY_TOKENS and tokens[position - KEY_TOKENS : position] == context[-KEY_TOKENS:]
        ]
        lengths = [match_len(tokens, position, context) for position in places[:MAX_PLACES]]
        if found is None:
            # Other keys with the same hash may have taken the places that one search compares.
            assert not places or vocab_size > 2
            continue
        num_found += 1
        assert found.match_len == match_len(tokens, found.position, context) >= KEY_TOKENS
        if vocab_size == 1000:  # few places of a key: all are compared
            assert (found.position, found.match_len) == (places[lengths.index(max(lengths))], max(lengths))
    assert num_found > 20


def test_tokens_that_follow_end_with_their_sequence() -> None:
    index = TokenIndex()
    index.extend([7, 8, 9, 1, 2, END, 3])
    assert index.following(1, 2) == (8, 9)
    assert index.following(3, 9) == (1, 2)
    assert index.following(6, 9) == (3,)
    assert index.following(7, 9) == ()
    assert index.find([7, 8, 9]) == (3, 3)
    assert index.find([8, 9]) is None
    assert index.find([1, 2, 3]) is None
