"""Dense linear layer. Next to read: `reference.py`, then `packed.py` for the CPU's weight layout."""

import torch

from quire.kernels.linear import packed, reference
from quire.kernels.registry import Kernel

KERNEL = Kernel("linear", "linear", {"reference": reference.linear, "packed": packed.linear}, preferred={"*": "packed"})


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """out = x @ weight.T + bias.

    Shapes: x [T, I]; weight [O, I], plain or from `pack_weight`; bias [O] or None -> [T, O].
    Dtypes: all bf16, fp16 or fp32; sums in fp32; returns x.dtype.
    """
    return KERNEL.on(x.device.type)(x, weight, bias)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """The weight in the layout that `linear` reads fastest on its device; the same tensor where there is none.

    Exact: values are moved, not changed. Only `linear` can read the result.
    Shapes: weight [O, I]. Dtypes: any; bf16 and fp32 are packed on CPU.
    """
    return packed.pack_weight(weight) if KERNEL.version_on(weight.device.type) == "packed" else weight
