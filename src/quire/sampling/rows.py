"""`RowSampler`: what turns rows of logits into tokens. `native.py` does it on a CPU, `torch_rows.py` on any device.

Next to read: `state.py`, which says what each row wants.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from quire.sampling.state import SamplingState
from quire.types import TokenLogprobs

Sampled = tuple[int | None, TokenLogprobs | None]
"""The token, None where the logits leave no choice, and its log-probabilities where asked for."""


class RowSampler(Protocol):
    """Chooses tokens from logits; which requests exist, it is told."""

    def add(self, state: SamplingState) -> None:
        """Prepare for a request."""
        ...

    def remove(self, request_id: str) -> None:
        """Forget a request; an unknown id is fine."""
        ...

    def sample(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Sampled]:
        """Choose a token for each row. Shapes: logits [S, V], states [S]. Dtypes: fp32."""
        ...

    def logprobs(self, logits: torch.Tensor, token_ids: Sequence[int], num: int) -> list[TokenLogprobs]:
        """Log-probability of each row's token, and the `num` likeliest (-1: all). Shapes: logits [S, V], ids [S]."""
        ...
