"""`@kernel`: the function of an operation, which runs its reference, or records the call if it gets a symbol.

An operation is a module here. Its public function is the contract, and its body the reference; faster versions are the
native ops of plans. Two debugging variables: `QUIRE_KERNELS=reference` runs all models op by op, and `QUIRE_TRACE=1`
logs name, shapes and dtypes before each kernel runs; a plan logs its instructions with their times instead. This module
must not know what an operation computes.
Next to read: `rms_norm.py`, a small operation.
"""

import functools
import importlib
import inspect
import logging
import os
import pkgutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from quire.errors import ConfigError
from quire.kernels.tracing import Symbol, recorder

P = ParamSpec("P")
T = TypeVar("T")
Q = ParamSpec("Q")
U = TypeVar("U")

logger = logging.getLogger("quire.kernels")


class Kernel(Generic[P, T]):
    """A public function, which runs the reference if its first argument is a tensor, and records a symbol's call."""

    def __init__(
        self,
        reference: Callable[P, T],
        *,
        weight: str | None = None,
        writes_cache: bool = False,
        takes_in: Collection[str] = (),
    ) -> None:
        """`reference`: the contract. The traits that plans read are given by `@kernel.with_traits`:

        weight: the argument, a parameter, with which a product multiplies its first argument. That is written in the
            type of rows that the weight's format wants.
        writes_cache: attention reads its result, through the cache.
        takes_in: operations on heads which its own instruction does in place, where nothing else reads their result.
        """
        functools.update_wrapper(self, reference)
        self.weight_index = None if weight is None else list(inspect.signature(reference).parameters).index(weight)
        self.writes_cache, self.takes_in = writes_cache, takes_in
        self.function = reference.__name__
        self.reference, self.record = reference, recorder(reference)
        KERNELS[self.function] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        first: Any = args[0] if args else next(iter(kwargs.values()))
        return (self.record if isinstance(first, Symbol) else self.run)(*args, **kwargs)

    @functools.cached_property
    def run(self) -> Callable[P, T]:
        """The reference; with `QUIRE_TRACE=1`, which is read once, it is logged. Raises: ConfigError."""
        return _traced(self.function, self.reference) if trace_setting() == "1" else self.reference

    @staticmethod
    def with_traits(**traits: Any) -> Callable[[Callable[Q, U]], "Kernel[Q, U]"]:
        """Decorate a reference that has traits: see `Kernel.__init__`."""
        return lambda reference: Kernel(reference, **traits)


kernel = Kernel
"""The decorator."""
KERNELS: dict[str, Kernel[Any, Any]] = {}
"""Every kernel imported so far, by the name of its function."""


def import_operations() -> None:
    """Import all operations, so that plans know how to lower them."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"quire.kernels.{module.name}")


def trace_setting() -> str:
    """`QUIRE_TRACE`: "1" logs kernels and instructions, "events" records an event per step of a plan.

    Raises: ConfigError for other values.
    """
    setting = os.environ.get("QUIRE_TRACE", "")
    if setting not in ("", "0", "1", "events"):
        raise ConfigError(f"QUIRE_TRACE={setting!r} is not 0, 1 or events")
    return setting


def trace_logger() -> logging.Logger:
    """The logger of traces, with a handler that writes to stderr unless there is one."""
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)
    return logger


def check_environment() -> None:
    """Check both variables now, before a model is loaded. Raises: ConfigError."""
    if (setting := os.environ.get("QUIRE_KERNELS", "")) not in ("", "reference"):
        raise ConfigError(f"QUIRE_KERNELS={setting!r} is not reference")
    trace_setting()


def describe(value: Any) -> str:
    """Describe an argument in a trace: a tensor's shape and dtype, else a short text."""
    import torch

    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def _traced(name: str, run: Callable[P, T]) -> Callable[P, T]:
    log = trace_logger()

    @functools.wraps(run)
    def traced(*args: P.args, **kwargs: P.kwargs) -> T:
        shown = [describe(value) for value in args] + [f"{key}={describe(value)}" for key, value in kwargs.items()]
        log.info("%s: %s", name, ", ".join(shown))
        return run(*args, **kwargs)

    return traced
