"""The native sampler beside the reference: equal tokens, log-probabilities and ranks for all options."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import _native
from quire.sampling.native import NativeRowSampler
from quire.sampling.reference import ReferenceRowSampler, Sampled
from quire.sampling.sampler import Sampler
from quire.sampling_params import SamplingParams
from quire.types import NewRequest
from tests.sampling.builders import CPU, ById, gaussian, new_request, params

FIELDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.5},
    {"temperature": 1.9},
    {"min_p": 0.05},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 500, "temperature": 0.8},
    {"top_p": 0.9},
    {"top_p": 0.6, "temperature": 0.4},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01, "temperature": 1.3},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3},
    {"logit_bias": {3: 9.0, 5: -9.0, 7: 8.0}, "top_p": 0.95},
    {"allowed_token_ids": list(range(900, 100, -7)), "top_p": 0.9},
    {"allowed_token_ids": list(range(0, 2000, 5)), "top_k": 20, "logit_bias": {10: 5.0}},
    {"min_tokens": 9, "stop_token_ids": [1, 2], "top_k": 100},
]


def with_rows(rows: Any, vocab_size: int, requests: list[NewRequest]) -> ById:
    sampler = ById(Sampler(vocab_size, CPU))
    sampler.sampler.rows = rows
    for new in requests:
        sampler.add_request(new)
    return sampler


def both(logits: torch.Tensor, requests: list[NewRequest]) -> tuple[list[Sampled], list[Sampled]]:
    """Results of the native sampler on two threads, and of PyTorch's."""
    vocab_size, request_ids = logits.shape[1], [new.request_id for new in requests]
    native = NativeRowSampler(vocab_size, _native.ThreadPool(2))
    found, expected = (
        with_rows(rows, vocab_size, requests).sample(logits.clone(), request_ids)
        for rows in (native, ReferenceRowSampler())
    )
    return found, expected


@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
def test_999_of_1000_tokens_are_the_same(scale: float) -> None:
    num_seeds = 32
    requests = [
        new_request(
            f"{index} {seed}", params(logprobs=3, **fields), seed=seed, prompt=[1, 5, 9], output=[5, 6, 6], eos=[0],
            bad_words=[[4], [6, 8]],
        )
        for seed in range(num_seeds)
        for index, fields in enumerate(FIELDS)
    ]  # fmt: skip
    logits = gaussian(len(requests), 2003, seed=1, scale=scale)
    found, expected = both(logits, requests)
    same = [(a, b) for (one, a), (other, b) in zip(found, expected, strict=True) if one == other]
    assert len(same) >= 0.999 * len(requests)
    ranks_differ = 0
    for of_native, of_torch in same:
        assert of_native is not None
        assert of_torch is not None
        assert of_native.token_ids == of_torch.token_ids
        assert of_native.logprobs == pytest.approx(of_torch.logprobs, abs=1e-5)
        ranks_differ += of_native.ranks != of_torch.ranks
    # Two tokens tie where their log-probabilities round to the same, which hangs on the last bit of the sum.
    assert ranks_differ <= 0.003 * len(same)


@pytest.mark.parametrize("num_values", [1, 3, 40])
def test_ties_at_the_edge_of_what_is_looked_at_first(num_values: int) -> None:
    """Tokens that tie with the last of the likeliest 128 are drawn in the same order, inside and outside of these."""
    top_ps = [0.02, 0.05, 0.1, 0.127, 0.128, 0.129, 0.3]
    requests = [
        new_request(f"{seed} {top_p}", params(top_p=top_p), seed=seed) for seed in range(40) for top_p in top_ps
    ]
    logits = torch.floor(torch.rand(1, 1000, generator=torch.Generator().manual_seed(7)) * num_values) / num_values
    found, expected = both(logits.expand(len(requests), -1).contiguous(), requests)
    assert [one for one, _ in found] == [one for one, _ in expected]


WANTED = st.builds(
    lambda **fields: SamplingParams(max_tokens=None, **fields),
    temperature=st.sampled_from([0.0, 1e-5, 0.7, 2.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.2, 5e-324]),
    top_k=st.sampled_from([0, -1, 1, 5, 128, 10**30]),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 60.0, 0.02]),
    min_tokens=st.sampled_from([0, 2]),
    logprobs=st.sampled_from([None, 0, 3, -1, 1000]),
    logit_bias=st.sampled_from([None, {0: 100.0, 1: -100.0}]),
    allowed_token_ids=st.sampled_from([None, (0,), (3, 1, 2)]),
)


@settings(max_examples=40)
@given(
    wanted=st.lists(WANTED, min_size=1, max_size=5),
    vocab_size=st.sampled_from([4, 5, 16, 129, 300]),
    bad=st.sampled_from([None, float("nan"), float("inf"), float("-inf")]),
    seed=st.integers(0, 2**63),
)
def test_same_tokens_may_be_drawn(wanted: list[SamplingParams], vocab_size: int, bad: float | None, seed: int) -> None:
    """Logits are so far apart that last bits matter for draws only; where there is a choice these are not compared."""
    logits = torch.stack([torch.randperm(vocab_size, generator=torch.Generator().manual_seed(row)) * 0.5 for row in
                          range(len(wanted))])  # fmt: skip
    if bad is not None:
        logits[0, 1] = bad
        logits[-1] = bad
    requests = [
        new_request(str(row), some, seed=seed, prompt=[0, 1], output=[1, 2], eos=[3], bad_words=[[2], [1, 2, 0]])
        for row, some in enumerate(wanted)
    ]
    found, expected = both(logits, requests)
    has_logprobs = logits.amax(-1).isfinite().tolist()  # of others nothing can be said
    for row, some in enumerate(wanted):
        (token_id, logprobs), (other_id, others) = found[row], expected[row]
        assert (token_id is None) == (other_id is None)
        assert (logprobs is None) == (others is None)
        if some.is_greedy or some.top_k == 1 or some.min_p == 1:
            assert token_id == other_id
        if logprobs is not None and others is not None and token_id == other_id and has_logprobs[row]:
            assert logprobs.token_ids == others.token_ids
            assert logprobs.ranks == others.ranks
            assert logprobs.logprobs == pytest.approx(others.logprobs, abs=1e-5)


def test_logprobs_are_computed_a_slice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, token_ids = gaussian(9, 50, seed=3, scale=2.0), list(range(9))
    sampler = NativeRowSampler(50)
    whole = sampler.logprobs(logits, token_ids, -1)
    monkeypatch.setattr("quire.sampling.native._MAX_REPORTED", 100)
    assert sampler.logprobs(logits, token_ids, -1) == whole


def test_rows_may_be_columns_of_something_wider() -> None:
    wide = gaussian(4, 300, seed=4, scale=2.0)
    requests = [new_request(str(row), params(top_p=0.8), seed=row) for row in range(4)]
    for view in (wide[:, 20:120], wide.T[:100, :].T, wide[::2, :100][[0, 1, 0, 1]]):
        found, _ = both(view.contiguous(), requests)
        sampler = with_rows(NativeRowSampler(100), 100, requests)
        assert sampler.sample(view, [new.request_id for new in requests]) == found


def test_lists_that_grow_are_followed() -> None:
    """Penalties and bad words over more tokens than their first arrays hold."""
    vocab_size, steps = 300, 200
    fields = {"presence_penalty": 2.0, "repetition_penalty": 1.1, "min_tokens": 50, "top_k": 5}
    requests = [new_request("a", params(**fields), seed=1, eos=[7], bad_words=[[3], [5, 6], [8, 9, 10]])]
    samplers = [with_rows(rows, vocab_size, requests) for rows in (NativeRowSampler(vocab_size), ReferenceRowSampler())]
    differing = 0
    for step in range(steps):
        logits = gaussian(1, vocab_size, seed=step, scale=1.0)
        found, expected = (sampler.sample(logits.clone(), ["a"])[0][0] for sampler in samplers)
        assert expected is not None
        differing += found != expected
        for sampler in samplers:
            sampler.append_tokens("a", [expected])
    assert differing <= 1
