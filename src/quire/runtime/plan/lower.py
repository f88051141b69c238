"""`lower`: a traced model to instructions, fused where two of them need no memory between them.

Fused are: an activation into the linear layer before it; a residual sum into the linear layer that makes one of its
terms; the change to int8 or bf16 into whatever makes a linear layer's input; norms of heads and rotation into the
write to the KV cache. The residual stream and everything not read by a linear layer is fp32.
Next to read: `instructions.py`, then `emit.py`.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire._native import Activation, RowType, WeightFormat, wanted_rows
from quire.kernels.tracing import Call, NotTraceableError, Symbol
from quire.runtime.plan.instructions import (
    Activate,
    Add,
    Attend,
    Buffer,
    Columns,
    Embed,
    Gemm,
    Instruction,
    Norm,
    Program,
    Rotary,
    WriteKv,
)
from quire.runtime.plan.trace import LayerCache, TracedModel

FormatOf = Callable[[Any], WeightFormat]
ACTIVATIONS = {
    "silu_and_mul": (Activation.silu, True),
    "gelu": (Activation.gelu, False),
    "relu": (Activation.relu, False),
}
_OF_HEADS = ("rope", "rms_norm", "write_kv", "paged_attention")
TILE = 16
BLOCK = 32


def lower(traced: TracedModel, format_of: FormatOf) -> Program:
    """Instructions for both traces. Raises: NotTraceableError."""
    lowering = _Lowering(traced, format_of)
    for call in traced.forward.calls:
        lowering.visit(call)
    hidden = lowering.as_float(traced.hidden)
    head_weight, head_bias = _head(traced)
    head_input = Buffer(hidden.width, wanted_rows(format_of(head_weight)))
    return Program(lowering.instructions, hidden, head_weight, head_bias, head_input, lowering.num_fused)


def _head(traced: TracedModel) -> tuple[Any, Any]:
    calls = traced.head.calls
    if len(calls) != 2 or calls[1].operation != "linear" or traced.logits.call is not calls[1]:
        raise NotTraceableError("a head that is more than one linear layer")
    x, weight, bias = calls[1].arguments
    if not x.is_whole:
        raise NotTraceableError("a head of a part of the hidden states")
    return weight, bias


@dataclass(frozen=True, slots=True)
class _Heads:
    """Queries or keys as attention wants them: where the projection wrote them, and what is still to be done."""

    columns: Columns
    num_columns: int
    norm: Any
    epsilon: float
    rotation: tuple[Buffer, Buffer] | None


class _Lowering:
    """Visits the calls in order. `buffers`: the result of each call that has one."""

    def __init__(self, traced: TracedModel, format_of: FormatOf) -> None:
        self.instructions: list[Instruction] = []
        self.num_fused: dict[str, int] = {}
        self._format_of = format_of
        self._buffers: dict[Call, Buffer] = {}
        self._converted: dict[tuple[Buffer, RowType], Buffer] = {}
        self._rotations: dict[Call, tuple[Buffer, Buffer]] = {}
        self._done: set[Call] = set()
        self._users: dict[Call, list[Call]] = {}
        for call in traced.forward.calls:
            for symbol in call.inputs:
                self._users.setdefault(symbol.call, []).append(call)
        self._users.setdefault(traced.hidden.call, []).append(Call("result", (), (), len(traced.forward.calls)))
        self._written: dict[int, tuple[Symbol, Symbol]] = {}
        self._prepared: set[Buffer] = set()

    def visit(self, call: Call) -> None:
        """Add the instructions of one call, unless an earlier one has taken it in."""
        if call not in self._done:
            getattr(self, f"_{call.operation}", self._unknown)(call)

    def as_float(self, symbol: Symbol) -> Buffer:
        """The fp32 buffer that holds all of a symbol and nothing else."""
        buffer = self._buffers.get(symbol.call)
        if buffer is None or buffer.type != RowType.f32 or not symbol.is_whole:
            raise NotTraceableError(f"a use of the result of {symbol.call.operation}")
        return buffer

    # --- Calls ----------------------------------------------------------------------------

    def _unknown(self, call: Call) -> None:
        raise NotTraceableError(f"the operation {call.operation}")

    def _token_ids(self, call: Call) -> None:
        pass

    _positions = _token_ids
    _shift = _token_ids
    _rope = _token_ids
    """Rotation is done where keys are written; `_heads` finds it."""

    def _embedding(self, call: Call) -> None:
        ids, table = call.arguments
        offset = 0
        while ids.call.operation == "shift":
            ids, constant = ids.call.arguments
            offset += constant
        of_positions = ids.call.operation == "positions"
        if not of_positions and ids.call.operation != "token_ids":
            raise NotTraceableError("an embedding of other things than token ids and positions")
        self.instructions.append(Embed(table, self._result(call), offset, of_positions))

    def _rotation(self, call: Call) -> None:
        positions, frequencies = call.arguments
        if positions.call.operation != "positions":
            raise NotTraceableError("a rotation by other things than positions")
        half = frequencies.shape[0]
        self._rotations[call] = (Buffer(half), Buffer(half))
        self.instructions.append(Rotary(frequencies, *self._rotations[call]))

    def _rms_norm(self, call: Call) -> None:
        x, weight, epsilon = call.arguments
        if len(x.sizes) == 1:
            out = self._result(call, takes_type=True)
            self.instructions.append(Norm(self.as_float(x), out, weight, None, epsilon, False))
        # Norms of heads wait for `_heads`.

    def _layer_norm(self, call: Call) -> None:
        x, weight, bias, epsilon = call.arguments
        if len(x.sizes) != 1:
            raise NotTraceableError("a layer norm of heads")
        out = self._result(call, takes_type=True)
        self.instructions.append(Norm(self.as_float(x), out, weight, bias, epsilon, True))

    def _linear(self, call: Call) -> None:
        x, weight, bias = call.arguments
        source = self._typed_input(x, wanted_rows(self._format_of(weight)))
        users = self._users.get(call, [])
        if len(users) == 1 and self._fuse_activation(call, users[0], source):
            return
        if len(users) == 1 and self._fuse_sum(call, users[0], source):
            return
        self.instructions.append(Gemm(weight, bias, source, self._result(call, takes_type=True)))

    def _add(self, call: Call) -> None:
        a, b = call.arguments
        self.instructions.append(Add(self.as_float(a), self.as_float(b), self._result(call)))

    def _activation(self, call: Call) -> None:
        activation, gated = ACTIVATIONS[call.operation]
        x = self.as_float(call.arguments[0])
        self.instructions.append(Activate(x, self._result(call, takes_type=True), activation, gated))

    _silu_and_mul = _gelu = _relu = _activation

    def _write_kv(self, call: Call) -> None:
        k, v, cache, _ = call.arguments
        if not isinstance(cache, LayerCache) or cache.layer_index in self._written:
            raise NotTraceableError("a second write to a layer's cache")
        self._written[cache.layer_index] = (k, v)

    def _paged_attention(self, call: Call) -> None:
        q, cache, _, group_index, scale, window = call.arguments
        if cache.layer_index not in self._written or group_index != cache.group_index:
            raise NotTraceableError("attention to another cache than its own layer's, or to a cache not written")
        k, v = self._written[cache.layer_index]
        queries, keys, values = (self._heads(symbol) for symbol in (q, k, v))
        buffer = self._check_alike(queries, keys, values)
        if buffer in self._prepared:
            # Rotation is in place: a second one would be on top of the first.
            raise NotTraceableError("a second attention to one projection")
        self._prepared.add(buffer)
        (num_heads, head_size), num_kv_heads = q.sizes, k.sizes[0]
        if k.sizes != v.sizes or k.sizes[1] != head_size or num_heads % num_kv_heads:
            raise NotTraceableError(f"attention of queries {q} to keys {k} and values {v}")
        if queries.rotation is not None and 2 * queries.rotation[0].width != head_size:
            raise NotTraceableError("a rotation of a part of each head")
        write = WriteKv(
            queries.columns, keys.columns, values.columns, num_heads, queries.norm, keys.norm, queries.epsilon,
            queries.rotation, cache.layer_index,
        )  # fmt: skip
        out = self._result(call, takes_type=True)
        attend = Attend(queries.columns, out, num_heads, scale, window or 0, cache.layer_index)
        self.instructions += [write, attend]

    # --- Parts ----------------------------------------------------------------------------

    def _heads(self, symbol: Symbol) -> _Heads:
        """Follow a [T, heads, D] value back through rotation and norm to the projection."""
        rotation, norm, epsilon = None, None, 0.0
        num_columns = symbol.num_columns
        if len(symbol.sizes) != 2:
            raise NotTraceableError(f"attention of {symbol}")
        if symbol.call.operation == "rope":
            x, cos, sin = symbol.call.arguments
            rotation = self._rotations.get(cos.call)
            if rotation is None or sin.call is not cos.call or cos.start >= sin.start:
                raise NotTraceableError("a rotation by other angles than the model's")
            symbol = _inside(symbol, x)
        if symbol.call.operation == "rms_norm" and len(symbol.call.sizes) == 2:
            x, norm, epsilon = symbol.call.arguments
            symbol = _inside(symbol, x)
        buffer = self._buffers.get(symbol.call)
        if buffer is None or buffer.type != RowType.f32 or symbol.call.operation != "linear":
            raise NotTraceableError("attention to other things than a projection")
        # Rotated in place: nobody else may read what was there.
        if any(user.operation not in _OF_HEADS for user in self._users[symbol.call]):
            raise NotTraceableError("a second use of queries, keys or values")
        return _Heads(Columns(buffer, symbol.start), num_columns, norm, epsilon, rotation)

    def _check_alike(self, queries: _Heads, keys: _Heads, values: _Heads) -> Buffer:
        """The buffer that holds all three; one instruction prepares them."""
        if len({heads.columns.buffer for heads in (queries, keys, values)}) != 1:
            raise NotTraceableError("queries, keys and values of several projections")
        if values.norm is not None or values.rotation is not None or queries.rotation != keys.rotation:
            raise NotTraceableError("queries, keys and values which are not prepared alike")
        if (queries.norm is None) != (keys.norm is None) or queries.epsilon != keys.epsilon:
            raise NotTraceableError("norms of queries and keys that differ")
        parts = sorted((heads.columns.start, heads.num_columns) for heads in (queries, keys, values))
        if any(start + count > following for (start, count), (following, _) in itertools.pairwise(parts)):
            raise NotTraceableError("queries, keys and values that share columns")
        return queries.columns.buffer

    def _result(self, call: Call, *, takes_type: bool = False) -> Buffer:
        """A buffer for a call's result, in the type that all its readers want if the instruction can write that."""
        width = math.prod(call.sizes)
        wanted = {self._wanted(user) for user in self._users.get(call, [])}
        only = wanted.pop() if takes_type and len(wanted) == 1 else RowType.f32
        if only == RowType.q8 and width % BLOCK:
            only = RowType.f32
        buffer = self._buffers[call] = Buffer(width, only)
        return buffer

    def _wanted(self, user: Call) -> RowType:
        """The type in which a call reads a value: fp32, but for a linear layer that reads all of one."""
        if user.operation != "linear" or not user.arguments[0].is_whole:
            return RowType.f32
        return wanted_rows(self._format_of(user.arguments[1]))

    def _typed_input(self, symbol: Symbol, wanted: RowType) -> Buffer:
        """All of a symbol in the type wanted; converts it, once, where its maker did not write that."""
        buffer = self._buffers.get(symbol.call)
        if buffer is None or not symbol.is_whole:
            raise NotTraceableError("a linear layer of a part of a value")
        if buffer.type == wanted:
            return buffer
        if (buffer, wanted) not in self._converted:
            if buffer.type != RowType.f32 or (wanted == RowType.q8 and buffer.width % BLOCK):
                raise NotTraceableError("a linear layer whose input cannot be quantised")
            converted = self._converted[buffer, wanted] = Buffer(buffer.width, wanted)
            self.instructions.append(Activate(buffer, converted))
        return self._converted[buffer, wanted]

    def _fuse_activation(self, call: Call, user: Call, source: Buffer) -> bool:
        """gate_up and SiLU, or a projection and its activation, as one."""
        if user.operation not in ACTIVATIONS or not user.arguments[0].is_whole:
            return False
        activation, gated = ACTIVATIONS[user.operation]
        if gated and user.sizes[0] % TILE:
            return False
        _, weight, bias = call.arguments
        self.instructions.append(Gemm(weight, bias, source, self._result(user, takes_type=True), activation, gated))
        self._take_in(user)
        return True

    def _fuse_sum(self, call: Call, user: Call, source: Buffer) -> bool:
        """x + linear(…) in place, when this is the last use of x."""
        if user.operation != "add" or call.sizes != user.sizes:
            return False
        a, b = user.arguments
        other = b if a.call is call else a
        buffer = self._buffers.get(other.call)
        if buffer is None or buffer.type != RowType.f32 or not other.is_whole or other.call is call:
            return False
        # A thread would write columns that another still multiplies with.
        if buffer is source:
            return False
        # The sum is written where x was, and already when this layer runs: all others must have read x before.
        if any(reader is not user and reader.index > call.index for reader in self._users[other.call]):
            return False
        _, weight, bias = call.arguments
        self.instructions.append(Gemm(weight, bias, source, buffer, add=True))
        self._buffers[user] = buffer
        self._converted = {key: value for key, value in self._converted.items() if key[0] is not buffer}
        self._take_in(user)
        return True

    def _take_in(self, call: Call) -> None:
        self._done.add(call)
        self.num_fused[call.operation] = self.num_fused.get(call.operation, 0) + 1


def _inside(symbol: Symbol, source: Symbol) -> Symbol:
    """The part of `source` that an elementwise call turned into `symbol`."""
    return Symbol(symbol.trace, source.call, source.start + symbol.start, symbol.sizes)
