import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.sampling.random import draw, philox, uniforms

# Known answers of the authors of Philox (Random123, kat_vectors, philox4x32 with 10 rounds).
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def words(values: list[int]) -> list[np.ndarray]:
    return [np.array([value], dtype=np.uint64) for value in values]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert [int(word[0]) for word in philox(words(counter), words(key))] == expected


@given(st.lists(st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**40)), min_size=1, max_size=8))
def test_number_depends_on_its_seed_and_position_alone(pairs: list[tuple[int, int]]) -> None:
    together = uniforms([seed for seed, _ in pairs], [position for _, position in pairs])
    alone = [uniforms([seed], [position])[0] for seed, position in pairs]
    assert together.tolist() == alone
    assert all(0 <= number < 1 for number in alone)


def test_all_bits_of_seed_and_position_count() -> None:
    inputs = [(1 << bit, 0) for bit in range(64)] + [(0, 1 << bit) for bit in range(63)] + [(0, 0), (-1, 0)]
    numbers = uniforms([seed for seed, _ in inputs], [position for _, position in inputs])
    assert len(set(numbers.tolist())) == len(inputs)


def test_draw_is_the_inverse_of_the_cumulative_sum() -> None:
    weights = torch.tensor([0, 3, 0, 1, 4, 0])
    expected = {0.0: 1, 0.374: 1, 0.375: 3, 0.499: 3, 0.5: 4, 1 - 2**-53: 4}
    numbers = torch.tensor(list(expected), dtype=torch.float64)
    assert draw(weights.expand(len(expected), -1).contiguous(), numbers).tolist() == list(expected.values())


@given(st.lists(st.integers(1, 2**62), min_size=1, max_size=20))
def test_draw_stays_inside_whatever_the_sum(totals: list[int]) -> None:
    totals += [2**bit + step for bit in range(1, 62) for step in (-1, 0, 1)]
    weights = torch.zeros(len(totals), 3, dtype=torch.int64)
    weights[:, 1] = torch.tensor(totals)
    numbers = torch.full((len(totals),), 1 - 2**-53, dtype=torch.float64)
    assert draw(weights, numbers).tolist() == [1] * len(totals)
