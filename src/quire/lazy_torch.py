"""PyTorch, imported when it is first used: what a plan needs runs without it, and it is an extra.

`torch` and `functional` stand for the modules of these names, `Tensor` for the class in annotations.
"""

import importlib
import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

from quire.errors import MissingExtraError
from quire.extras import install_command

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
    from torch.nn import functional as functional

OP_BY_OP = "a model that runs op by op"


def require_torch(purpose: str, extra: str = "torch") -> Any:
    """Import PyTorch. Raises: MissingExtraError with what needs it, as in "device='cuda'", and how to install it.

    `extra`: of Quire's, which includes PyTorch and whatever else the purpose needs.
    """
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError(f"{purpose} needs PyTorch: {install_command(extra)}") from None


def is_loaded() -> bool:
    """Return whether this process has imported PyTorch: only then can there be tensors."""
    return sys.modules.get("torch") is not None  # None where a test forbids it


def tensor_types() -> tuple[type[Any], ...]:
    """Return PyTorch's class of tensors, without importing it; none before it is imported."""
    return (sys.modules["torch"].Tensor,) if is_loaded() else ()


def is_tensor(value: Any) -> bool:
    """Return whether a value is PyTorch's; a loop asks for `tensor_types` once."""
    return isinstance(value, tensor_types())


def on_meta() -> AbstractContextManager[Any]:
    """Return a context in which models of `torch.nn` get no memory for parameters, as those of `quire.nn` never do."""
    return sys.modules["torch"].device("meta") if is_loaded() else nullcontext()


class _Lazy(ModuleType):
    """A module that is imported when an attribute is first read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        require_torch("computing op by op")
        self.__dict__.update(vars(importlib.import_module(self.__name__)))
        return self.__dict__[name]


if not TYPE_CHECKING:
    torch, functional = _Lazy("torch"), _Lazy("torch.nn.functional")

    class Tensor:
        """Stands for `torch.Tensor` in annotations."""
