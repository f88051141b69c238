"""llama.cpp's samplers against formulas written here, and against Transformers where it has them."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

from quire.sampling import chain
from quire.sampling.random import uniforms
from quire.sampling.sampler import Sampler
from quire.sampling.state import SamplingState
from quire.sampling.token_history import Repeats
from quire.types import NewRequest
from tests.sampling.builders import CPU, draw_many, gaussian, new_request, params, sample_all, sample_one

VOCAB_SIZE = 60
ON: dict[str, dict[str, Any]] = {
    "typical": {"typical_p": 0.7},
    "sigma": {"top_n_sigma": 1.0},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    "dry": {"dry_multiplier": 0.8, "dry_sequence_breakers": []},
    "mirostat": {"mirostat": 2, "mirostat_tau": 3.0},
    "dynatemp": {"dynatemp_range": 0.5},
    "all": {
        "typical_p": 0.95, "top_n_sigma": 2.0, "xtc_probability": 0.5, "xtc_threshold": 0.05, "dry_multiplier": 0.5,
        "dry_sequence_breakers": [], "dynatemp_range": 0.3, "top_k": 40, "top_p": 0.98, "min_p": 0.01,
        "repetition_penalty": 1.1, "logit_bias": {3: 1.0}, "temperature": 0.8,
    },
}  # fmt: skip


def state_of(sampling: Any, **of_request: Any) -> SamplingState:
    state = Sampler(VOCAB_SIZE, CPU).start(new_request("a", sampling, **of_request))
    assert state is not None
    return state


def kept_by(step: Any, logits: np.ndarray, **fields: Any) -> set[int]:
    mask = step(logits.astype(np.float64), state_of(params(**fields)))
    return set(range(len(logits))) if mask is None else set(np.flatnonzero(mask).tolist())


def kept_by_warper(warper: Any, logits: np.ndarray) -> set[int]:
    warped = warper(torch.zeros(1, 1, dtype=torch.long), torch.from_numpy(logits.astype(np.float64))[None])[0]
    return set(torch.isfinite(warped).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
@pytest.mark.parametrize(
    ("step", "fields", "warper"),
    [
        (chain.typical_p, {"typical_p": 0.2}, TypicalLogitsWarper(mass=0.2)),
        (chain.typical_p, {"typical_p": 0.9}, TypicalLogitsWarper(mass=0.9)),
        (chain.top_p, {"top_p": 0.8}, TopPLogitsWarper(top_p=0.8)),
        (chain.min_p, {"min_p": 0.1}, MinPLogitsWarper(min_p=0.1)),
        (chain.top_k, {"top_k": 7}, TopKLogitsWarper(top_k=7)),
    ],
    ids=["typical 0.2", "typical 0.9", "top_p", "min_p", "top_k"],
)
def test_step_keeps_the_tokens_of_transformers(step: Any, fields: dict[str, Any], warper: Any, scale: float) -> None:
    for logits in gaussian(20, 5000, seed=4, scale=scale).numpy():
        assert kept_by(step, logits, **fields) == kept_by_warper(warper, logits)


def test_of_equal_tokens_the_first_are_kept() -> None:
    equal = np.zeros(5000)
    assert kept_by(chain.top_k, equal, top_k=1500) == set(range(1500))
    assert kept_by(chain.top_p, equal, top_p=0.5) == set(range(2500))
    assert kept_by(chain.typical_p, equal, typical_p=0.5) == set(range(2500))


@pytest.mark.parametrize("n", [0.5, 1.0, 2.5])
def test_top_n_sigma_keeps_logits_near_the_largest(n: float) -> None:
    for logits in gaussian(5, 500, seed=7).numpy().astype(np.float64):
        mean = math.fsum(logits) / len(logits)
        sigma = math.sqrt(math.fsum((value - mean) ** 2 for value in logits) / len(logits))
        expected = {index for index, value in enumerate(logits) if value >= max(logits) - n * sigma}
        assert kept_by(chain.top_n_sigma, logits, top_n_sigma=n) == expected
        assert 0 < len(expected) < len(logits)


def test_top_n_sigma_measures_only_tokens_that_may_be_chosen() -> None:
    # Among the allowed tokens sigma is 1, and 0 is two of them away; with the vocabulary's others it would be 6.
    logits = [3.0, 1.0, 1.0, 3.0] + [-20.0] * 8
    sampling = params(allowed_token_ids=[0, 1, 2, 3], top_n_sigma=1.5, temperature=2.0)
    drawn = draw_many(torch.tensor(logits), sampling, 200)
    assert set(drawn.tolist()) == {0, 3}


@pytest.mark.parametrize(("threshold", "dropped"), [(0.35, set()), (0.25, {0}), (0.12, {0, 1}), (0.0, {0, 1, 2, 3})])
def test_xtc_drops_all_above_the_threshold_but_the_least_likely(threshold: float, dropped: set[int]) -> None:
    logits = np.log([0.40, 0.30, 0.15, 0.10, 0.05])
    fields = {"xtc_probability": 1.0, "xtc_threshold": threshold}
    assert kept_by(chain.xtc, logits, **fields) == set(range(5)) - dropped


def test_xtc_happens_with_its_probability_by_seed_and_position() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    sampling = params(xtc_probability=0.3, xtc_threshold=0.1, top_k=2)
    drawn = draw_many(logits, sampling, 2000)
    # With XTC token 1 is certain, else it has 0.3 / 0.8.
    assert abs((drawn == 1).float().mean().item() - (0.3 + 0.7 * 0.375)) < 0.04
    numbers = uniforms(range(2000), [1] * 2000, attempt=chain.XTC_ATTEMPT)
    assert bool((drawn[torch.from_numpy(numbers < 0.3)] == 1).all())


# --- Temperature -----------------------------------------------------------------------------------


def test_dynamic_temperature_follows_the_entropy() -> None:
    probabilities = np.array([0.7, 0.2, 0.1])
    share = -(probabilities * np.log(probabilities)).sum() / math.log(3)
    sampling = params(temperature=1.0, dynatemp_range=0.6, dynatemp_exponent=2.0)
    found = chain.temperature(np.log(probabilities) + 5, sampling)
    assert found == pytest.approx(0.4 + 1.2 * share**2, rel=1e-12)
    assert chain.temperature(np.zeros(9), sampling) == pytest.approx(1.6)
    assert chain.temperature(np.array([0.0]), sampling) == 1.0
    wide = params(temperature=0.5, dynatemp_range=1.0)
    assert chain.temperature(np.array([0.0, -800.0]), wide) == pytest.approx(1e-5), "never below 0, nor a division by 0"


def test_temperature_comes_last() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    hot = {"temperature": 2.0, "top_p": 0.75}
    # top_p sees 0.5 and 0.3 here; behind a temperature of 2 the first two would have 0.68 together.
    assert set(draw_many(logits, params(**hot, top_n_sigma=100.0), 300).tolist()) == {0, 1}
    assert set(draw_many(logits, params(**hot), 300).tolist()) == {0, 1, 2}


def test_draws_have_the_distribution_of_all_steps_together() -> None:
    logits = gaussian(1, VOCAB_SIZE, seed=3, scale=1.5)[0]
    sampling = params(top_n_sigma=2.0, top_k=30, typical_p=0.9, top_p=0.9, min_p=0.05, temperature=1.3)
    expected = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
    left = logits.double()[None]
    left[left < left.max() - 2.0 * left.std(correction=0)] = -torch.inf
    nothing = torch.zeros(1, 1, dtype=torch.long)
    for warper in (TopKLogitsWarper(30), TypicalLogitsWarper(0.9), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)):
        left = warper(nothing, left)
    expected = (left[0] / 1.3).softmax(-1)
    counts = torch.bincount(draw_many(logits, sampling, 1500), minlength=VOCAB_SIZE)
    kept = expected > 0
    assert 2 < kept.sum() < 30
    assert counts[~kept].sum() == 0
    assert stats.chisquare(counts[kept].numpy(), (expected[kept] * 1500).numpy()).pvalue > 1e-4


def test_greedy_request_takes_the_largest_logit_after_dry() -> None:
    logits = [0.0, 2.0, 1.9, 1.0]
    fields = {"temperature": 0.0, "typical_p": 0.3, "xtc_probability": 1.0, "dynatemp_range": 1.0}
    assert sample_one(logits, new_request(sampling=params(**fields))) == 1
    fields |= {"dry_multiplier": 1.0, "dry_sequence_breakers": []}
    assert sample_one(logits, new_request(sampling=params(**fields), prompt=[0, 3, 1, 2, 0, 3])) == 2


# --- Mirostat --------------------------------------------------------------------------------------


def test_mirostat_draws_within_mu_and_corrects_it() -> None:
    sampling = params(mirostat=2, mirostat_tau=2.0, mirostat_eta=0.3, temperature=0.9, seed=5)
    sampler = Sampler(VOCAB_SIZE, CPU)
    state = sampler.start(new_request("a", sampling, seed=5))
    assert state is not None
    mu = 4.0
    for row in gaussian(30, VOCAB_SIZE, seed=8).numpy():
        scaled = row.astype(np.float64) / 0.9
        surprises = -np.log2(np.exp(scaled) / np.exp(scaled).sum())
        kept = [index for index, surprise in enumerate(surprises) if surprise <= mu] or [int(scaled.argmax())]
        among = np.exp(scaled[kept]) / np.exp(scaled[kept]).sum()
        number = float(uniforms([5], [state.num_tokens])[0])
        expected = kept[int(np.searchsorted(np.cumsum(among), number, side="right"))]
        assert sampler.sample(row[None].copy(), [state]) == [(expected, None)]
        assert sampler.sample(row[None].copy(), [state]) == [(expected, None)], "asked again before the token counts"
        state.append(expected)
        mu -= 0.3 * (-math.log2(among[kept.index(expected)]) - 2.0)
        assert state.mirostat_mu == pytest.approx(mu, abs=1e-9)


def test_mirostat_holds_the_mean_surprise_near_tau() -> None:
    rows = gaussian(1500, 400, seed=2, scale=2.5).numpy()
    means = {}
    for tau in (1.5, 4.0):
        sampler = Sampler(400, CPU)
        state = sampler.start(new_request("a", params(mirostat=2, mirostat_tau=tau)))
        assert state is not None
        surprises = []
        for row in rows:
            mu = state.mirostat_mu
            ((token_id, _),) = sampler.sample(row[None].copy(), [state])
            assert token_id is not None
            state.append(token_id)
            assert mu is not None
            assert state.mirostat_mu is not None
            surprises.append((mu - state.mirostat_mu) / 0.1 + tau)
        means[tau] = sum(surprises[100:]) / len(surprises[100:])
    assert means == pytest.approx({1.5: 1.5, 4.0: 4.0}, abs=0.15)


def test_mirostat_goes_on_from_the_mu_that_a_request_brings() -> None:
    new = new_request("a", params(mirostat=2), output=[4, 5])
    returned = NewRequest(**{**{name: getattr(new, name) for name in new.__struct_fields__}, "mirostat_mu": 3.25})
    assert SamplingState(returned, params(mirostat=2), VOCAB_SIZE).mirostat_mu == 3.25
    assert SamplingState(new, params(mirostat=2), VOCAB_SIZE).mirostat_mu == 10.0


# --- DRY -------------------------------------------------------------------------------------------


def longest_continuations(
    token_ids: Sequence[int], last_n: int, breaks_after: Sequence[bool], exempt: set[int], least: int
) -> dict[int, int]:
    """Return, by comparing every pair of ends, how long a repetition each token would continue."""
    window = list(token_ids) if last_n < 0 else list(token_ids)[-last_n:]
    flags = list(breaks_after)[-len(window) :]
    limit = 0
    for is_break in reversed(flags):
        if is_break:
            break
        limit += 1
    found: dict[int, int] = {}
    for end in range(len(window) - 1):
        length = 0
        while length < limit and length <= end and window[end - length] == window[len(window) - 1 - length]:
            length += 1
        token_id = window[end + 1]
        if length >= least and token_id not in exempt:
            found[token_id] = max(found.get(token_id, 0), length)
    return found


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.integers(0, 3), max_size=25), st.lists(st.integers(0, 3), max_size=25),
    st.sampled_from([-1, 1, 2, 7, 20]), st.sampled_from([0, 1, 2, 4]), st.sets(st.integers(0, 3), max_size=2),
)  # fmt: skip
def test_repetitions_are_those_found_by_comparing_all_pairs(
    before: list[int], after: list[int], last_n: int, least: int, breaking: set[int]
) -> None:
    token_bytes = [b"|" if token_id in breaking else b"x" for token_id in range(4)]
    grown = Repeats(before, last_n, [b"|"], token_bytes)
    for token_id in after:
        grown.add(token_id)
    at_once = Repeats(before + after, last_n, [b"|"], token_bytes)
    tokens = before + after
    flags = [token_id in breaking for token_id in tokens]
    expected = longest_continuations(tokens, last_n, flags, breaking, least)
    for repeats in (grown, at_once):
        ids, lengths = repeats.continuations(least)
        assert dict(zip(ids.tolist(), lengths.tolist(), strict=True)) == expected


def test_breaker_in_the_text_of_several_tokens_begins_anew() -> None:
    token_bytes = [b"a", b"b", b"\nUs", b"er:", b" er", b"x\ny"]
    repeated = [0, 1, 2, 3, 0, 1, 2, 3]
    whole = Repeats(repeated, -1, [b"User:"], token_bytes)
    assert whole.continuations(1)[0].tolist() == [], "the text ends with the breaker"
    other = Repeats([0, 1, 2, 4, 0, 1, 2, 4], -1, [b"User:"], token_bytes)
    assert dict(zip(*map(list, other.continuations(1)), strict=True)) == {0: 4}
    inside = Repeats([5, 0, 1, 5, 0], -1, [b"\n"], token_bytes)
    assert dict(zip(*map(list, inside.continuations(1)), strict=True)) == {1: 1}, "counted from the line end on"
    exempt = Repeats([0, 5, 0, 5, 0], -1, [b"\n"], token_bytes)
    assert exempt.continuations(1)[0].tolist() == [], "a token that holds a breaker is not penalised"


def test_dry_lowers_logits_by_a_power_of_the_length() -> None:
    sampling = params(dry_multiplier=0.8, dry_base=1.75, dry_allowed_length=2, dry_sequence_breakers=[])
    state = state_of(sampling, prompt=[9, 1, 2, 3, 7, 8, 1, 2, 3], output=[7])
    logits = np.zeros(VOCAB_SIZE)
    chain.penalise_repeats(logits, state)
    assert logits[8] == pytest.approx(-0.8 * 1.75 ** (4 - 2))
    assert np.count_nonzero(logits) == 1


def test_dry_on_a_very_long_repetition_stays_finite() -> None:
    sampling = params(dry_multiplier=100.0, dry_base=100.0, dry_sequence_breakers=[])
    state = state_of(sampling, prompt=[1] * 3000)
    logits = np.zeros(VOCAB_SIZE)
    chain.penalise_repeats(logits, state)
    assert -np.inf < logits[1] < -1e30


def test_dry_without_a_tokenizer_fails_unless_it_has_no_breakers() -> None:
    state = state_of(params(dry_multiplier=0.8))
    assert state.failure is not None
    assert "pass an empty list" in state.failure.reason
    assert state_of(params(dry_multiplier=0.8, dry_sequence_breakers=[])).failure is None


# --- Rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", ON.values(), ids=ON)
def test_token_does_not_depend_on_the_other_rows(fields: dict[str, Any]) -> None:
    logits = gaussian(6, VOCAB_SIZE, seed=9)
    prompt = [5, 6, 7, 8, 5, 6]
    mixed = [
        new_request(str(row), params(**(fields if row % 2 else {"top_p": 0.9})), prompt=prompt, seed=row)
        for row in range(6)
    ]
    together = sample_all(logits, mixed)
    assert together == [sample_all(logits[row, None], [new])[0] for row, new in enumerate(mixed)]


@pytest.mark.parametrize("fields", ON.values(), ids=ON)
def test_returned_request_goes_on_as_if_it_had_stayed(fields: dict[str, Any]) -> None:
    sampler = Sampler(VOCAB_SIZE, CPU)
    rows = gaussian(12, VOCAB_SIZE, seed=11).numpy()
    new = new_request("a", params(**fields), prompt=[5, 6, 7, 5], seed=4)
    stayed = sampler.start(new)
    returned = sampler.start(new)
    assert stayed is not None
    output: list[int] = []
    for number, row in enumerate(rows):
        if number == 6:
            assert returned is not None
            again = {name: getattr(new, name) for name in new.__struct_fields__}
            again |= {"token_ids": (*new.token_ids, *output), "mirostat_mu": stayed.mirostat_mu}
            returned = sampler.start(NewRequest(**again))
        ((token_id, _),) = sampler.sample(row[None].copy(), [stayed])
        assert token_id is not None
        if number >= 6:
            assert returned is not None
            assert sampler.sample(row[None].copy(), [returned]) == [(token_id, None)]
            returned.append(token_id)
        stayed.append(token_id)
        output.append(token_id)


def test_masks_bias_and_penalties_come_before_the_steps() -> None:
    logits = [0.0, 0.5, 1.0, 0.9, 0.8]
    on = {"top_n_sigma": 0.001}  # only the largest logit is left
    for fields, of_request, expected in (
        ({}, {}, 2),
        ({"allowed_token_ids": [1, 4]}, {}, 4),
        ({"logit_bias": {0: 5.0}}, {}, 0),
        ({"repetition_penalty": 2.0}, {"prompt": [2]}, 3),
        ({"frequency_penalty": 1.0, "presence_penalty": 1.0}, {"output": [2, 3]}, 4),
        ({}, {"bad_words": [[2], [3]]}, 4),
        ({"min_tokens": 3}, {"eos": [2]}, 3),
    ):
        assert sample_one(logits, new_request(sampling=params(**on, **fields), **of_request)) == expected


def test_logprobs_are_those_of_the_unchanged_logits() -> None:
    logits = gaussian(1, VOCAB_SIZE, seed=1)
    ((token_id, found),) = sample_all(logits, [new_request(sampling=params(logprobs=3, **ON["all"]))])
    assert found is not None
    assert found.token_ids[0] == token_id
    assert found.logprobs[0] == pytest.approx(logits[0].log_softmax(-1)[token_id].item(), abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_without_a_choice_give_no_token(bad: float) -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[0, 3] = bad
    requests = [new_request(str(row), params(typical_p=0.5), seed=row) for row in range(2)]
    (first, _), (second, _) = sample_all(logits, requests)
    assert first is None
    assert second is not None


# --- Logits processors -----------------------------------------------------------------------------


def test_processor_sees_generated_tokens_and_decides_by_the_logits_it_returns() -> None:
    seen = []

    def only_next(token_ids: list[int], logits: np.ndarray) -> np.ndarray:
        seen.append((list(token_ids), logits.dtype, logits.shape))
        kept = np.full_like(logits, -np.inf)
        kept[token_ids[-1] + 1] = 0
        return kept

    def never(token_ids: list[int], logits: np.ndarray) -> np.ndarray:
        logits[:] = -np.inf
        return logits

    new = new_request(sampling=params(logits_processors=[never, only_next]), prompt=[1, 2], output=[7, 8])
    logits = gaussian(1, VOCAB_SIZE)
    assert sample_all(logits, [new])[0][0] == 9
    assert seen == [([7, 8], np.float32, (VOCAB_SIZE,))]
    chained = dataclasses.replace(params(logits_processors=[only_next]), typical_p=0.5)
    assert sample_all(logits, [new_request(sampling=chained, output=[20])])[0][0] == 21


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda token_ids, logits: logits[:3], r"shape \(3,\), not \(60,\)"),
        (lambda token_ids, logits: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda token_ids, logits: None, "failed"),
    ],
)
def test_failing_processor_ends_its_request_alone(function: Any, reason: str) -> None:
    sampler = Sampler(VOCAB_SIZE, CPU)
    bad = sampler.start(new_request("bad", params(logits_processors=[function])))
    good = sampler.start(new_request("good", params()))
    assert bad is not None
    assert good is not None
    (first, _), (second, _) = sampler.sample(gaussian(2, VOCAB_SIZE).numpy(), [bad, good])
    assert first is None
    assert second is not None
    message, code = bad.explain_failure()
    assert code is None
    assert re.search(reason, message)
