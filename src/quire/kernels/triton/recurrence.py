"""Causal convolutions and linear recurrences for GPUs: what `kernels/recurrence.py` defines, token after token.

A request's state is a page of fp32 values: the last inputs of its convolution [taps - 1, channels], and behind them a
matrix [key size, value size] per head. A program holds its part of the state in registers while it goes through the
tokens that the step has of its request, so that a prompt reads and writes the state once.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from quire._native import Activation

CHANNELS = 256
"""Channels of a program of the convolution."""
TOKENS = 4
"""Tokens that it computes at once."""
COLUMNS = 32
"""Columns of a head's matrix in a program of the recurrence."""
ACTIVATIONS = {Activation.none: 0, Activation.silu: 1}


@triton.jit
def convolve(
    x,
    weight,
    bias,
    out,
    pages,
    table,
    rows,
    starts,
    counts,
    first_rows,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    TAPS_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """out[t, c] = activation(bias[c] + sum_j weight[j · C + c] · x[t - W + 1 + j, c]). Grid: (R, ceil(C / TILE)).

    Inputs before the step's first token come from the state, and are 0 before the request's first token.
    """
    request = tl.program_id(0)
    channel = (tl.program_id(1) * TILE + tl.arange(0, TILE))[None, :]
    count, start = tl.load(counts + request), tl.load(starts + request)
    if count > 0:
        first = tl.load(first_rows + request).to(tl.int64)
        page = tl.load(table + tl.load(rows + request).to(tl.int64) * TABLE_STRIDE).to(tl.int64)
        state = pages + page * PAGE_STRIDE
        real = channel < CHANNELS
        for begin in range(0, count, TOKENS):
            token = (begin + tl.arange(0, TOKENS))[:, None]
            total = tl.zeros([TOKENS, TILE], tl.float32)
            if HAS_BIAS:
                total += tl.load(bias + channel, mask=real, other=0.0)
            for tap in tl.static_range(TAPS):
                at = token - (TAPS - 1) + tap
                value = tl.load(x + (first + at) * X_STRIDE + channel, mask=real & (at >= 0) & (at < count), other=0.0)
                old = real & (at < 0) & (start + at >= 0)
                value += tl.load(state + (at + TAPS - 1) * CHANNELS + channel, mask=old, other=0.0)
                total += tl.load(weight + tap * CHANNELS + channel, mask=real, other=0.0) * value
            if ACTIVATION == 1:
                total = total / (1.0 + tl.exp(-total))
            tl.store(out + (first + token) * OUT_STRIDE + channel, total, mask=real & (token < count))
        # The last inputs; some of them may be old ones, which all threads have read before any is overwritten.
        place = tl.arange(0, TAPS_PADDED)[:, None]
        kept = real & (place < TAPS - 1)
        at = count - (TAPS - 1) + place
        value = tl.load(x + (first + at) * X_STRIDE + channel, mask=kept & (at >= 0), other=0.0)
        old = kept & (at < 0) & (start + at >= 0)
        value += tl.load(state + (at + TAPS - 1) * CHANNELS + channel, mask=old, other=0.0)
        tl.debug_barrier()
        tl.store(state + place * CHANNELS + channel, value, mask=kept)


@triton.jit
def recur(
    q,
    k,
    v,
    gates,
    out,
    log_rates,
    time_bias,
    skip,
    pages,
    table,
    rows,
    starts,
    counts,
    first_rows,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    TILE: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    GATES_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    OFFSET: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    HAS_GATES: tl.constexpr,
    HAS_RATES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    DELTA: tl.constexpr,
):
    """Decay a matrix per head, add to it and read it, token by token. Grid: (R, H, ceil(V / TILE)).

    The formulas are those of `linear_recurrence`. OFFSET: of the matrices in a page, in fp32 values.
    """
    request, head = tl.program_id(0), tl.program_id(1)
    count, start = tl.load(counts + request), tl.load(starts + request)
    if count > 0:
        first = tl.load(first_rows + request).to(tl.int64)
        page = tl.load(table + tl.load(rows + request).to(tl.int64) * TABLE_STRIDE).to(tl.int64)
        dim = tl.arange(0, KEY_PADDED)
        column = tl.program_id(2) * TILE + tl.arange(0, TILE)
        is_key, is_value = dim < KEY, column < VALUE
        of_key = head // (HEADS // KEY_HEADS) * KEY + dim
        at = pages + page * PAGE_STRIDE + OFFSET + head * KEY * VALUE + dim[:, None] * VALUE + column[None, :]
        real = is_key[:, None] & is_value[None, :]
        state = tl.load(at, mask=real & (start + dim > dim)[:, None], other=0.0)
        for index in range(0, count):
            token = first + index
            query = tl.load(q + token * Q_STRIDE + of_key, mask=is_key, other=0.0)
            key = tl.load(k + token * K_STRIDE + of_key, mask=is_key, other=0.0)
            value = tl.load(v + token * V_STRIDE + head * VALUE + column, mask=is_value, other=0.0)
            dt = 1.0
            if HAS_GATES:
                gate = tl.load(gates + token * GATES_STRIDE + head)
                if HAS_BIAS:
                    gate += tl.load(time_bias + head)
                dt = tl.maximum(gate, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(gate)))
            if HAS_RATES:
                state *= tl.exp(-tl.exp(tl.load(log_rates + head)) * dt)
            if DELTA:
                strength = 1.0 / (1.0 + tl.exp(-tl.load(gates + token * GATES_STRIDE + HEADS + head)))
                key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
                query *= tl.rsqrt((tl.sum(query * query, 0) + 1e-6) * KEY)
                known = tl.sum(key[:, None] * state, 0)
                added = (value - known) * strength
            else:
                added = value * dt
            state += key[:, None] * added[None, :]
            result = tl.sum(query[:, None] * state, 0)
            if HAS_SKIP:
                result += tl.load(skip + head) * value
            tl.store(out + token * OUT_STRIDE + head * VALUE + column, result, mask=is_value)
        tl.store(at, state, mask=real)


# --- As operations of a device plan -----------------------------------------------------------------------------


def causal_conv(
    step: Any,
    x: torch.Tensor,
    out: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    channels: int,
    taps: int,
    activation: Activation,
    kv: Any,
) -> None:
    """Convolve each channel over the last inputs of its request (`kernels/recurrence.py`). Mutates: the states."""
    convolve[step.max_requests, triton.cdiv(channels, CHANNELS)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        kv.values,
        step.tables[kv.group],
        *_requests(step),
        channels,
        taps,
        triton.next_power_of_2(max(taps - 1, 1)),
        CHANNELS,
        TOKENS,
        x.stride(0),
        out.stride(0),
        kv.values.stride(0),
        step.tables.stride(1),
        bias is not None,
        ACTIVATIONS[activation],
    )


def recurrence(
    step: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor | None,
    out: torch.Tensor,
    log_rates: torch.Tensor | None,
    time_bias: torch.Tensor | None,
    skip: torch.Tensor | None,
    num_key_heads: int,
    num_heads: int,
    key_size: int,
    value_size: int,
    delta: bool,
    offset: int,
    kv: Any,
) -> None:
    """Compute a linear recurrence (`kernels/recurrence.py`). Mutates: the states."""
    tile = min(triton.next_power_of_2(value_size), COLUMNS)
    recur[step.max_requests, num_heads, triton.cdiv(value_size, tile)](
        q,
        k,
        v,
        q if gates is None else gates,
        out,
        *(q if vector is None else vector for vector in (log_rates, time_bias, skip)),
        kv.values,
        step.tables[kv.group],
        *_requests(step),
        num_heads,
        num_key_heads,
        key_size,
        triton.next_power_of_2(key_size),
        value_size,
        tile,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        0 if gates is None else gates.stride(0),
        out.stride(0),
        kv.values.stride(0),
        offset // 4,
        step.tables.stride(1),
        gates is not None,
        log_rates is not None,
        time_bias is not None,
        skip is not None,
        delta,
    )


def _requests(step: Any) -> tuple[torch.Tensor, ...]:
    return step.rows, step.starts, step.counts, step.first_rows
