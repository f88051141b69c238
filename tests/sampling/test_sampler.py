"""Sampling parameters have their effect, by the native sampler as by PyTorch's."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from scipy import stats

from quire.sampling.reference import ReferenceRowSampler
from quire.sampling.sampler import Sampler
from tests.sampling.builders import (
    CPU,
    EXAMPLE,
    draw_many,
    filtered_probabilities,
    gaussian,
    new_request,
    params,
    sample_all,
    sample_one,
)

LOGITS = EXAMPLE.log()
GREEDY = {"temperature": 0.0}
NUM_DRAWS = 800


@pytest.fixture(autouse=True, scope="module", params=["native", "torch"])
def row_sampler(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr("quire.sampling.sampler.NativeRowSampler", lambda *_: ReferenceRowSampler())
        yield


# --- Distributions -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "vocab_size"),
    [
        ({}, 20),
        ({"temperature": 0.5}, 20),
        ({"top_k": 3}, 20),
        ({"min_p": 0.2}, 20),
        ({"top_k": 10, "top_p": 0.6}, 20),
        ({"temperature": 0.8, "min_p": 0.05, "top_k": 8, "top_p": 0.95}, 20),
        ({"top_p": 0.7}, 400),
        ({"temperature": 1.5, "min_p": 0.05, "top_p": 0.9}, 400),
    ],
    ids=str,
)
def test_draws_have_the_filtered_distribution(fields: dict[str, Any], vocab_size: int) -> None:
    # 400 tokens, nearly equal: top_p does not fit the first pool.
    logits = gaussian(1, vocab_size, seed=3, scale=1.0 if vocab_size == 20 else 0.1)[0]
    wanted = params(**fields)
    counts = torch.bincount(draw_many(logits, wanted, NUM_DRAWS), minlength=vocab_size)
    expected = filtered_probabilities(logits[None, :], [wanted])[0].double()
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    assert kept.sum() > 1
    frequencies = (expected[kept] / expected[kept].sum() * NUM_DRAWS).numpy()
    assert stats.chisquare(counts[kept].numpy(), frequencies).pvalue > 1e-4


# --- Each option has its effect ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "of_request", "expected"),
    [
        ({}, {}, 0),
        ({"logit_bias": {4: 5.0}}, {}, 4),
        ({"allowed_token_ids": [3, 2]}, {}, 2),
        ({"repetition_penalty": 3.0}, {"prompt": [0]}, 1),
        ({"repetition_penalty": 3.0}, {"output": [0, 1]}, 2),
        ({"frequency_penalty": 0.2}, {"output": [0] * 5}, 1),
        ({"frequency_penalty": 0.2}, {"output": [0]}, 0),
        ({"frequency_penalty": 2.0}, {"prompt": [0] * 5}, 0),
        ({"presence_penalty": 1.0}, {"output": [0]}, 1),
        ({"presence_penalty": 1.0}, {"prompt": [0]}, 0),
        ({"presence_penalty": -2.0}, {"output": [2]}, 2),
        ({}, {"bad_words": [[0], [1]]}, 2),
        ({}, {"bad_words": [[1, 3, 0]], "output": [1, 3]}, 1),
        ({}, {"bad_words": [[1, 3, 0]], "output": [1, 4]}, 0),
        ({}, {"bad_words": [[1, 3, 0]], "prompt": [1, 3]}, 0),
        ({"min_tokens": 2}, {"eos": [0]}, 1),
        ({"min_tokens": 2}, {"eos": [0], "output": [3]}, 1),
        ({"min_tokens": 2}, {"eos": [0], "output": [3, 3]}, 0),
        ({"min_tokens": 2, "ignore_eos": True}, {"eos": [0]}, 0),
        ({"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [0]}, {"eos": [1]}, 1),
        ({"min_tokens": 2, "stop_token_ids": [0, 1]}, {"eos": [2]}, 3),
        ({"min_tokens": 2, "stop_token_ids": [99]}, {"eos": [77]}, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("logits", [LOGITS, LOGITS + 3.0], ids=["negative", "positive"])
def test_options_change_the_greedy_choice(
    fields: dict[str, Any], of_request: dict[str, Any], expected: int, logits: torch.Tensor
) -> None:
    new = new_request(sampling=params(**GREEDY, **fields), **{"prompt": [4], **of_request})
    assert sample_one(logits, new) == expected


def test_masks_that_leave_nothing_give_way_but_allowed_tokens_hold() -> None:
    wanted = params(**GREEDY, allowed_token_ids=[1, 2], min_tokens=5, stop_token_ids=[1])
    assert sample_one(LOGITS, new_request(sampling=wanted)) == 2
    assert sample_one(LOGITS, new_request(sampling=wanted, bad_words=[[2]])) == 1
    assert sample_one(LOGITS, new_request(sampling=params(**GREEDY), bad_words=[[i] for i in range(5)])) == 0


# --- Log-probabilities ---------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_logits() -> None:
    wanted = params(temperature=0.3, top_k=1, logprobs=2, logit_bias={4: 100.0}, allowed_token_ids=[4])
    token_id, logprobs = sample_all(LOGITS[None, :], [new_request(sampling=wanted)])[0]
    assert token_id == 4
    assert logprobs is not None
    assert logprobs.token_ids == (4, 0, 1)
    assert logprobs.ranks == (5, 1, 2)
    assert logprobs.logprobs == pytest.approx(LOGITS[[4, 0, 1]].tolist(), abs=1e-6)


def test_only_rows_that_ask_get_logprobs() -> None:
    batch = [
        new_request("a", params(**GREEDY)),
        new_request("b", params(**GREEDY, logprobs=0)),
        new_request("c", params(**GREEDY, logprobs=-1)),
        new_request("d", params()),
    ]
    found = [logprobs for _, logprobs in sample_all(LOGITS.expand(4, -1).clone(), batch)]
    assert [None if logprobs is None else len(logprobs.token_ids) for logprobs in found] == [None, 1, 5, None]


# --- Requests come and go ------------------------------------------------------------------------


def test_empty_batch() -> None:
    assert Sampler(5, CPU).sample(torch.zeros(0, 5), []) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 5e-324},
        {"repetition_penalty": 1e308},
        {"temperature": 1e-5, "repetition_penalty": 1e-300, "logit_bias": {0: 100.0}},
        {"top_p": 5e-324},
        {"min_p": 5e-324},
        {"top_k": 10**30},
        {"min_tokens": 10**30},
        {"frequency_penalty": -2.0, "presence_penalty": -2.0},
    ],
    ids=str,
)
def test_extreme_values_that_are_allowed_do_not_break_the_batch(fields: dict[str, Any]) -> None:
    logits = torch.zeros(2, 1000)
    logits[:, :3] = torch.tensor([20.0, 0.0, -20.0])
    batch = [new_request("a", params(**fields), prompt=[0, 1, 2], output=[0, 1, 2]), new_request("b", params(**GREEDY))]
    found = sample_all(logits, batch)
    assert 0 <= found[0][0] < 1000
    assert found[1] == (0, None)
