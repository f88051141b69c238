"""`RowSampler`: turns rows of logits into tokens. `native.py` does it on a CPU, `reference.py` on any device.

Next to read: `state.py`, which holds the options of each row.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from quire.sampling.state import SamplingState
from quire.types import TokenLogprobs

Sampled = tuple[int | None, TokenLogprobs | None]
"""The token, None if the logits leave no choice, and its log-probabilities if asked for."""


class RowSampler(Protocol):
    """Chooses tokens from logits for the requests that `add` prepared."""

    def add(self, state: SamplingState) -> None:
        """Prepare a request: keep its options in the state."""
        ...

    def sample(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Sampled]:
        """Choose a token for each row. Shapes: logits [S, V], states [S]. Dtypes: fp32."""
        ...

    def logprobs(self, logits: torch.Tensor, token_ids: Sequence[int], num: int) -> list[TokenLogprobs]:
        """Return the log-probability of each row's token, and the `num` likeliest (-1: all).

        logprob = log_softmax(logits) in fp32;  rank = 1 + number of tokens with a larger logprob
        Shapes: logits [S, V], token_ids [S].
        """
        ...


def position_logprobs(
    token_id: int, logprob: float, rank: int, top_ids: Sequence[int], top_values: Sequence[float]
) -> TokenLogprobs:
    """Return one token and the likeliest ones, best first, without repeating it; equal ones have the same rank."""
    ids, values, ranks = [token_id], [logprob], [rank]
    top_rank = 1
    for place, (top_id, top_value) in enumerate(zip(top_ids, top_values, strict=True)):
        if place and top_value < top_values[place - 1]:
            top_rank = place + 1
        if top_id != token_id:
            ids.append(top_id)
            values.append(top_value)
            ranks.append(top_rank)
    return TokenLogprobs(tuple(ids), tuple(values), tuple(ranks))
