"""Which version of each kernel runs: the preferred one of the device, or what `QUIRE_KERNELS` says.

An operation is a folder here, whose `__init__.py` holds the contract and makes one `Kernel` per public function, or a
single file if it has but one version. The choice is made once per device type, so that a call costs one dictionary
lookup. Two debugging variables are read: `QUIRE_KERNELS=reference` (all operations) or
`rms_norm:reference,rope:batched`, and `QUIRE_TRACE=1`, which logs name, shapes and dtypes before each kernel runs; a
plan logs its instructions with their times instead. This module must not know what an operation computes.
Next to read: `rms_norm/__init__.py`, the smallest operation.
"""

import functools
import importlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from quire.errors import ConfigError, nearest
from quire.kernels.tracing import PLAN_DEVICE, recorder

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("quire.kernels")
NOT_VERSIONS = ("__init__", "cases", "step", "instructions")
"""Files of an operation's folder that are not a version of it."""
NOT_OPERATIONS = ("__init__", "case", "instruction", "lowering", "registry", "tracing")
"""Files here that are no operation."""


class Kernel(Generic[P, T]):
    """A public function of an operation, and its versions by file name.

    Versions have the same arguments and results. `preferred`: per device type ("cpu", "cuda", "meta") the version that
    runs when nothing else is said; "*" stands for all others.
    """

    def __init__(
        self, operation: str, function: str, versions: Mapping[str, Callable[P, T]], preferred: Mapping[str, str]
    ) -> None:
        self.operation = operation
        self.function = function
        self.versions = dict(versions)
        self._preferred = dict(preferred)
        self._chosen: dict[str, Callable[P, T]] = {}
        KERNELS.append(self)

    def on(self, device_type: str) -> Callable[P, T]:
        """The version that runs on devices of this type. Raises: ConfigError if the environment names no such one."""
        chosen = self._chosen.get(device_type)
        return chosen if chosen is not None else self._choose(device_type)

    def version_on(self, device_type: str) -> str:
        """The name of the version that `on` returns."""
        default = self._preferred.get(device_type) or self._preferred["*"]
        return requested_versions(os.environ.get("QUIRE_KERNELS", "")).get(self.operation, default)

    def forget_choice(self) -> None:
        """Read the environment again at the next call."""
        self._chosen.clear()

    def _choose(self, device_type: str) -> Callable[P, T]:
        name = self.version_on(device_type)
        chosen = self.versions[name]
        if device_type == PLAN_DEVICE:
            chosen = recorder(self.function)
        elif trace_setting() == "1":
            chosen = _traced(f"{self.function} ({name})", chosen)
        self._chosen[device_type] = chosen
        return chosen


KERNELS: list[Kernel[Any, Any]] = []
"""Every kernel imported so far."""


@functools.cache
def available_versions() -> dict[str, tuple[str, ...]]:
    """Per operation the names of its versions, from the file names; imports nothing."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted(Path(__file__).parent.iterdir()):
        if (path / "reference.py").is_file():
            found[path.name] = tuple(sorted(file.stem for file in path.glob("*.py") if file.stem not in NOT_VERSIONS))
        elif path.suffix == ".py" and path.stem not in NOT_OPERATIONS:
            found[path.stem] = ("reference",)
    return found


def import_operations() -> None:
    """Import all operations, so that plans know how to lower them."""
    for operation in available_versions():
        importlib.import_module(f"quire.kernels.{operation}")


@functools.cache
def requested_versions(setting: str) -> Mapping[str, str]:
    """Parse a value of `QUIRE_KERNELS`: operation to version. Later parts win.

    Raises: ConfigError naming an unknown operation or version, and the nearest known one.
    """
    available = available_versions()
    chosen: dict[str, str] = {}
    for part in filter(None, (item.strip() for item in setting.split(","))):
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


def forget_choices() -> None:
    """Let all kernels read the environment again at their next call."""
    for kernel in KERNELS:
        kernel.forget_choice()


def describe(value: Any) -> str:
    """Describe an argument in a trace: a tensor's shape and dtype, else a short text."""
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
