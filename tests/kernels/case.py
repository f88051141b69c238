"""`Check`: the inputs on which a kernel's reference is tested, and the formula that they must equal.

The file of an operation in `cases/` has its `CHECKS`. Next to read: `cases/rms_norm.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.kernels.registry import Kernel
from quire.lazy_torch import Tensor, torch

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Check:
    """A kernel, its formula and its cases.

    Fields:
        formula: the definition of correct, when computed in fp64. The reference may err twice as much as it errs
            in the dtype under test; a kernel that moves values must agree exactly.
        cases: per name a function that makes the arguments in fp32 on the CPU, the first one first; floating tensors
            are cast to the dtype under test.
        mutated: the argument that holds the result, for kernels that move values and return nothing.
        kept_float32: arguments that stay fp32 whatever the dtype under test.
    """

    kernel: Kernel[Any, Any]
    formula: Callable[..., Any]
    cases: Mapping[str, Callable[[], Arguments]]
    mutated: str | None = None
    kept_float32: tuple[str, ...] = ()


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal fp32 values, the same at every call."""
    generator = torch.Generator().manual_seed(seed * 7919 + sum(shape) + len(shape))
    return torch.randn(shape, generator=generator) * scale
