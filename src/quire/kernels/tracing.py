"""Running a model on symbols instead of tensors: what it computes becomes a list of calls.

A `Symbol` stands for [T, …] values of one step, T being open. Kernels called with symbols are recorded and not run
(`registry.Kernel.on("plan")`), views of symbols are tracked as column ranges, and anything else a model does with
one raises `NotTraceableError`: such a model runs op by op. One trace of 30 layers takes a few milliseconds.
Next to read: `runtime/plan/trace.py`, which runs models on symbols.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

PLAN_DEVICE = "plan"
"""The device type of symbols."""


class NotTraceableError(Exception):
    """A model does something with its values that a plan cannot hold."""


@dataclass(eq=False, slots=True)
class Call:
    """One recorded operation.

    Fields:
        operation: the kernel's function name, or "embedding", "rotation", "add", "shift" (a constant added to ids),
            "token_ids", "positions", "hidden" (what a trace starts from).
        arguments: symbols, parameters and numbers as they were passed.
        shape: of the result, without T.
        index: its place in the trace.
    """

    operation: str
    arguments: tuple[Any, ...]
    shape: tuple[int, ...]
    index: int

    @property
    def inputs(self) -> list["Symbol"]:
        """The symbols among the arguments."""
        return [argument for argument in self.arguments if isinstance(argument, Symbol)]


@dataclass(eq=False, slots=True)
class Trace:
    """Calls in the order in which the model made them."""

    calls: list[Call] = field(default_factory=list)

    def record(self, operation: str, arguments: tuple[Any, ...], shape: tuple[int, ...]) -> "Symbol":
        """Add a call; returns its result."""
        call = Call(operation, arguments, shape, len(self.calls))
        self.calls.append(call)
        return Symbol(self, call, 0, shape)


@dataclass(eq=False, slots=True)
class Symbol:
    """Columns `start` … of a call's result, seen as [T, *shape]."""

    trace: Trace
    call: Call
    start: int
    shape: tuple[int, ...]

    @property
    def device(self) -> SimpleNamespace:
        """So that kernels find the version that records."""
        return SimpleNamespace(type=PLAN_DEVICE)

    @property
    def num_columns(self) -> int:
        """Values per token."""
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """Whether these are all columns of the call's result."""
        return self.start == 0 and self.num_columns == math.prod(self.call.shape)

    def view(self, *sizes: int) -> "Symbol":
        """Other axes over the same columns; the first stays T."""
        if sizes[0] != -1 or -1 in sizes[1:] or math.prod(sizes[1:]) != self.num_columns:
            raise NotTraceableError(f"view{sizes} of [T, {self.shape}]")
        return Symbol(self.trace, self.call, self.start, tuple(sizes[1:]))

    reshape = view

    def flatten(self, start_dim: int = 0) -> "Symbol":
        """[T, H, D] to [T, H * D]."""
        if start_dim != 1:
            raise NotTraceableError(f"flatten({start_dim})")
        return Symbol(self.trace, self.call, self.start, (self.num_columns,))

    def split(self, sizes: int | tuple[int, ...] | list[int], dim: int = 0) -> list["Symbol"]:
        """Parts along the first axis after T."""
        if dim % (len(self.shape) + 1) != 1:
            raise NotTraceableError(f"split along axis {dim}")
        if isinstance(sizes, int):
            sizes = [sizes] * (self.shape[0] // sizes)
        if sum(sizes) != self.shape[0]:
            raise NotTraceableError(f"split of {self.shape[0]} into {sizes}")
        columns, start, parts = math.prod(self.shape[1:]), self.start, []
        for size in sizes:
            parts.append(Symbol(self.trace, self.call, start, (size, *self.shape[1:])))
            start += size * columns
        return parts

    def chunk(self, chunks: int, dim: int = 0) -> list["Symbol"]:
        """Equal parts along the first axis after T."""
        return self.split(self.shape[0] // chunks, dim)

    def rotation(self, frequencies: Any) -> tuple[Any, Any]:
        """Cosines and sines [T, D] of positions times frequencies [D/2]: what `layers.rotary` returns."""
        head_size = 2 * frequencies.shape[0]
        angles = self.trace.record("rotation", (self, frequencies), (2 * head_size,))
        cos, sin = angles.split(head_size, dim=1)
        return cos, sin

    def __add__(self, other: Any) -> "Symbol":
        if isinstance(other, Symbol) and other.shape == self.shape:
            return self.trace.record("add", (self, other), self.shape)
        if isinstance(other, int) and self.shape == ():
            return self.trace.record("shift", (self, other), self.shape)
        raise NotTraceableError("a sum of other things than two values of one shape")

    def __iter__(self) -> Iterator["Symbol"]:
        raise NotTraceableError("iteration over a value")

    def __getattr__(self, name: str) -> Any:
        raise NotTraceableError(f".{name} of a value")

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """PyTorch's own functions end here when a symbol is among their arguments."""
        name = getattr(function, "__name__", str(function))
        if name == "embedding" and isinstance(args[0], Symbol):
            return args[0].trace.record("embedding", args[:2], (args[1].shape[1],))
        raise NotTraceableError(f"torch's {name}")


def recorder(function: str) -> Callable[..., Any]:
    """The version of a kernel that records. Its result has the shape that `_SHAPES` says."""

    def record(*arguments: Any, **options: Any) -> Any:
        shape = _SHAPES.get(function)
        if shape is None or options:
            raise NotTraceableError(f"the kernel {function}")
        symbol = next(argument for argument in arguments if isinstance(argument, Symbol))
        return symbol.trace.record(function, arguments, shape(arguments))

    return record


def _of_first(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    shape: tuple[int, ...] = arguments[0].shape
    return shape


_SHAPES: dict[str, Callable[[tuple[Any, ...]], tuple[int, ...]]] = {
    "rms_norm": _of_first,
    "layer_norm": _of_first,
    "rope": _of_first,
    "linear": lambda arguments: (arguments[1].shape[0],),
    "write_kv": lambda arguments: (),
    "paged_attention": _of_first,
    "silu_and_mul": lambda arguments: (arguments[0].shape[0] // 2,),
    "gelu": _of_first,
    "relu": _of_first,
}
