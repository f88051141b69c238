"""`Linear`, `ColumnParallelLinear` and `RowParallelLinear`: dense layers on the kernel `linear`.

Projections of the same input, as queries, keys and values, are one layer: its weight has their rows one below another.
Its `stored_parts` name the stored tensors of the parts.
Next to read: `group.py` for shares, then `attention.py`.
"""

from collections.abc import Sequence

from quire import nn
from quire.kernels.linear import linear
from quire.layers.group import Group, Partition, Share
from quire.lazy_torch import Tensor


class Linear(nn.Module):
    """out = x @ weight.T + bias, the same on every rank.

    Shapes: x [T, input_size] -> [T, output_size]; weight [output_size, input_size]; bias [output_size] or None.
    Dtypes: those of the parameters.
    """

    def __init__(self, input_size: int, output_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.empty(output_size, input_size))
        self.bias = nn.Parameter(nn.empty(output_size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class ColumnParallelLinear(Linear):
    """A linear layer split by outputs: a rank holds its share of the rows of each part, as of queries, keys and values.

    `stored`: the names of the layers beside it that checkpoints store instead, each with one part or several.
    Shapes: x [T, input_size] -> [T, sum of the shares' sizes].
    """

    def __init__(
        self, input_size: int, parts: Sequence[Share], *, bias: bool = False, stored: Sequence[str] = ()
    ) -> None:
        super().__init__(input_size, sum(part.size for part in parts), bias=bias)
        self.partitions = dict.fromkeys(("weight", "bias"), Partition(rows=tuple(parts)))
        self.stored_parts = {kind: tuple(f"{name}.{kind}" for name in stored) for kind in self.partitions}


class RowParallelLinear(Linear):
    """A linear layer split by inputs: a rank holds the weight's columns of its inputs, and all ranks sum their results.

    Only rank 0 adds the bias. Shapes: x [T, inputs.size] -> [T, output_size].
    """

    def __init__(self, inputs: Share, output_size: int, group: Group, *, bias: bool = False) -> None:
        super().__init__(inputs.size, output_size, bias=bias)
        self.group = group
        self.partitions = {"weight": Partition(columns=inputs)}

    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(linear(x, self.weight, self.bias if self.group.rank == 0 else None))
