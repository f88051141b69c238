"""Writes to the paged KV cache, and attention of new tokens to their own request's cached keys.

In plans norms of heads and rotation are done where keys are written: `WriteKv`, `Attend`.
Next to read: `native/ops/write_kv.h`, then `native/ops/attend.h`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from quire.kernels.instruction import Buffer, Columns, Cost, Emitter, Instruction, StepShape, Work
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.registry import kernel
from quire.kernels.rope import rotation_of
from quire.kernels.tracing import SIZES, Call, NotTraceableError, Symbol, same_sizes
from quire.lazy_torch import Tensor, torch

QUERY_TILE = 256
"""Most queries of one product: bounds the memory of the scores to QUERY_TILE · H · P values."""
BLOCK = 32
SIZES.update(paged_attention=same_sizes, write_kv=lambda *_: ())


class StepTables(Protocol):
    """The part of `layers.forward_batch.ForwardBatch` that kernels read: this folder may not import that one."""

    block_tables: tuple[Tensor, ...]
    query_lens_list: tuple[int, ...]
    seq_lens_list: tuple[int, ...]


@kernel.with_traits(writes_cache=True, takes_in=("rope", "rms_norm"))
def write_kv(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store each token's key and value in its slot.

    kv_cache[slot // B, 0, slot % B] = k[t];  kv_cache[slot // B, 1, slot % B] = v[t];  slot = slot_mapping[t]

    Shapes: k, v [T, K, D] (may be strided over T); kv_cache [N, 2, B, K, D] (may be strided over N);
        slot_mapping [T], no slot twice.
    Dtypes: k, v bf16, fp16 or fp32; kv_cache any of these, values are rounded to it; slot_mapping int64.
    Mutates: kv_cache.
    """
    blocks, offsets = slot_mapping // kv_cache.shape[2], slot_mapping % kv_cache.shape[2]
    kv_cache[blocks, 0, offsets] = k.to(kv_cache.dtype)
    kv_cache[blocks, 1, offsets] = v.to(kv_cache.dtype)


@kernel.with_traits(takes_in=("rope", "rms_norm"))
def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    step: StepTables,
    group_index: int,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend each query to the keys of its request at its own and earlier positions.

    out[t, h] = softmax(scale · q[t, h] @ K[first…p].T) @ V[first…p], with p the position of token t, K and V of KV
    head h // (H / K), and first = max(0, p - window + 1).     (Vaswani 2017 eq. 1; paging: Kwon 2023 sec. 4)
    With a `soft_cap`, a score s becomes soft_cap · tanh(s / soft_cap).     (Gemma 2, sec. 2)

    With `sinks`, e^sinks[h] is added to the sum that the softmax divides by.     (Xiao 2024; gpt-oss)

    Request r's token at position p lies at kv_cache[block_tables[group_index][r, p // B], :, p % B]. Its new tokens
    are the last ones, and are written already. No other keys are read: the rest of the pool may hold NaN.

    Shapes: q [T, H, D] (may be strided over T); kv_cache [N, 2, B, K, D] (may be strided over N); sinks [H] or None
    -> [T, H, D].
    Dtypes: q bf16, fp16 or fp32; kv_cache any of these; sums in fp32; returns q.dtype.
    Units: window in tokens, the query's own included; None attends to everything before.
    """
    block_size, num_kv_heads = kv_cache.shape[2:4]
    num_tokens, num_heads, head_size = q.shape
    queries = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_size)  # [T, K, G, D]
    out = torch.empty(queries.shape, dtype=q.dtype, device=q.device)
    token = 0
    for request, (query_len, seq_len) in enumerate(zip(step.query_lens_list, step.seq_lens_list, strict=True)):
        for tile in range(seq_len - query_len, seq_len, QUERY_TILE):
            end = min(tile + QUERY_TILE, seq_len)
            first = 0 if window is None else max(0, tile - window + 1)
            keys = torch.arange(first, end, device=q.device)  # positions attended to, [P]
            blocks = step.block_tables[group_index][request, keys // block_size].long()
            k, v = kv_cache[blocks, :, keys % block_size].float().unbind(1)  # [P, K, D]
            rows = slice(token, token + end - tile)
            scores = scale * torch.einsum("tkgd,pkd->kgtp", queries[rows].float(), k)
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            distance = torch.arange(tile, end, device=q.device)[:, None] - keys
            hidden = (distance < 0) | (distance >= (window or end + 1))
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                shape = (num_kv_heads, num_heads // num_kv_heads, end - tile, 1)
                scores = torch.cat([scores, sinks.float().view(*shape[:2], 1, 1).expand(shape)], -1)
            weights = scores.softmax(-1)[..., : len(keys)]
            out[rows] = torch.einsum("kgtp,pkd->tkgd", weights, v).to(q.dtype)
            token += end - tile
    return out.view(q.shape)


@dataclass(eq=False, frozen=True, slots=True)
class WriteKv(Instruction):
    """Norms of heads, rotation in place, keys and values to the cache."""

    q: Columns
    k: Columns
    v: Columns
    num_heads: int
    q_norm: Any
    k_norm: Any
    epsilon: float
    rotation: tuple[Buffer, Buffer] | None
    layer_index: int
    num_kv_heads: int
    query_rotation: tuple[Buffer, Buffer] | None = None
    """Of queries, if it is another than that of keys."""

    def emit(self, to: Emitter) -> None:
        cos, sin = map(to.address, self.rotation) if self.rotation else (None, None)
        q_cos, q_sin = map(to.address, self.query_rotation) if self.query_rotation else (None, None)
        half = self.rotation[0].width if self.rotation else 0
        q_stride, k_stride, v_stride = (part.buffer.row_bytes // 4 for part in (self.q, self.k, self.v))
        to.push(
            "write_kv",
            q=to.address(self.q),
            k=to.address(self.k),
            v=to.address(self.v),
            q_stride=q_stride,
            k_stride=k_stride,
            v_stride=v_stride,
            num_heads=self.num_heads,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            epsilon=self.epsilon,
            cos=cos,
            sin=sin,
            half=half,
            q_cos=q_cos,
            q_sin=q_sin,
            kv=to.kv_layer(self.layer_index),
        )

    def cost(self, step: StepShape) -> Cost:
        norms = [norm for norm in (self.q_norm, self.k_norm) if norm is not None]
        heads = self.q.width + self.k.width
        flops = 4 * heads * (len(norms) > 0)
        if self.rotation is not None:
            flops += 6 * self.rotation[0].width * heads * self.num_kv_heads // self.k.width
        num_bytes = step.num_tokens * kv_bytes(step, self.num_kv_heads, self.k.width // self.num_kv_heads)
        return Cost(step.num_tokens * flops, sum(4 * int(norm.shape[0]) for norm in norms), num_bytes)


@dataclass(eq=False, frozen=True, slots=True)
class Attend(Instruction):
    """Attention of queries to the cache. `window` 0: to all earlier tokens; `soft_cap` 0: none; `sinks` [H] or None.

    A score and a weighted value are 2 · D operations each for every query head.
    """

    is_attention = True
    q: Columns
    out: Buffer
    num_heads: int
    scale: float
    window: int
    layer_index: int
    num_kv_heads: int
    soft_cap: float
    sinks: Any = None

    def emit(self, to: Emitter) -> None:
        to.push(
            "attend",
            q=to.address(self.q),
            stride=self.q.buffer.row_bytes // 4,
            out=self.out,
            num_heads=self.num_heads,
            window=self.window,
            scale=self.scale,
            kv=to.kv_layer(self.layer_index),
            soft_cap=self.soft_cap,
            sinks=self.sinks,
        )

    def cost(self, step: StepShape) -> Cost:
        num_bytes = step.num_positions(self.window) * kv_bytes(step, self.num_kv_heads, self.q.width // self.num_heads)
        flops = 4 * self.q.width * step.num_scores(self.window)
        num_bytes += 0 if self.sinks is None else 4 * self.num_heads
        return Cost(flops, num_bytes, 0, step.kv_arithmetic)

    @property
    def ahead(self) -> tuple[int, int]:
        return self.layer_index, self.window

    def cache_bytes_read(self, step: StepShape) -> int:
        return self.cost(step).bytes_read

    def explain(self, step: StepShape) -> list[Work]:
        """Scores QKᵀ and weighted values PV: equal work, keys for one and values for the other."""
        cost, width, heads, tokens = self.cost(step), self.q.width, self.num_heads, step.num_tokens
        half = Cost(cost.flops // 2, cost.bytes_read // 2, 0, cost.arithmetic)
        most = max(start + count for start, count in step.requests)
        every = sum(count * (start + count) for start, count in step.requests)
        window = f", window {self.window}" if self.window else ""
        scores = f"2 · {width} · {step.num_scores(self.window)} scores, causal{window}"
        formula = f"{scores}; uncausal 2 · {width} · {every}"
        return [
            Work(name, half, formula, f"{heads} heads of {'×'.join(map(str, shape))}", 2 * width * every)
            for name, shape in (("QKᵀ", (tokens, width // heads, most)), ("PV", (tokens, most, width // heads)))
        ]


def kv_bytes(step: StepShape, num_kv_heads: int, head_size: int) -> int:
    """Bytes of one token's keys and values in one layer; int8 has an fp32 scale for each head's."""
    size = step.kv_value_bytes
    return 2 * num_kv_heads * (head_size * size + (4 if step.kv_arithmetic == "int8" else 0))


@dataclass(frozen=True, slots=True)
class _Heads:
    """Queries, keys or values as attention wants them: where they are, and what is still to be done in place.

    `calls`: those that are part of this; of all of them `columns` is the source's value.
    """

    columns: Columns
    norm: Any = None
    epsilon: float = 0.0
    rotation: tuple[Buffer, Buffer] | None = None
    calls: tuple[Call, ...] = ()


@lowers("write_kv")
def _lower_write(to: Lowering, call: Call) -> None:
    cache = call.arguments[2]
    if ("write", cache.layer_index) in to.notes:
        raise NotTraceableError("a second write to a layer's cache")
    to.notes["write", cache.layer_index] = call


@lowers("paged_attention")
def _lower(to: Lowering, call: Call) -> None:
    q, cache, _, group_index, scale, window, soft_cap, sinks = call.arguments
    write: Call | None = to.notes.get(("write", cache.layer_index))
    if write is None or group_index != cache.group_index:
        raise NotTraceableError("attention to another cache than its own layer's, or to a cache not written")
    k, v = write.arguments[:2]
    if len(q.sizes) != 2 or k.sizes != v.sizes or k.sizes[1:] != q.sizes[1:] or q.sizes[0] % k.sizes[0]:
        raise NotTraceableError(f"attention of queries {q} to keys {k} and values {v}")
    (num_heads, head_size), num_kv_heads = q.sizes, k.sizes[0]
    # Later layers may read the cache too; their queries have been prepared by instructions of their own.
    is_first = to.notes.setdefault(("attend", cache.layer_index), call) is call
    parts = _prepared_in_place(to, (q, k, v), {write, call}) if is_first else None
    queries, keys, values = parts or [_Heads(to.columns(symbol)) for symbol in ((q, k, v) if is_first else (q, q, q))]
    # The memory of queries may be used for results that are int8 blocks across heads (native/ops/attend_rows.h).
    out = to.result(call, takes_type=parts is not None or head_size % BLOCK == 0)
    if is_first:
        to.append(
            WriteKv(
                queries.columns,
                keys.columns,
                values.columns,
                num_heads,
                queries.norm,
                keys.norm,
                queries.epsilon,
                keys.rotation,
                cache.layer_index,
                num_kv_heads,
                None if queries.rotation == keys.rotation else queries.rotation,
            )
        )
    to.append(
        Attend(
            queries.columns, out, num_heads, scale, window or 0, cache.layer_index, num_kv_heads, soft_cap or 0, sinks
        )
    )


def _prepared_in_place(to: Lowering, symbols: Sequence[Symbol], users: set[Call]) -> list[_Heads] | None:
    """Queries, keys and values before their norms and rotation; None where these cannot be done in place."""
    # A norm of values has an instruction of its own, before keys are changed that may be the same columns.
    values = _Heads(to.columns(symbols[2]))
    queries, keys = (_unprepared(to, symbol) for symbol in symbols[:2])
    parts = [queries, keys, values]
    # Both must rotate the same dimensions, perhaps by other values, or neither.
    widths = [None if part.rotation is None else part.rotation[0].width for part in (queries, keys)]
    if widths[0] != widths[1]:
        return None
    if (queries.norm is None) != (keys.norm is None) or queries.epsilon != keys.epsilon:
        return None
    # Only this attention may read the changed columns, and no column may be changed twice.
    calls = {call for part in parts for call in part.calls}
    if any(user not in calls | users for call in calls for user in to.users(call)):
        return None
    spans = sorted((id(part.columns.buffer), part.columns.start, part.columns.width) for part in parts)
    if any(a[0] == b[0] and a[1] + a[2] > b[1] for a, b in itertools.pairwise(spans)):
        return None
    return parts


def _unprepared(to: Lowering, symbol: Symbol) -> _Heads:
    """Follow a [T, heads, D] value back through rotation and norm, as far as these have waited."""
    heads = _Heads(Columns(Buffer(0), 0, 0))
    calls = [symbol.call]
    if symbol.call.operation == "rope" and to.is_waiting(symbol.call):
        heads = replace(heads, rotation=rotation_of(to, symbol.call))
        symbol = _inside(symbol, symbol.call.arguments[0])
        calls.append(symbol.call)
    if symbol.call.operation == "rms_norm" and to.is_waiting(symbol.call):
        x, norm, epsilon = symbol.call.arguments
        heads = replace(heads, norm=norm, epsilon=epsilon)
        symbol = _inside(symbol, x)
        calls.append(symbol.call)
    return replace(heads, columns=to.columns(symbol), calls=tuple(calls))


def _inside(symbol: Symbol, source: Symbol) -> Symbol:
    """The part of `source` that an elementwise call turned into `symbol`."""
    return Symbol(symbol.trace, source.call, source.start + symbol.start, symbol.sizes)
