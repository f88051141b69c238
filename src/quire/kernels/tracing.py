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
        sizes: the result's shape after T.
        index: its place in the trace.
    """

    operation: str
    arguments: tuple[Any, ...]
    sizes: tuple[int, ...]
    index: int

    @property
    def inputs(self) -> list["Symbol"]:
        """The symbols among the arguments."""
        return [argument for argument in self.arguments if isinstance(argument, Symbol)]


@dataclass(eq=False, slots=True)
class Trace:
    """Calls in the order in which the model made them."""

    calls: list[Call] = field(default_factory=list)

    def record(self, operation: str, arguments: tuple[Any, ...], sizes: tuple[int, ...]) -> "Symbol":
        """Add a call; returns its result."""
        call = Call(operation, arguments, sizes, len(self.calls))
        self.calls.append(call)
        return Symbol(self, call, 0, sizes)


class NumTokens:
    """T: the one length of a symbol's shape that is open. Good for `view` and nothing else."""


T = NumTokens()


@dataclass(eq=False, slots=True)
class Symbol:
    """Columns `start` … of a call's result, seen as [T, *sizes]."""

    trace: Trace
    call: Call
    start: int
    sizes: tuple[int, ...]

    @property
    def device(self) -> SimpleNamespace:
        """So that kernels find the version that records."""
        return SimpleNamespace(type=PLAN_DEVICE)

    @property
    def shape(self) -> tuple[Any, ...]:
        """As a tensor's, T being no number."""
        return (T, *self.sizes)

    @property
    def num_columns(self) -> int:
        """Values per token."""
        return math.prod(self.sizes)

    @property
    def is_whole(self) -> bool:
        """Whether these are all columns of the call's result."""
        return self.start == 0 and self.num_columns == math.prod(self.call.sizes)

    def view(self, *sizes: Any) -> "Symbol":
        """Other axes over the same columns; the first stays T."""
        first, *others = sizes
        if (first is not T and first != -1) or math.prod(others) != self.num_columns or min(others, default=1) < 1:
            raise NotTraceableError(f"view{sizes} of {self}")
        return Symbol(self.trace, self.call, self.start, tuple(others))

    reshape = view

    def flatten(self, start_dim: int = 0) -> "Symbol":
        """[T, H, D] to [T, H * D]."""
        if start_dim != 1:
            raise NotTraceableError(f"flatten({start_dim}), which joins tokens or parts of a head")
        return Symbol(self.trace, self.call, self.start, (self.num_columns,))

    def split(self, sizes: int | tuple[int, ...] | list[int], dim: int = 0) -> list["Symbol"]:
        """Parts along the first axis after T."""
        if dim % (len(self.sizes) + 1) != 1:
            raise NotTraceableError(f"split along axis {dim} of {self}")
        if isinstance(sizes, int):
            sizes = [sizes] * (self.sizes[0] // max(sizes, 1))
        if sum(sizes) != self.sizes[0]:
            raise NotTraceableError(f"split of {self.sizes[0]} into {sizes}")
        columns, start, parts = math.prod(self.sizes[1:]), self.start, []
        for size in sizes:
            parts.append(Symbol(self.trace, self.call, start, (size, *self.sizes[1:])))
            start += size * columns
        return parts

    def chunk(self, chunks: int, dim: int = 0) -> list["Symbol"]:
        """Equal parts along the first axis after T."""
        if not self.sizes or self.sizes[0] % chunks:
            raise NotTraceableError(f"{self} in {chunks} chunks")
        return self.split(self.sizes[0] // chunks, dim)

    def rotation(self, frequencies: Any) -> tuple["Symbol", "Symbol"]:
        """Cosines and sines [T, D] of positions times frequencies [D/2]: what `layers.rotary` returns."""
        head_size = 2 * frequencies.shape[0]
        angles = self.trace.record("rotation", (self, frequencies), (2 * head_size,))
        cos, sin = angles.split(head_size, dim=1)
        return cos, sin

    def __str__(self) -> str:
        return f"[{', '.join(map(str, ('T', *self.sizes)))}]"

    def __add__(self, other: Any) -> "Symbol":
        if isinstance(other, Symbol) and other.sizes == self.sizes:
            return self.trace.record("add", (self, other), self.sizes)
        if isinstance(other, int) and self.sizes == ():
            return self.trace.record("shift", (self, other), self.sizes)
        raise NotTraceableError("a sum of other things than two values of one shape")

    # What would be allowed, and mean something else than it does for a tensor.

    def __iadd__(self, other: Any) -> "Symbol":
        raise NotTraceableError("a sum in place, which other names of the value would see")

    def __bool__(self) -> bool:
        raise NotTraceableError("a decision that depends on a value")

    def __eq__(self, other: object) -> bool:
        raise NotTraceableError("a comparison of values")

    def __iter__(self) -> Iterator["Symbol"]:
        raise NotTraceableError("iteration over a value")

    def __getattr__(self, name: str) -> Any:
        raise NotTraceableError(f".{name} of a value")

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """PyTorch's own functions end here when a symbol is among their arguments."""
        name = getattr(function, "__name__", str(function))
        if name == "embedding" and isinstance(args[0], Symbol) and (kwargs or {}).get("max_norm") is None:
            return args[0].trace.record("embedding", args[:2], (args[1].shape[1],))
        raise NotTraceableError(f"torch's {name}")


def recorder(function: str) -> Callable[..., Any]:
    """The version of a kernel that records. Its result has the sizes that `_SIZES` says."""

    def record(*arguments: Any, **options: Any) -> Any:
        sizes = _SIZES.get(function)
        if sizes is None or options:
            raise NotTraceableError(f"the kernel {function}")
        symbol = next(argument for argument in arguments if isinstance(argument, Symbol))
        return symbol.trace.record(function, arguments, sizes(*arguments))

    return record


def _like(x: Symbol, *_: Any) -> tuple[int, ...]:
    return x.sizes


def _of_norm(x: Symbol, weight: Any, *_: Any) -> tuple[int, ...]:
    if weight is not None and tuple(weight.shape) != x.sizes[-1:]:
        raise NotTraceableError(f"a norm with {list(weight.shape)} weights of {x}")
    return x.sizes


def _of_linear(x: Symbol, weight: Any, bias: Any) -> tuple[int, ...]:
    if x.sizes != (weight.shape[1],):
        raise NotTraceableError(f"a linear layer {list(weight.shape)} of {x}")
    return (weight.shape[0],)


def _of_gate(x: Symbol) -> tuple[int, ...]:
    if len(x.sizes) != 1 or x.sizes[0] % 2:
        raise NotTraceableError(f"a gate over {x}")
    return (x.sizes[0] // 2,)


_SIZES: dict[str, Callable[..., tuple[int, ...]]] = {
    "rms_norm": _of_norm,
    "layer_norm": _of_norm,
    "rope": _like,
    "linear": _of_linear,
    "write_kv": lambda *_: (),
    "paged_attention": _like,
    "silu_and_mul": _of_gate,
    "gelu": _like,
    "relu": _like,
}
