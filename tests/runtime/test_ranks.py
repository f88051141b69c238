"""Ranks that send only their best logits choose the tokens of the sampler that has all of them."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire import _native
from quire.layers.group import LocalGroup, share_vocabulary
from quire.runtime.links import Links
from quire.runtime.ranks import MAX_BEST, RankSampler
from quire.sampling.native import NativeRowSampler
from quire.sampling.state import SamplingState
from tests.parallel.thread_ranks import exchanges, on_ranks
from tests.sampling.builders import new_request, params

VALUES = [-math.inf, -2.0, -0.0, 0.0, 0.5, 1.0, 1.25, 3.0]
"""Few, so that many logits are equal."""


def states(sampler: NativeRowSampler, items: list[dict[str, Any]], vocab_size: int) -> list[SamplingState]:
    found = []
    for index, fields in enumerate(items):
        new = new_request(f"r{index}", params(**fields), prompt=[1] * (index + 1), seed=index)
        assert new.sampling is not None
        found.append(SamplingState(new, new.sampling, vocab_size))
        sampler.add(found[-1])
    return found


def rank_sampler(vocab_size: int, exchange: _native.Exchange, num_threads: int = 1) -> tuple[RankSampler, Any]:
    sampler = RankSampler(vocab_size, "cpu", _native.ThreadPool(num_threads), Links(exchange=exchange))
    return sampler, sampler.rows


def merged(
    logits: NDArray[np.float32], items: list[dict[str, Any]], num_ranks: int, num_threads: int = 1
) -> tuple[list[int | None], list[int]]:
    """The tokens that ranks choose together, and the bytes that each has sent."""
    vocab_size = logits.shape[1]
    joined, tokens = exchanges(num_ranks), []

    def run(rank: int) -> None:
        shares, sampler = rank_sampler(vocab_size, joined[rank], num_threads)
        rows = states(sampler, items, vocab_size)
        mine, width = share_vocabulary(vocab_size, LocalGroup(rank, num_ranks))
        share = np.full((len(logits), width), math.nan, np.float32)  # of which padding must not be read
        share[:, : mine.size] = logits[:, mine.start : mine.stop]
        keys, num_keys = shares.merge(share, rows)
        if rank == 0:
            tokens.extend(sampler.sample_best(keys, num_keys, rows))

    on_ranks(num_ranks, run)
    return tokens, [exchange.bytes_sent for exchange in joined]


def whole(logits: NDArray[np.float32], items: list[dict[str, Any]]) -> list[int | None]:
    sampler = NativeRowSampler(logits.shape[1])
    return [token_id for token_id, _ in sampler.sample(logits.copy(), states(sampler, items, logits.shape[1]))]


@given(data=st.data())
def test_merged_tokens_are_those_of_the_whole_row(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(2, 5))
    vocab_size = data.draw(st.sampled_from([2, 5, 40, 600]))
    num_rows = data.draw(st.integers(1, 4))
    values = np.random.default_rng(data.draw(st.integers(0, 99))).choice(VALUES, (num_rows, vocab_size))
    logits = values.astype(np.float32)
    spoilt = data.draw(st.sampled_from([None, None, math.nan, -math.nan, math.inf, -math.inf]))
    if spoilt is not None:
        logits[0, data.draw(st.integers(0, vocab_size - 1))] = spoilt
    if data.draw(st.booleans()):
        logits[-1] = -math.inf
    fields = st.fixed_dictionaries({
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]), "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "min_p": st.sampled_from([0.0, 0.1, 0.9]), "top_k": st.integers(1, max(1, vocab_size - 1)),
    })  # fmt: skip
    items = data.draw(st.lists(fields, min_size=num_rows, max_size=num_rows))
    assert merged(logits, items, num_ranks)[0] == whole(logits, items)


def test_many_rows_take_several_pieces_and_eight_bytes_per_candidate() -> None:
    """A slot holds 16,384 keys."""
    logits = np.random.default_rng(3).normal(size=(40, 5000)).astype(np.float32)
    items = [{"temperature": 1.0, "top_k": 1000 - row} for row in range(39)] + [{"temperature": 0.0}]
    tokens, sent = merged(logits, items, 2, num_threads=2)
    assert tokens == whole(logits, items)
    assert sent == [8 * (sum(1000 - row for row in range(39)) + 1)] * 2


@pytest.mark.parametrize(
    ("fields", "suffices"),
    [
        ({"temperature": 1.0, "top_k": 20}, True),
        ({"temperature": 1.0, "top_k": 20, "top_p": 0.5, "min_p": 0.1}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 1.0}, False),
        ({"temperature": 1.0, "top_p": 0.9}, False),
        ({"temperature": 1.0, "min_p": 0.1}, False),
        ({"temperature": 1.0, "top_k": MAX_BEST + 1}, False),
        ({"temperature": 1.0, "top_k": 20, "logprobs": 1}, False),
        ({"temperature": 1.0, "top_k": 20, "logit_bias": {3: 1.0}}, False),
        ({"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.1}, False),
        ({"temperature": 1.0, "top_k": 20, "presence_penalty": 0.5}, False),
        ({"temperature": 1.0, "top_k": 20, "allowed_token_ids": [1, 2]}, False),
        ({"temperature": 1.0, "top_k": 20, "min_tokens": 3, "stop_token_ids": [1]}, False),
    ],
)
def test_best_logits_suffice_for_top_k_of_unchanged_logits(fields: dict[str, Any], suffices: bool) -> None:
    exchange, _ = exchanges(2)
    shares, sampler = rank_sampler(8192, exchange)
    (state,) = states(sampler, [fields], 8192)
    assert shares.takes_shares([state]) is suffices
    for _ in range(fields.get("min_tokens", 0)):
        assert not shares.takes_shares([state])
        state.append(5)
    assert shares.takes_shares([state]) is (suffices or "min_tokens" in fields)


def test_ranks_that_gave_up_merge_nothing() -> None:
    exchange, _ = exchanges(2)
    shares, sampler = rank_sampler(40, exchange)
    exchange.give_up()
    with pytest.raises(Exception, match="a rank of the model is lost"):
        shares.merge(np.zeros((1, 20), np.float32), states(sampler, [{"temperature": 0.0}], 40))
