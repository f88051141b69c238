"""What attention reads of a step: the part of `layers/forward_batch.py` that this folder may know."""

from collections.abc import Hashable
from typing import Any, Protocol

import torch


class AttentionStep(Protocol):
    """See `layers.forward_batch.ForwardBatch` for shapes and units."""

    @property
    def block_tables(self) -> tuple[torch.Tensor, ...]:
        """Per KV cache group [R, M]."""

    @property
    def query_lens_list(self) -> tuple[int, ...]:
        """New tokens per request."""

    @property
    def seq_lens_list(self) -> tuple[int, ...]:
        """Tokens per request after this step."""

    @property
    def num_decodes(self) -> int:
        """How many requests, the first ones, have exactly one new token."""

    @property
    def derived(self) -> dict[Hashable, Any]:
        """Where to keep what all layers share."""
