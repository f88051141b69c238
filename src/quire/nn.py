"""`Module`, `ModuleList` and `Parameter`: what models and layers are made of, with the names and manners of `torch.nn`.

A model's structure is Python objects, so that it is traced and described without PyTorch. A `Parameter` has a shape and
no values: a plan reads weights of its own, and where a model runs op by op the loader puts tensors in the parameters'
places. Modules of `torch.nn` may be parts of these and these parts of them: the functions here walk both.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

from quire.lazy_torch import Tensor as Tensor
from quire.lazy_torch import is_loaded


class Parameter(Tensor):
    """A weight before it has values.

    Attributes: `keeps_dtype`: it is not quantised at load.
    """

    __slots__ = ("keeps_dtype", "shape")

    def __init__(self, shape: tuple[int, ...]) -> None:
        """`shape`: from `empty`."""
        self.shape, self.keeps_dtype = tuple(shape), False  # type: ignore[assignment]

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """The number of axes."""
        return len(self.shape)

    def numel(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]


def empty(*sizes: int) -> tuple[int, ...]:
    """The shape of a parameter, whose values a checkpoint has."""
    return sizes


class Module:
    """A part of a model: its attributes are parameters, other parts, and whatever else `forward` needs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take no arguments; those of subclasses differ."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward`, and the hooks before and after it."""
        hooks: dict[str, list[Callable[..., Any]]] | None = self.__dict__.get("_hooks")
        if hooks is None:
            return self.forward(*args, **kwargs)
        for hook in hooks["before"]:
            hook(self, args)
        result = self.forward(*args, **kwargs)
        for hook in hooks["after"]:
            hook(self, args, result)
        return result

    forward: Callable[..., Any]

    def add_module(self, name: str, module: Any) -> None:
        """Add a part under a name that is not known before."""
        setattr(self, name, module)

    def get_submodule(self, name: str) -> Any:
        """Return the part of this name."""
        return getattr(self, name)

    def register_forward_hook(self, hook: Callable[..., Any]) -> "Hook":
        """Call `hook(module, arguments, result)` after each `forward`, until the hook is removed."""
        return Hook(self, "after", hook)

    def register_forward_pre_hook(self, hook: Callable[..., Any]) -> "Hook":
        """Call `hook(module, arguments)` before each `forward`, until the hook is removed."""
        return Hook(self, "before", hook)

    def modules(self) -> Iterator[Any]:
        """See `named_modules`."""
        return (module for _, module in named_modules(self))

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        """See the function of this name."""
        return named_modules(self)

    def parameters(self) -> Iterator[Any]:
        """See `named_parameters`."""
        return (parameter for _, parameter in named_parameters(self))

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """See the function of this name."""
        return named_parameters(self)


class ModuleList(Module):
    """Parts in order, named by their index."""

    def __init__(self, modules: Iterable[Any] = ()) -> None:
        self._list = list(modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._list)

    def __len__(self) -> int:
        return len(self._list)

    def __getitem__(self, index: int) -> Any:
        return self._list[index]


class Hook:
    """A hook of a module."""

    def __init__(self, module: Module, when: str, run: Callable[..., Any]) -> None:
        self._hooks = module.__dict__.setdefault("_hooks", {"before": [], "after": []})[when]
        self._hooks.append(run)
        self._run = run

    def remove(self) -> None:
        """Take it away."""
        self._hooks.remove(self._run)


def is_module(value: Any) -> bool:
    """Return whether a value is a part of a model, of this file or of `torch.nn`."""
    return _is_module_type(type(value))  # type: ignore[arg-type]  # a class can be hashed


@cache  # a model is walked often, and has few types of values; none becomes a module when PyTorch is imported later
def _is_module_type(kind: type) -> bool:
    return issubclass(kind, Module) or (is_loaded() and issubclass(kind, sys.modules["torch"].nn.Module))


def parameter_types() -> tuple[type[Any], ...]:
    """Return the classes of parameters: that of this file, and of `torch.nn` where PyTorch is imported."""
    return (Parameter, sys.modules["torch"].nn.Parameter) if is_loaded() else (Parameter,)


def attributes(module: Any) -> Iterable[tuple[str, Any]]:
    """Return the names and values of what a module holds, in the order in which it was added."""
    if isinstance(module, ModuleList):
        return [(str(index), part) for index, part in enumerate(module)]
    if isinstance(module, Module):
        return vars(module).items()
    found: list[tuple[str, Any]] = []
    for name, value in vars(module).items():
        found += value.items() if name in ("_parameters", "_modules") else [(name, value)]  # where torch.nn keeps them
    return found


def named_modules(module: Any) -> Iterator[tuple[str, Any]]:
    """Return a module, named "", and all its parts by their paths, each once, the outer before the inner."""
    found = dict[int, tuple[str, Any]]()
    _find_modules(module, "", found)
    return iter(found.values())


def _find_modules(module: Any, path: str, found: dict[int, tuple[str, Any]]) -> None:
    """Find a module and its parts. Mutates: found, by identity."""
    if id(module) in found:
        return
    found[id(module)] = (path, module)
    for name, value in attributes(module):
        if is_module(value):
            _find_modules(value, f"{path}.{name}" if path else name, found)


def named_parameters(module: Any, *, repeats: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of a module and its parts by their paths.

    `repeats`: yield one that the model ties under each of its names, not only under the first.
    """
    seen, types = set[int](), parameter_types()
    for prefix, part in named_modules(module):
        for name, value in attributes(part):
            if isinstance(value, types) and (repeats or id(value) not in seen):
                seen.add(id(value))
                yield f"{prefix}.{name}" if prefix else name, value
