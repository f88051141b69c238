"""`Lowering`: the state while a trace becomes instructions. Operations say how in a function marked `@lowers`.

The residual stream and every value that no linear layer reads is fp32; the input of a linear layer is written in its
type by the instruction before it. Must not know operations.
Next to read: `linear.py`, then `runtime/plan/lower.py`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from quire._native import RowType
from quire.kernels.instruction import Buffer, Columns, Convert, Instruction, Packing
from quire.kernels.registry import KERNELS
from quire.kernels.tracing import Call, NotTraceableError, Symbol

Lower = Callable[["Lowering", Call], None]
LOWERS: dict[str, Lower] = {}
"""By operation, filled when the operations' modules are imported."""
BLOCK = 32


def lowers(*operations: str) -> Callable[[Lower], Lower]:
    """Mark the function that lowers calls of these operations."""

    def mark(function: Lower) -> Lower:
        LOWERS.update(dict.fromkeys(operations, function))
        return function

    return mark


class Lowering:
    """Visits the live calls of a trace in order.

    Attributes:
        instructions: so far.
        num_fused: calls that became part of another's instruction, by operation.
        notes: what the lowering of one operation leaves for another's, by any key.
    """

    def __init__(self, packing_of: Callable[[Any], Packing]) -> None:
        """`packing_of`: how a parameter is packed."""
        self.instructions: list[Instruction] = []
        self.num_fused: dict[str, int] = {}
        self.notes: dict[Any, Any] = {}
        self.packing_of = packing_of
        self._buffers: dict[Call, Buffer] = {}
        self._converted: dict[tuple[Buffer, int, RowType], Buffer] = {}
        self._done: set[Call] = set()
        self._waiting: set[Call] = set()
        self._users: dict[Call, list[Call]] = {}

    def run(self, calls: Sequence[Call], result: Symbol, kept: Sequence[Symbol] = ()) -> Columns:
        """Lower all calls; returns where the result is. `kept`: further results."""
        for symbol in kept:
            self._users.setdefault(symbol.call, []).append(Call("result", (symbol,), (), len(calls)))
        self._users.setdefault(result.call, []).append(Call("result", (result,), (), len(calls)))
        # Backwards: what only calls without users read is not computed. A write to the cache is read by attention.
        for call in reversed(calls):
            if self._is_used(call):
                for symbol in call.inputs:
                    self._users.setdefault(symbol.call, []).insert(0, call)
        for call in calls:
            if self._is_used(call) and call not in self._done:
                self._lower(call)
        return self.columns(result)

    def append(self, instruction: Instruction) -> None:
        """Add an instruction."""
        self.instructions.append(instruction)

    def users(self, call: Call) -> list[Call]:
        """The calls that read a call's result, in order."""
        return self._users.get(call, [])

    def take_in(self, call: Call) -> None:
        """A call is part of the instruction that is being made."""
        self._done.add(call)
        self.num_fused[call.operation] = self.num_fused.get(call.operation, 0) + 1

    # --- Values -----------------------------------------------------------------------------

    def result(self, call: Call, *, takes_type: bool = False) -> Buffer:
        """A buffer for a call's result, in the type that all its readers want if the instruction can write that."""
        width = math.prod(call.sizes)
        wanted = {self._wanted(user, call) for user in self.users(call)}
        only = wanted.pop() if takes_type and len(wanted) == 1 else RowType.f32
        if only == RowType.q8 and width % BLOCK:
            only = RowType.f32
        buffer = self._buffers[call] = Buffer(width, only)
        return buffer

    def columns(self, symbol: Symbol) -> Columns:
        """Return where the fp32 values of a symbol are. Raises: NotTraceableError if they are nowhere."""
        if symbol.call in self._waiting:
            self._lower(symbol.call)
        buffer = self._buffers.get(symbol.call)
        if buffer is None or buffer.type != RowType.f32:
            raise NotTraceableError(f"a use of the result of {symbol.call.operation}")
        return Columns(buffer, symbol.start, symbol.num_columns)

    def has_values(self, symbol: Symbol) -> bool:
        """Return whether the fp32 values of a symbol are already computed."""
        buffer = self._buffers.get(symbol.call)
        return buffer is not None and buffer.type == RowType.f32 and symbol.call not in self._waiting

    def typed(self, symbol: Symbol, wanted: RowType) -> Columns:
        """A symbol in the type wanted; converts it, once, where its maker did not write that."""
        buffer = self._buffers.get(symbol.call)
        if buffer is not None and buffer.type == wanted:
            return Columns(buffer, symbol.start, symbol.num_columns)
        source = self.columns(symbol)
        key = (source.buffer, source.start, wanted)
        if wanted != RowType.f32 and (key not in self._converted or self._converted[key].width != source.width):
            if wanted == RowType.q8 and source.width % BLOCK:
                raise NotTraceableError("a linear layer whose input cannot be quantised")
            self._converted[key] = Buffer(source.width, wanted)
            self.append(Convert(source, self._converted[key]))
        return source if wanted == RowType.f32 else Columns(self._converted[key], 0, source.width)

    def add_in_place(self, call: Call, user: Call, read: Buffer) -> Buffer | None:
        """The buffer of x where `user` is x + `call` and may be written over x when `call` runs; None if it may not.

        `read`: what the instruction of `call` reads meanwhile.
        """
        if user.operation != "add" or call.sizes != user.sizes:
            return None
        a, b = user.arguments
        other = b if a.call is call else a
        buffer = self._buffers.get(other.call)
        if buffer is None or buffer.type != RowType.f32 or not other.is_whole or other.call is call:
            return None
        # A thread would write columns that another still multiplies with.
        if buffer is read:
            return None
        # The sum is written where x was, and already when this layer runs: all others must have read x before.
        if any(reader is not user and reader.index > call.index for reader in self.users(other.call)):
            return None
        self._buffers[user] = buffer
        self._converted = {key: value for key, value in self._converted.items() if key[0] is not buffer}
        self.take_in(user)
        return buffer

    def in_place(self, call: Call) -> Buffer | None:
        """The buffer of x where an elementwise `call` of x may write over it; None if it may not.

        Nothing else may read x, and what reads the result must want fp32.
        """
        x = call.arguments[0]
        buffer = self._buffers.get(x.call)
        wants_float = all(self._wanted(user, call) == RowType.f32 for user in self.users(call))
        if buffer is None or buffer.type != RowType.f32 or not wants_float:
            return None
        if not x.is_whole or self.users(x.call) != [call]:
            return None
        self._buffers[call] = buffer
        return buffer

    # --- Calls that attention takes in --------------------------------------------------------

    def waits(self, call: Call) -> bool:
        """Return whether a call of a part of one buffer waits until a user takes it in or needs its value.

        Only where every call that reads these columns can take it in: no other instruction may change them meanwhile.
        """
        if call in self._waiting:
            self._waiting.remove(call)
            return False
        x = call.arguments[0]
        source, end = x.call, x.start + x.num_columns
        is_kept = source in self._waiting or (source in self._buffers and self._buffers[source].type == RowType.f32)
        of_columns = [
            user
            for user in self.users(source)
            if any(
                each.call is source and each.start < end and x.start < each.start + each.num_columns
                for each in user.inputs
            )
        ]
        waits = is_kept and all(_takes_in(user, call) for user in (*self.users(call), *of_columns))
        if waits:
            self._waiting.add(call)
        return waits

    def is_waiting(self, call: Call) -> bool:
        """Return whether a call has not been computed, because its users may take it in."""
        return call in self._waiting

    def _lower(self, call: Call) -> None:
        lower = LOWERS.get(call.operation)
        if lower is None:
            raise NotTraceableError(f"the operation {call.operation}")
        lower(self, call)

    def _wanted(self, user: Call, call: Call) -> RowType:
        """The type in which `user` reads a value: fp32, but for a product that reads all of it."""
        x, kernel = user.arguments[0], KERNELS.get(user.operation)
        if kernel is None or kernel.weight_index is None or x.call is not call or not x.is_whole:
            return RowType.f32
        return self.packing_of(user.arguments[kernel.weight_index]).rows

    def _is_used(self, call: Call) -> bool:
        kernel = KERNELS.get(call.operation)
        return call in self._users or (kernel is not None and kernel.writes_cache)


def _takes_in(user: Call, call: Call) -> bool:
    kernel = KERNELS.get(user.operation)
    return kernel is not None and call.operation in kernel.takes_in
