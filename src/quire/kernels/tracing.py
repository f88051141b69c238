"""Running a model on symbols instead of tensors: what it computes becomes a list of calls.

A `Symbol` stands for [T, …] values of one step, T being open. Kernels called with symbols are recorded and not run
(`registry.Kernel`), views of symbols are tracked as column ranges, and anything else a model does with
one raises `NotTraceableError`: such a model runs op by op. One trace of 30 layers takes a few milliseconds.
Next to read: `runtime/plan/trace.py`, which runs models on symbols.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


class NotTraceableError(Exception):
    """A model does something with its values that a plan cannot hold."""


@dataclass(eq=False, slots=True)
class Call:
    """A recorded operation.

    Fields:
        operation: the kernel's function name; or "embedding", "rotation", "add", "multiply", "scale", "shift" (a
            constant added to ids); or what a trace starts from: "token_ids", "positions", "hidden".
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
    def shape(self) -> tuple[Any, ...]:
        """As a tensor's, T being no number."""
        return (T, *self.sizes)

    @property
    def num_columns(self) -> int:
        """Values per token."""
        return math.prod(self.sizes)

    @property
    def is_whole(self) -> bool:
        """True for all columns of the call's result."""
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

    def rotation(self, frequencies: Any, scales: Any, period: int) -> tuple["Symbol", "Symbol"]:
        """Cosines and sines [T, D] of positions times frequencies [D/2]: what `layers.rotary` returns."""
        head_size = 2 * frequencies.shape[0]
        angles = self.trace.record("rotation", (self, frequencies, scales, period), (2 * head_size,))
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

    def __mul__(self, other: Any) -> "Symbol":
        if isinstance(other, Symbol) and other.sizes == self.sizes:
            for activated, up in ((self, other), (other, self)):
                if (gate := _gate_of(activated, up)) is not None:
                    return gate
            return self.trace.record("multiply", (self, other), self.sizes)
        if isinstance(other, (int, float)) and self.sizes:
            return self.trace.record("scale", (self, float(other)), self.sizes)
        raise NotTraceableError("a product of other things than two values of one shape, or a value and a number")

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "Symbol":
        if not isinstance(other, (int, float)):
            raise NotTraceableError("a division by other things than a number")
        return self * (1 / other)

    # What would be allowed, and mean something else than it does for a tensor.

    def _in_place(self, other: Any) -> "Symbol":
        raise NotTraceableError("a result in place, which other names of the value would see")

    __iadd__ = __imul__ = __itruediv__ = _in_place

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
        record = TORCH_FUNCTIONS.get(name)
        if record is None:
            raise NotTraceableError(f"torch's {name}")
        return record(*args, **(kwargs or {}))


def _gate_of(activated: Symbol, up: Symbol) -> Symbol | None:
    """activation(gate) · up as one call, where gate and up are the halves of one value; None if they are not."""
    if activated.call.operation != "activate" or not activated.is_whole:
        return None
    gate, name = activated.call.arguments
    width = up.num_columns
    if gate.call is not up.call or gate.start + width != up.start or len(gate.sizes) != 1:
        return None
    both = Symbol(gate.trace, gate.call, gate.start, (2 * width,))
    return up.trace.record("gate", (both, name), up.sizes)


SIZES: dict[str, Callable[..., tuple[int, ...]]] = {}
"""By kernel: the sizes of its result for given arguments. Kernels without an entry cannot be in a plan."""
TORCH_FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""By name: what records a call of PyTorch's own function with a symbol."""


def recorder(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what records calls of a kernel's function, with all arguments in its order."""
    name, signature = function.__name__, inspect.signature(function)

    def record(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments, sizes = bound.args, SIZES.get(name)
        if sizes is None:
            raise NotTraceableError(f"the kernel {name}")
        symbol = next(argument for argument in arguments if isinstance(argument, Symbol))
        return symbol.trace.record(name, arguments, sizes(*arguments))

    return record


def same_sizes(x: Symbol, *_: Any) -> tuple[int, ...]:
    """Sizes of a result that has those of the first argument."""
    return x.sizes


def norm_sizes(x: Symbol, weight: Any, *_: Any) -> tuple[int, ...]:
    """Sizes of a norm over the last axis. Raises: NotTraceableError if the weight has another size."""
    if weight is not None and tuple(weight.shape) not in (x.sizes[-1:], (math.prod(x.sizes[-2:]),)):
        raise NotTraceableError(f"a norm with {list(weight.shape)} weights of {x}")
    return x.sizes
