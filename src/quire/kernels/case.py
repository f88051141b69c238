"""`Case`: one set of inputs for a kernel, shared by the tests of all its versions.

A folder's `cases.py` exports `CHECKS`, a tuple of `Check`. Next to read: `rms_norm/cases.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quire.kernels.registry import Kernel

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs by argument name, made in fp32 on the CPU; floating tensors are then cast to the dtype under test."""

    name: str
    make: Callable[[], Arguments]


@dataclass(frozen=True, slots=True)
class Check:
    """A kernel, its cases, and what to compare.

    Fields:
        plain: what one would write in PyTorch without care, in the inputs' dtype: a version may err twice as much.
            None for kernels that move values: their versions must agree exactly.
        mutated: the argument that holds the result, for kernels that return nothing.
        kept_float32: arguments that stay fp32 whatever the dtype under test.
    """

    kernel: Kernel[Any, Any]
    cases: tuple[Case, ...]
    plain: Callable[..., torch.Tensor] | None
    mutated: str | None = None
    kept_float32: tuple[str, ...] = ()


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal fp32 values, the same at every call."""
    generator = torch.Generator().manual_seed(seed * 7919 + sum(shape) + len(shape))
    return torch.randn(shape, generator=generator) * scale


def cast(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The same values and strides in another dtype on another device; integers keep their dtype."""
    dtype = dtype if tensor.is_floating_point() else tensor.dtype
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    flat = tensor.as_strided((size,), (1,), 0).to(dtype=dtype, device=device, copy=True)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
