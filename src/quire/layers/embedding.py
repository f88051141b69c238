"""`Embedding`: token ids to rows of a table; the same table may serve as the output head.

Next to read: `models/llama.py`, where both uses are.
"""

import torch
from torch import nn
from torch.nn import functional

from quire.kernels.linear import linear


class Embedding(nn.Module):
    """A table of rows.

    Shapes: forward: ids [T] -> [T, size]; as_head: hidden [S, size] -> [S, num_rows]; weight [num_rows, size].
    Dtypes: ids int64; the rest as the weight.
    """

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, size), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Row ids[t] for each t."""
        return functional.embedding(ids, self.weight)

    def as_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Score every row against the hidden states: the output head of a model with tied embeddings."""
        return linear(hidden, self.weight, None)
