"""`Embedding`, `VocabParallelEmbedding` and `VocabParallelHead`: token ids to rows, hidden states to logits.

Next to read: `models/llama.py`, which uses both ends.
"""

from quire import nn
from quire.kernels.embedding import embedding
from quire.kernels.linear import linear
from quire.kernels.tracing import Symbol
from quire.layers.group import Group, Partition, share_vocabulary
from quire.layers.linear import Linear
from quire.lazy_torch import Tensor


class Embedding(nn.Module):
    """A table of rows, the same on every rank.

    Shapes: forward: ids [T] -> [T, size]; as_head: hidden [S, size] -> [S, num_rows]; weight [num_rows, size].
    Dtypes: ids int64; the rest as the weight.
    """

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.empty(num_rows, size))

    def forward(self, ids: Tensor) -> Tensor:
        """Return row ids[t] for each t."""
        return embedding(ids, self.weight)

    def as_head(self, hidden: Tensor) -> Tensor:
        """Score every row against the hidden states: the output head of a model with tied embeddings."""
        return linear(hidden, self.weight, None)


class VocabParallelEmbedding(Embedding):
    """A table of token embeddings split by rows.

    Shapes: forward: ids [T] -> [T, size]; as_head: hidden [S, size] -> [S, V]; weight [rows of this rank, size].
    """

    def __init__(self, vocab_size: int, size: int, group: Group) -> None:
        rows, num_rows = share_vocabulary(vocab_size, group)
        super().__init__(num_rows, size)
        self.rows, self.group = rows, group
        self.partitions = {"weight": Partition(rows=(rows,))}

    def forward(self, ids: Tensor) -> Tensor:
        """Return row ids[t] for each t: the rank that holds a row contributes it, all other ranks contribute zeros."""
        if self.group.size == 1:
            return super().forward(ids)
        if isinstance(ids, Symbol):  # a plan's op gives zeros for rows that the table does not have
            return self.group.all_reduce(super().forward(ids + -self.rows.start))
        is_absent = (ids < self.rows.start) | (ids >= self.rows.stop)  # [T]
        found = super().forward((ids - self.rows.start).masked_fill(is_absent, 0))  # [T, size]
        return self.group.all_reduce(found.masked_fill(is_absent[:, None], 0))

    def as_head(self, hidden: Tensor) -> Tensor:
        return _gather_logits(super().as_head(hidden), self.rows.whole, self.group)


class VocabParallelHead(Linear):
    """The output head, split by rows: a rank computes the logits of its share of the vocabulary.

    Shapes: hidden [S, size] -> [S, V].
    """

    def __init__(self, vocab_size: int, size: int, group: Group) -> None:
        rows, num_rows = share_vocabulary(vocab_size, group)
        super().__init__(size, num_rows)
        self.vocab_size, self.group = vocab_size, group
        self.partitions = {"weight": Partition(rows=(rows,))}

    def forward(self, hidden: Tensor) -> Tensor:
        return _gather_logits(super().forward(hidden), self.vocab_size, self.group)


def _gather_logits(logits: Tensor, vocab_size: int, group: Group) -> Tensor:
    """Concatenate the ranks' logits, without those of padding rows. Shapes: [S, rows of a rank] -> [S, V]."""
    if group.size == 1:
        return logits
    gathered = group.all_gather(logits)
    return gathered if gathered.shape[1] == vocab_size else gathered[:, :vocab_size]
