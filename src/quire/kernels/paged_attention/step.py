"""The part of `layers/forward_batch.py` that attention reads: this folder may not import that one."""

from typing import Protocol

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
