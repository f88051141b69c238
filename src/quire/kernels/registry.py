"""`@kernel`: the function of an operation, and which of its versions runs.

An operation is a module here, or a folder if it is long. Its public function is the contract and the version
"reference"; a faster version is added by `@function.version("name", "cpu")` and runs on the device types named. Two
debugging variables are read once per kernel and device type: `QUIRE_KERNELS=reference` (all operations) or
`linear:packed`, and `QUIRE_TRACE=1`, which logs name, shapes and dtypes before each kernel runs; a plan logs its
instructions with their times instead. This module must not know what an operation computes.
Next to read: `rms_norm.py`, a small operation.
"""

import functools
import importlib
import inspect
import logging
import os
import pkgutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from quire.errors import ConfigError, nearest
from quire.kernels.tracing import PLAN_DEVICE, recorder

P = ParamSpec("P")
T = TypeVar("T")
Q = ParamSpec("Q")
U = TypeVar("U")

logger = logging.getLogger("quire.kernels")


class Kernel(Generic[P, T]):
    """A public function, which runs the version chosen for the device of its first argument, a tensor.

    All versions have the same arguments and results.
    """

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
        self.function, self.operation = reference.__name__, reference.__module__.rpartition(".")[2]
        self.versions = {"reference": reference}
        self._preferred: dict[str, str] = {}
        self.chosen: dict[str, Callable[P, T]] = {}
        KERNELS[self.function] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        first: Any = args[0] if args else next(iter(kwargs.values()))
        device_type: str = first.device.type
        return (self.chosen.get(device_type) or self._choose(device_type))(*args, **kwargs)

    @staticmethod
    def with_traits(**traits: Any) -> Callable[[Callable[Q, U]], "Kernel[Q, U]"]:
        """Decorate a reference that has traits: see `Kernel.__init__`."""
        return lambda reference: Kernel(reference, **traits)

    def version(self, name: str, *device_types: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Add a version, which is preferred on devices of these types ("cpu", "cuda")."""

        def add(run: Callable[P, T]) -> Callable[P, T]:
            self.versions[name] = run
            self._preferred |= dict.fromkeys(device_types, name)
            return run

        return add

    def version_on(self, device_type: str) -> str:
        """The name of the version that runs. Raises: ConfigError if the environment names an unknown one."""
        requested = requested_versions(os.environ.get("QUIRE_KERNELS", ""))
        return requested.get(self.operation, self._preferred.get(device_type, "reference"))

    def _choose(self, device_type: str) -> Callable[P, T]:
        name = self.version_on(device_type)
        chosen = self.versions[name]
        if device_type == PLAN_DEVICE:
            chosen = recorder(self.versions["reference"])
        elif trace_setting() == "1":
            chosen = _traced(f"{self.function} ({name})", chosen)
        self.chosen[device_type] = chosen
        return chosen


kernel = Kernel
"""The decorator."""
KERNELS: dict[str, Kernel[Any, Any]] = {}
"""Every kernel imported so far, by the name of its function."""


def import_operations() -> None:
    """Import all operations, so that plans know how to lower them."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"quire.kernels.{module.name}")


def available_versions() -> dict[str, list[str]]:
    """Per operation the names of its versions, both sorted."""
    import_operations()
    return dict(sorted((kernel.operation, sorted(kernel.versions)) for kernel in KERNELS.values()))


@functools.cache
def requested_versions(setting: str) -> Mapping[str, str]:
    """Parse a value of `QUIRE_KERNELS`: operation to version. Later parts win.

    Raises: ConfigError naming an unknown operation or version, and the nearest known one.
    """
    chosen: dict[str, str] = {}
    for part in filter(None, (item.strip() for item in setting.split(","))):
        available = available_versions()
        operation, separator, version = part.partition(":")
        if not separator:
            version, known = operation, sorted({name for names in available.values() for name in names})
            if version not in known:
                raise ConfigError(f"QUIRE_KERNELS: no kernel has a version '{version}'{nearest(version, known)}")
            chosen |= {name: version for name, versions in available.items() if version in versions}
        elif operation not in available:
            raise ConfigError(
                f"QUIRE_KERNELS: unknown operation '{operation}'{nearest(operation, available)}; "
                f"there are {', '.join(available)}"
            )
        elif version not in available[operation]:
            raise ConfigError(
                f"QUIRE_KERNELS: {operation} has no version '{version}'{nearest(version, available[operation])}; "
                f"it has {', '.join(available[operation])}"
            )
        else:
            chosen[operation] = version
    return chosen


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
    requested_versions(os.environ.get("QUIRE_KERNELS", ""))
    trace_setting()


def describe(value: Any) -> str:
    """Describe an argument in a trace: a tensor's shape and dtype, else a short text."""
    import torch

    if isinstance(value, torch.Tensor):
        layout = "" if value.layout == torch.strided else " packed"
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}{layout}"
    return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def _traced(name: str, run: Callable[P, T]) -> Callable[P, T]:
    log = trace_logger()

    @functools.wraps(run)
    def traced(*args: P.args, **kwargs: P.kwargs) -> T:
        shown = [describe(value) for value in args] + [f"{key}={describe(value)}" for key, value in kwargs.items()]
        log.info("%s: %s", name, ", ".join(shown))
        return run(*args, **kwargs)

    return traced
