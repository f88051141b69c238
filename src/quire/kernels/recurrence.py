"""Causal convolutions and linear recurrences, whose state is a page of the cache. Next to read: `layers/recurrent.py`.

A layer's state is opaque bytes, fp32: the last inputs of its convolution, then one matrix per head. It is not read by
the step that computes a request's position 0. Op by op a step's tokens are computed one after another. Plans compute
chunks of `CHUNK_TOKENS` positions, from multiples of that on, and keep beside a chunk's first matrices what its tokens
add: results do not depend on how a prompt is cut into steps.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire._native import Activation
from quire.kernels.activations import OPERATORS
from quire.kernels.instruction import Buffer, Columns, Cost, Emitter, Instruction, StepShape
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.paged_attention import StepTables
from quire.kernels.registry import kernel
from quire.kernels.tracing import SIZES, Call, NotTraceableError, Symbol
from quire.lazy_torch import Tensor, functional, torch

LANES = 16
CHUNK_TOKENS = 8
MAX_TAPS = 16
EPSILON = 1e-6


def conv_state_bytes(num_channels: int, num_taps: int) -> int:
    """Bytes of the inputs that a convolution keeps, [taps - 1, channels] of fp32; a multiple of 64."""
    return -(-4 * (num_taps - 1) * num_channels // 64) * 64


def recurrent_state_bytes(num_key_heads: int, num_heads: int, key_size: int, value_size: int) -> int:
    """Bytes of the matrices [key size, value size] of all heads in fp32, and of what a chunk's tokens add to them.

    Rows are padded to 16 values. Per token of a chunk a head keeps a value, a key head a key.
    """
    keys, values = (-(-size // LANES) * LANES for size in (key_size, value_size))
    of_heads = num_heads * (key_size * values + CHUNK_TOKENS * values + LANES)
    return 4 * (of_heads + num_key_heads * CHUNK_TOKENS * keys)


@kernel
def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cache: Tensor,
    step: StepTables,
    group_index: int,
) -> Tensor:
    """Convolve each channel over the last W inputs of its request, by weights of its own.

    out[t, c] = activation(bias[c] + sum_j weight[j · C + c] · x[t - W + 1 + j, c]); inputs before the step's first come
    from the state, and are 0 before the request's first token.

    Shapes: x [T, C]; weight [P], P being W · C, the oldest input's weights first; bias [C] or None; cache [N, S]
        -> [T, C].
    Dtypes: x, weight, bias bf16, fp16 or fp32; cache uint8; sums in fp32; returns x.dtype.
    Mutates: the last W - 1 inputs in the pages that block_tables[group_index] begins with.
    """
    num_channels = x.shape[1]
    taps = weight.float().view(-1, num_channels)  # [W, C]
    out = torch.empty_like(x)
    for rows, state, is_fresh in states(cache, step, group_index, 0, (len(taps) - 1, num_channels)):
        past = torch.zeros_like(state) if is_fresh else state
        inputs = torch.cat((past, x[rows].float()))  # [W - 1 + tokens, C]
        sums = functional.conv1d(
            inputs.T[None], taps.T[:, None], None if bias is None else bias.float(), groups=num_channels
        )[0].T
        out[rows] = (sums if activation is None else OPERATORS[activation](sums)).to(x.dtype)
        state.copy_(inputs[len(inputs) - len(taps) + 1 :])
    return out


@kernel
def linear_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor | None,
    log_rates: Tensor | None,
    time_bias: Tensor | None,
    skip: Tensor | None,
    cache: Tensor,
    step: StepTables,
    group_index: int,
    offset_bytes: int,
    delta: bool,
) -> Tensor:
    """Decay a matrix S per head, add k ⊗ u to it and read it with q, token by token. S is 0 before the first token.

    S = decay · S;  S = S + k[t] ⊗ u;  out[t] = q[t] @ S + skip · v[t], with dt = softplus(gates[t, :H] + time_bias)
    and decay = exp(-exp(log_rates) · dt); dt is 1 without gates and decay 1 without rates.
    Without `delta`, u = dt · v[t]: Mamba 2's state space (Dao & Gu 2024, eq. 1), or without gates and rates linear
    attention (Katharopoulos 2020, eq. 18). With `delta`, u = sigmoid(gates[t, H:]) · (v[t] - k[t] @ S), where k and q
    are divided by sqrt(sum of squares + 1e-6) and q by sqrt(D) too: the gated delta rule (Yang 2024, eq. 10).
    Head h reads q and k of head h // (H / K).

    Shapes: q, k [T, K, D]; v [T, H, V]; gates [T, G], G being 2H with delta, else H, or None;
        log_rates, time_bias, skip [H] or None; cache [N, S] -> [T, H, V].
    Dtypes: q, k, v, gates bf16, fp16 or fp32; cache uint8; computed in fp32; returns v.dtype.
    Units: offset_bytes of the matrices in a page.
    Mutates: the matrices in the pages that block_tables[group_index] begins with.
    """
    num_tokens, num_heads, value_size = v.shape
    queries, keys = (part.float().repeat_interleave(num_heads // part.shape[1], 1) for part in (q, k))  # [T, H, D]
    values = v.float()
    zeros = torch.zeros(num_heads, device=v.device)
    dt = torch.ones(num_tokens, num_heads, device=v.device)
    if gates is not None:
        dt = functional.softplus(gates[:, :num_heads].float() + (zeros if time_bias is None else time_bias.float()))
    decays = torch.ones_like(dt) if log_rates is None else torch.exp(-log_rates.float().exp() * dt)
    strengths = dt
    if delta:
        assert gates is not None
        strengths = torch.sigmoid(gates[:, num_heads:].float())
        queries, keys = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + EPSILON) for part in (queries, keys))
        queries = queries / math.sqrt(q.shape[2])
    out = torch.empty_like(values)
    shape = (num_heads, q.shape[2], value_size)
    for rows, state, is_fresh in states(cache, step, group_index, offset_bytes, shape):
        now = torch.zeros(shape, device=v.device) if is_fresh else state.clone()
        for t in range(rows.start, rows.stop):
            now = now * decays[t, :, None, None]
            known = torch.einsum("hd,hdv->hv", keys[t], now) if delta else 0
            now += torch.einsum("hd,hv->hdv", keys[t], (values[t] - known) * strengths[t, :, None])
            out[t] = torch.einsum("hd,hdv->hv", queries[t], now)
        state.copy_(now)
    if skip is not None:
        out += skip.float()[:, None] * values
    return out.to(v.dtype)


def states(
    cache: Tensor, step: StepTables, group_index: int, offset_bytes: int, shape: tuple[int, ...]
) -> Iterator[tuple[slice, Tensor, bool]]:
    """Per request its rows, the view of its state as fp32, and whether the step computes its first token."""
    first, size = 0, 4 * math.prod(shape)
    for request, (query_len, seq_len) in enumerate(zip(step.query_lens_list, step.seq_lens_list, strict=True)):
        page = cache[int(step.block_tables[group_index][request, 0]), offset_bytes : offset_bytes + size]
        yield slice(first, first + query_len), page.view(torch.float32).view(shape), query_len == seq_len
        first += query_len


@dataclass(eq=False, frozen=True, slots=True)
class CausalConvolution(Instruction):
    """A convolution and its activation."""

    x: Columns
    out: Buffer
    weight: Any
    bias: Any
    activation: Activation
    layer_index: int

    @property
    def num_taps(self) -> int:
        """W."""
        return int(self.weight.shape[0]) // self.out.width

    def emit(self, to: Emitter) -> None:
        to.push(
            "causal_conv",
            x=self.x,
            out=self.out,
            weight=self.weight,
            bias=self.bias,
            channels=self.out.width,
            taps=self.num_taps,
            activation=self.activation,
            kv=to.kv_layer(self.layer_index),
        )

    def cost(self, step: StepShape) -> Cost:
        width, taps = self.out.width, self.num_taps
        vectors = 4 * width * (taps + (self.bias is not None))
        written = len(step.requests) * self.state_bytes
        return Cost(step.num_tokens * (2 * taps + 10) * width, vectors + self.cache_bytes_read(step), written)

    def cache_bytes_read(self, step: StepShape) -> int:
        return sum(start > 0 for start, _ in step.requests) * self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the inputs that it keeps."""
        return 4 * (self.num_taps - 1) * self.out.width


@dataclass(eq=False, frozen=True, slots=True)
class Recurrence(Instruction):
    """A linear recurrence. Each token multiplies a state's values twice, with `delta` three times, and adds as often.

    A state's matrices are written when a chunk is full.
    """

    q: Columns
    k: Columns
    v: Columns
    gates: Columns | None
    out: Buffer
    vectors: tuple[Any, Any, Any]
    """Of rates, biases of time steps, and skips, each None for none."""
    num_key_heads: int
    num_heads: int
    offset_bytes: int
    layer_index: int
    delta: bool

    @property
    def sizes(self) -> tuple[int, int]:
        """Of keys and of values."""
        return self.k.width // self.num_key_heads, self.v.width // self.num_heads

    def emit(self, to: Emitter) -> None:
        log_rates, time_bias, skip = self.vectors
        key_size, value_size = self.sizes
        to.push(
            "recurrence",
            q=self.q,
            k=self.k,
            v=self.v,
            gates=self.gates,
            out=self.out,
            log_rates=log_rates,
            time_bias=time_bias,
            skip=skip,
            num_key_heads=self.num_key_heads,
            num_heads=self.num_heads,
            key_size=key_size,
            value_size=value_size,
            delta=self.delta,
            offset=self.offset_bytes,
            kv=to.kv_layer(self.layer_index),
        )

    def cost(self, step: StepShape) -> Cost:
        key_size, value_size = self.sizes
        flops = (6 if self.delta else 4) * self.num_heads * key_size * value_size
        vectors = sum(4 * self.num_heads for vector in self.vectors if vector is not None)
        written = 0
        for start, count in step.requests:
            end = start + count
            ends_chunk = end // CHUNK_TOKENS > start // CHUNK_TOKENS
            written += self._bytes(ends_chunk, min(count, end % CHUNK_TOKENS))
        return Cost(step.num_tokens * flops, vectors + self.cache_bytes_read(step), written)

    def cache_bytes_read(self, step: StepShape) -> int:
        return sum(self._bytes(True, start % CHUNK_TOKENS) for start, _ in step.requests if start > 0)

    def _bytes(self, has_matrices: bool, num_tokens: int) -> int:
        """Of a state's matrices, if they are read or written, and of `num_tokens` of its chunk."""
        key_size, value_size = self.sizes
        matrices = self.num_heads * key_size * value_size
        tokens = num_tokens * (self.num_heads * value_size + self.num_key_heads * key_size)
        return 4 * (has_matrices * matrices + tokens)


@lowers("causal_conv")
def _lower_conv(to: Lowering, call: Call) -> None:
    x, weight, bias, name, cache, _, group_index = call.arguments
    _check_state(to, call, cache, group_index)
    activation = Activation.none if name is None else Activation[name]
    to.append(CausalConvolution(to.columns(x), to.result(call), weight, bias, activation, cache.layer_index))


@lowers("linear_recurrence")
def _lower_recurrence(to: Lowering, call: Call) -> None:
    q, k, v, gates, *vectors, cache, _, group_index, offset_bytes, delta = call.arguments
    _check_state(to, call, cache, group_index)
    columns = None if gates is None else to.columns(gates)
    to.append(
        Recurrence(
            to.columns(q),
            to.columns(k),
            to.columns(v),
            columns,
            to.result(call),
            tuple(vectors),
            q.sizes[0],
            v.sizes[0],
            offset_bytes,
            cache.layer_index,
            delta,
        )
    )


def _check_state(to: Lowering, call: Call, cache: Any, group_index: int) -> None:
    """Each part of a state has one writer, which reads it too."""
    key = call.operation, cache.layer_index
    if key in to.notes or group_index != cache.group_index:
        raise NotTraceableError(f"a second {call.operation} on a layer's state, or one on another layer's")
    to.notes[key] = call


def _conv_sizes(x: Symbol, weight: Any, bias: Any, activation: str | None, *_: Any) -> tuple[int, ...]:
    if len(x.sizes) != 1 or weight.shape[0] % x.sizes[0] or not 1 < weight.shape[0] // x.sizes[0] <= MAX_TAPS:
        raise NotTraceableError(f"a convolution of {x} by {list(weight.shape)} weights")
    return x.sizes


def _recurrence_sizes(q: Symbol, k: Symbol, v: Symbol, gates: Any, *arguments: Any) -> tuple[int, ...]:
    delta = arguments[-1]
    if q.sizes != k.sizes or len(q.sizes) != 2 or len(v.sizes) != 2 or v.sizes[0] % q.sizes[0]:
        raise NotTraceableError(f"a recurrence of queries {q}, keys {k} and values {v}")
    expected = () if gates is None else ((2 if delta else 1) * v.sizes[0],)
    if (gates is None and delta) or (gates is not None and gates.sizes != expected):
        raise NotTraceableError(f"a recurrence with gates {gates} of {v.sizes[0]} heads")
    return v.sizes


SIZES.update(causal_conv=_conv_sizes, linear_recurrence=_recurrence_sizes)
