"""The native sampler against exact arithmetic, and against itself on every instruction set and number of threads."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import _native
from quire.sampling.random import uniforms
from tests.kernels.native.packed_weights import ISAS

pytestmark = pytest.mark.usefixtures("chosen_isa")

MINUS_INFINITY = float("-inf")
REACHED = 1 - 1e-6


class Options:
    """Fields of `_native.RowOptions`, and its lists as Python's."""

    def __init__(self, **fields: Any) -> None:
        self.allowed: list[int] = fields.pop("allowed", [])
        self.banned: list[int] = fields.pop("banned", [])
        self.bias: dict[int, float] = fields.pop("bias", {})
        self.penalised: dict[int, int] = fields.pop("penalised", {})
        self.fields = fields
        self._arrays: list[np.ndarray] = []

    def get(self, name: str) -> Any:
        return self.fields.get(name, getattr(_native.RowOptions(), name))

    def native(self) -> _native.RowOptions:
        options = _native.RowOptions()
        for name, value in self.fields.items():
            setattr(options, name, value)
        if self.allowed:
            options.allow(self._address(self.allowed, np.int64), len(self.allowed))
        if self.banned:
            options.ban(self._address(self.banned, np.int64), len(self.banned))
        for values, setter in ((self.bias, options.bias), (self.penalised, options.penalise)):
            if values:
                ids, numbers = self._address(list(values), np.int64), self._address(list(values.values()), np.float32)
                setter(ids, numbers, len(values))
        return options

    def _address(self, values: list[Any], dtype: Any) -> int:
        self._arrays.append(np.array(values, dtype))
        return self._arrays[-1].ctypes.data


class Found:
    """Results of one call, also those of rows that did not want them."""

    def __init__(self, num_rows: int, num_top: int) -> None:
        self.token_ids = np.full(num_rows, -7, np.int32)
        self.logprobs = np.full(num_rows, -7, np.float32)
        self.ranks = np.full(num_rows, -7, np.int64)
        self.top_ids = np.full((num_rows, num_top), -7, np.int32)
        self.top_logprobs = np.full((num_rows, num_top), -7, np.float32)

    @property
    def arrays(self) -> list[np.ndarray]:
        return [self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs]


def sample(logits: np.ndarray, rows: list[Options], *, isa: str = ISAS[-1], num_threads: int = 1) -> Found:
    """Shapes: logits fp32 [S, V], whose rows need not touch each other."""
    _native.set_isa(isa)
    pool = _native.ThreadPool(num_threads) if num_threads > 1 else None
    num_top = max([row.get("num_top") for row in rows], default=0)
    found = Found(len(rows), num_top)
    before = logits.copy()
    sampler = _native.Sampler(logits.shape[1], pool)
    sampler.sample(
        logits.ctypes.data, logits.strides[0] // 4, [row.native() for row in rows],
        *(array.ctypes.data for array in found.arrays), num_top,
    )  # fmt: skip
    np.testing.assert_array_equal(logits.view(np.uint32), before.view(np.uint32), err_msg="logits are as before")
    return found


def gaussian(rows: int, vocab_size: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab_size)) * scale).astype(np.float32)


def peaked(rows: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """Like a language model's: a few tokens have most of the probability."""
    logits = gaussian(rows, vocab_size, seed)
    generator = np.random.default_rng(seed)
    for row in logits:
        row[generator.choice(vocab_size, 20, replace=False)] += 14 - np.arange(20) * 0.4
    return logits


# --- The same on every instruction set, number of threads and in every batch --------------------------------------

OPTIONS = st.builds(
    lambda wants_logprobs, num_top, **fields: Options(
        wants_logprobs=wants_logprobs, num_top=num_top if wants_logprobs else 0, **fields
    ),
    temperature=st.sampled_from([0.0, 1e-5, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 40, 127, 128, 200]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 5e-324]),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**40),
    wants_logprobs=st.booleans(),
    num_top=st.integers(0, 5),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    allowed=st.sampled_from([[], [1, 2, 4], list(range(0, 250, 3))]),
    banned=st.sampled_from([[], [0, 2]]),
    bias=st.sampled_from([{}, {3: 5.0, 1: -100.0}]),
    penalised=st.sampled_from([{}, {2: 0, 4: 3, 1: 1}]),
)
SIZES = [1, 5, 16, 255, 256, 257, 700]
SHAPES: list[Callable[[int, int, int], np.ndarray]] = [
    gaussian,
    lambda rows, size, seed: gaussian(rows, size, seed, 0.1),
    lambda rows, size, seed: np.round(gaussian(rows, size, seed)),
]


@settings(max_examples=60)
@given(rows=st.lists(OPTIONS, min_size=1, max_size=6), size=st.sampled_from(SIZES), seed=st.integers(0, 9),
       shape=st.sampled_from(SHAPES))  # fmt: skip
def test_bits_depend_on_the_row_alone(rows: list[Options], size: int, seed: int, shape: Any) -> None:
    logits = shape(len(rows), size, seed)
    for row in rows:
        row.allowed = [token_id for token_id in row.allowed if token_id < size]
        if "num_top" in row.fields:
            row.fields["num_top"] = min(row.fields["num_top"], size)
    together = sample(logits, rows)
    for isa in ISAS:
        for num_threads in (1, 3):
            found = sample(logits, rows, isa=isa, num_threads=num_threads)
            for array, expected in zip(found.arrays, together.arrays, strict=True):
                np.testing.assert_array_equal(array, expected, err_msg=f"{isa}, {num_threads} threads")
    for index, row in enumerate(rows):
        alone = sample(logits[index : index + 1].copy(), [row])
        for array, expected in zip(alone.arrays, together.arrays, strict=True):
            np.testing.assert_array_equal(
                array[0], expected[index] if array.ndim == 1 else expected[index, : array.shape[1]]
            )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [1, 15, 17, 250, 257, 511])
def test_memory_beside_a_row_is_not_read(size: int, isa: str) -> None:
    logits = gaussian(3, size)
    beside = np.full((3, size + 300), np.nan, np.float32)
    beside[:, :size] = logits
    beside[1, size:] = np.inf
    rows = [
        Options(temperature=temperature, top_p=top_p, top_k=top_k, wants_logprobs=True, num_top=min(3, size))
        for temperature, top_p, top_k in ((0.0, 1.0, 0), (1.0, 0.9, 0), (1.0, 1.0, 7))
    ]
    found, expected = sample(beside[:, :size], rows, isa=isa), sample(logits, rows)
    for array, wanted in zip(found.arrays, expected.arrays, strict=True):
        np.testing.assert_array_equal(array, wanted)


# --- Against exact arithmetic -------------------------------------------------------------------------------------


def kept_in_order(logits: np.ndarray, options: Options) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that may be drawn, best first, and their weights in float64."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / options.get("temperature"))
    weights[weights < options.get("min_p")] = 0
    if 0 < options.get("top_k") < len(logits):
        order, weights = order[: options.get("top_k")], weights[: options.get("top_k")]
    if options.get("top_p") < 1:
        reached = np.cumsum(weights) >= options.get("top_p") * REACHED * weights.sum()
        count = int(np.argmax(reached)) + 1
        order, weights = order[:count], weights[:count]
    return order[weights > 0], weights[weights > 0]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.4},
        {"temperature": 2.0},
        {"min_p": 0.02},
        {"min_p": 1.0},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 900, "temperature": 1.7},
        {"top_k": 2500, "top_p": 0.9},
        {"top_p": 0.8},
        {"top_p": 5e-324},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.001, "temperature": 1.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [400, 9001])
def test_token_is_where_the_random_number_points(fields: dict[str, Any], size: int) -> None:
    """Without filters tokens are in the order of ids, else best first."""
    num_rows = 60
    logits = peaked(num_rows, size)
    rows = [Options(seed=seed * 0x9E3779B97F4A7C15 % 2**64, position=seed**5, **fields) for seed in range(num_rows)]
    numbers = uniforms([row.get("seed") for row in rows], [row.get("position") for row in rows])
    found = sample(logits, rows).token_ids
    by_rank = fields.get("top_p", 1) < 1 or 0 < fields.get("top_k", 0) < size
    for index, row in enumerate(rows):
        token_ids, weights = kept_in_order(logits[index], row)
        if not by_rank:
            by_id = np.argsort(token_ids)
            token_ids, weights = token_ids[by_id], weights[by_id]
        ends = np.cumsum(weights) / weights.sum()
        place = np.flatnonzero(token_ids == found[index])
        assert place.size == 1, "the token is one of those kept"
        start = ends[place[0]] - weights[place[0]] / weights.sum()
        assert start - 1e-6 <= numbers[index] <= ends[place[0]] + 1e-6


def counts_of(logits: np.ndarray, options: Options, num_draws: int) -> np.ndarray:
    rows = [Options(**options.fields, seed=seed) for seed in range(num_draws)]
    found = sample(np.ascontiguousarray(np.broadcast_to(logits, (num_draws, len(logits)))), rows)
    return np.bincount(found.token_ids, minlength=len(logits))


@pytest.mark.parametrize("shares", [[40, 30, 20, 10], [50, 25, 15, 10], [35, 25, 22, 18], [61, 29, 6, 4], [37, 33, 30]])
@pytest.mark.parametrize("filler", [0, 400])
def test_two_tokens_that_reach_top_p_but_for_rounding_suffice(shares: list[int], filler: int) -> None:
    logits = np.concatenate([np.log(shares), np.full(filler, -60)]).astype(np.float32)
    options = Options(top_p=(shares[0] + shares[1]) / 100)
    assert np.flatnonzero(counts_of(logits, options, 60)).tolist() == [0, 1]


def test_quarter_of_a_million_tokens() -> None:
    size = 262_144 + 3
    logits = peaked(2, size, 3)
    rows = [Options(temperature=0.0), Options(top_p=0.9, seed=5, wants_logprobs=True, num_top=3)]
    found = sample(logits, rows, num_threads=2)
    assert found.token_ids[0] == logits[0].argmax()
    assert found.token_ids[1] in kept_in_order(logits[1], rows[1])[0]
    flat = np.zeros((2, size), np.float32)
    found = sample(flat, [Options(top_p=0.5, seed=1), Options(temperature=1.0, seed=2)])
    assert found.token_ids[0] <= size // 2
    assert found.token_ids[1] == int(uniforms([2], [0])[0] * size)


# --- Edges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_rows_that_hold_nan_or_infinity_have_no_token(fields: dict[str, Any], isa: str) -> None:
    bad = list(itertools.product([np.nan, -np.nan, np.inf], [0, 16, 299]))
    logits = gaussian(len(bad) + 2, 300)
    for row, (value, place) in enumerate(bad):
        logits[row, place] = value
    logits[-1] = MINUS_INFINITY
    found = sample(logits, [Options(**fields)] * len(logits), isa=isa).token_ids
    assert found[-2] >= 0
    assert np.delete(found, -2).tolist() == [-1] * (len(bad) + 1)


@pytest.mark.parametrize("isa", ISAS)
def test_largest_is_found_wherever_it_is(isa: str) -> None:
    places = [0, 15, 16, 255, 256, 511, 512, 688, 699]
    logits = gaussian(len(places), 700)
    logits[np.arange(len(places)), places] = 20
    for fields in ({"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-5}):
        assert sample(logits, [Options(**fields)] * len(places), isa=isa).token_ids.tolist() == places


def test_all_equal_tokens_are_kept_by_lower_id() -> None:
    logits = np.full(1000, -3.25, np.float32)
    assert np.flatnonzero(counts_of(logits, Options(top_k=3), 100)).tolist() == [0, 1, 2]
    assert np.flatnonzero(counts_of(logits, Options(top_p=0.25), 400)).max() < 250
    assert np.flatnonzero(counts_of(logits, Options(top_p=0.05), 900)).tolist() == list(range(50))
    assert np.flatnonzero(counts_of(logits, Options(top_p=5e-324), 20)).tolist() == [0], "the best always counts"
    assert counts_of(logits, Options(temperature=0.0), 1)[0] == 1


def test_zeros_of_both_signs_are_equal() -> None:
    logits = np.zeros(40, np.float32)
    logits[::2] = -0.0
    assert np.flatnonzero(counts_of(logits, Options(top_k=2), 50)).tolist() == [0, 1]
    assert counts_of(logits, Options(temperature=0.0), 1)[0] == 1


@pytest.mark.parametrize("fields", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.5}, {"temperature": 0.0}], ids=str)
def test_one_token_left(fields: dict[str, Any]) -> None:
    assert sample(np.full((1, 1), 7.0, np.float32), [Options(**fields)]).token_ids[0] == 0
    logits = np.full((1, 700), MINUS_INFINITY, np.float32)
    logits[0, 333] = -1e30
    assert sample(logits, [Options(**fields)]).token_ids[0] == 333


def test_values_of_any_size() -> None:
    logits = np.array([[-3e38, 3e38, 2.9e38, 1.0]], np.float32)
    for fields in ({}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 2.0, "min_p": 0.1}):
        assert sample(logits, [Options(**fields)]).token_ids[0] == 1
    tiny = (gaussian(1, 500) * 1e-30).astype(np.float32)
    order = kept_in_order(tiny[0], Options(top_k=4))[0]
    assert set(np.flatnonzero(counts_of(tiny[0], Options(top_k=4), 60))) == set(order)


def test_edits_come_in_order_and_are_undone() -> None:
    logits = np.array([[9.0, 1.0, 1.0, 0.0, 0.5]], np.float32)
    # 0 is banned, and a bias does not bring it back; 2 is lifted to 4, halved, and lowered by 2 x 0.5 + 0.5 to 0.5.
    fields: dict[str, Any] = {
        "banned": [0], "bias": {2: 3.0, 0: 100.0}, "penalised": {2: 2, 0: 1}, "repetition_penalty": 2.0,
        "frequency_penalty": 0.5, "presence_penalty": 0.5, "temperature": 0.0, "wants_logprobs": True, "num_top": 2,
    }  # fmt: skip
    assert sample(logits, [Options(**fields)]).token_ids[0] == 1
    assert sample(logits, [Options(**fields, allowed=[0, 2, 3])]).token_ids[0] == 2
    assert sample(logits, [Options(**fields, allowed=[0])]).token_ids[0] == -1
    found = sample(logits, [Options(**fields, allowed=[3])])
    assert (found.token_ids[0], found.ranks[0]) == (3, 5)
    assert found.top_ids.tolist() == [[0, 1]]


def test_ids_outside_the_vocabulary_are_passed_over() -> None:
    outside = [5, 10**12, -1]
    options = Options(
        temperature=0.0, allowed=[*outside, 2, 3], banned=[*outside, 3], bias={7: 1.0}, penalised={-3: 2, 8: 1}
    )
    assert sample(np.array([[4.0, 3.0, 2.0, 3.0, 0.0]], np.float32), [options]).token_ids[0] == 2


def test_rows_that_want_nothing_but_a_token_need_no_other_memory() -> None:
    logits, token_ids = gaussian(2, 40), np.zeros(2, np.int32)
    _native.Sampler(40, None).sample(
        logits.ctypes.data, 40, [Options(temperature=0.0).native()] * 2, token_ids.ctypes.data
    )
    assert token_ids.tolist() == logits.argmax(1).tolist()
    found = sample(logits, [Options(temperature=0.0), Options(temperature=0.0, wants_logprobs=True)])
    assert (found.logprobs[0], found.ranks[0], found.ranks[1]) == (-7, -7, 1)


# --- Log-probabilities --------------------------------------------------------------------------------------------


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [1, 20, 300, 3000])
def test_logprobs_and_ranks(size: int, isa: str) -> None:
    logits = np.round(gaussian(4, size, 2, scale=6.0), 1)  # ties
    num_top = min(size, 7)
    rows = [Options(seed=seed, wants_logprobs=True, num_top=num_top) for seed in range(4)]
    found, expected = sample(logits, rows, isa=isa), log_softmax(logits)
    for index, token_id in enumerate(found.token_ids):
        assert found.logprobs[index] == pytest.approx(expected[index, token_id], abs=2e-6)
        assert found.ranks[index] == 1 + (logits[index] > logits[index, token_id]).sum()
        order = np.lexsort((np.arange(size), -logits[index]))[:num_top]
        assert found.top_ids[index].tolist() == order.tolist()
        np.testing.assert_allclose(found.top_logprobs[index], expected[index, order], atol=2e-6)


def test_logprobs_of_the_whole_vocabulary() -> None:
    logits = gaussian(1, 1000)
    logits[0, ::10] = MINUS_INFINITY
    found = sample(logits, [Options(wants_logprobs=True, num_top=1000)])
    assert sorted(found.top_ids[0]) == list(range(1000))
    assert found.top_ids[0, 900:].tolist() == list(range(0, 1000, 10)), "those that cannot be, by id"
    np.testing.assert_allclose(found.top_logprobs[0, :900], log_softmax(logits)[0, found.top_ids[0, :900]], atol=2e-6)
    assert (found.top_logprobs[0, 900:] == MINUS_INFINITY).all()


@pytest.mark.parametrize("isa", ISAS)
def test_likeliest_tokens_of_a_row_of_huge_logits(isa: str) -> None:
    """Any bound below all finite values is below -inf's there, too; still nothing past the vocabulary is found."""
    logits = np.full((1, 70), MINUS_INFINITY, np.float32)
    logits[0, [3, 69]] = 3e38, 2e38
    found = sample(logits, [Options(temperature=0.0, wants_logprobs=True, num_top=70)], isa=isa)
    assert found.top_ids[0, :3].tolist() == [3, 69, 0]
    assert sorted(found.top_ids[0]) == list(range(70))
    assert (found.token_ids[0], found.logprobs[0], found.ranks[0]) == (3, 0, 1)
    assert (found.top_logprobs[0, 2:] == MINUS_INFINITY).all()


@pytest.mark.parametrize("isa", ISAS)
def test_logprobs_of_given_tokens(isa: str) -> None:
    _native.set_isa(isa)
    logits = np.round(gaussian(5, 333), 2)  # ties, which share a rank
    token_ids = np.array([0, 332, 5, 6, int(logits[4].argmax())], np.int32)
    found = Found(5, 2)
    _, *results = found.arrays
    sampler = _native.Sampler(333, None)
    sampler.logprobs(logits.ctypes.data, 333, 5, token_ids.ctypes.data, *(array.ctypes.data for array in results), 2)
    expected = log_softmax(logits)
    np.testing.assert_allclose(found.logprobs, expected[np.arange(5), token_ids], atol=2e-6)
    own = logits[np.arange(5), token_ids][:, None]
    assert found.ranks.tolist() == (1 + (logits > own).sum(1)).tolist()
    assert found.ranks[4] == 1 < found.ranks[:4].min()
    assert found.top_ids.tolist() == np.argsort(-logits, axis=1, kind="stable")[:, :2].tolist()


def test_logprobs_of_logits_that_are_no_numbers() -> None:
    """A token can be chosen where the NaN is banned, but nothing can be said of it."""
    logits = gaussian(1, 20)
    logits[0, 3] = np.nan
    found = sample(logits, [Options(banned=[3], wants_logprobs=True, num_top=2)])
    assert found.token_ids[0] >= 0
    assert np.isnan(found.logprobs[0])
    assert np.isnan(found.top_logprobs).all()


def test_refused() -> None:
    sampler = _native.Sampler(10, None)
    logits, token_ids = gaussian(1, 10), np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="num_top"):
        sampler.sample(logits.ctypes.data, 10, [Options(num_top=2).native()], token_ids.ctypes.data, 0, 0, 0, 0, 1)
    for size in (0, 2**22 + 1):
        with pytest.raises(ValueError, match="1 to 4 million"):
            _native.Sampler(size, None)
