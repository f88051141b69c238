"""`Linear`: a dense layer whose product is the `linear` kernel. Merged projections are one `Linear` with stacked rows.

It must not know checkpoints: which names are stacked into one weight is the model's `stacked_params`.
Next to read: `attention.py`.
"""

import torch
from torch import nn

from quire.kernels.linear import linear, pack_weight


class Linear(nn.Module):
    """out = x @ weight.T + bias.

    Shapes: x [T, input_size] -> [T, output_size]; weight [output_size, input_size]; bias [output_size] or None.
    Dtypes: those of the parameters.
    """

    def __init__(self, input_size: int, output_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(output_size), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return linear(x, self.weight, self.bias)


def pack_weights(model: nn.Module) -> None:
    """Bring the weights of all `Linear` layers into the layout that is fastest on their device. Values do not change.

    To be called once, after the weights are loaded: packed weights can no longer be read or written as tensors.
    Mutates: model.
    """
    for module in model.modules():
        if isinstance(module, Linear):
            module.weight = nn.Parameter(pack_weight(module.weight.data), requires_grad=False)
