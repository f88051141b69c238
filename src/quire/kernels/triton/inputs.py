"""Inputs of a step from tables on the device: token ids, positions, KV slots, rotations.

Next to read: `runtime/device/memory.py`, whose tensors these read and write.
"""

import triton
import triton.language as tl


@triton.jit
def gather_inputs(
    starts,
    counts,
    first_rows,
    rows,
    given,
    tables,
    last_tokens,
    token_ids,
    positions,
    request_of,
    slots,
    num_tokens,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    T: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    SLOTS_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gather token ids, positions and slots. Grid: one program per CHUNK rows. For the tensors see `StepMemory`.

    Mutates: token_ids, positions, request_of, slots, num_tokens. Rows of padding: token 0, position 0, slot -1.
    """
    every = tl.arange(0, R_PAD)
    ends = tl.cumsum(tl.load(counts + every, mask=every < R, other=0), 0)
    total = tl.max(ends, 0)
    row = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    request = tl.minimum(tl.sum((row[:, None] >= ends[None, :]).to(tl.int32), 1), R - 1)
    real, inside = row < total, row < T
    position = tl.load(starts + request) + row - tl.load(first_rows + request)
    position = tl.where(real, position, 0)
    table_row = tl.load(rows + request)
    token = tl.load(given + row, mask=inside & real, other=0)
    token = tl.where(token >= 0, token, tl.load(last_tokens + table_row))
    # A request whose last row of logits left no choice has no token: any id will do, its result is dropped.
    tl.store(token_ids + row, tl.where(real, tl.maximum(token, 0), 0), mask=inside)
    tl.store(positions + row, position, mask=inside)
    tl.store(request_of + row, request, mask=inside)
    for group in tl.static_range(GROUPS):
        at = table_row.to(tl.int64) * TABLE_STRIDE + position // BLOCK
        block = tl.load(tables + group * GROUP_STRIDE + at, mask=real, other=0)
        slot = tl.where(real, block * BLOCK + position % BLOCK, -1)
        tl.store(slots + group * SLOTS_STRIDE + row, slot, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(num_tokens, total)


@triton.jit
def rotary(
    positions,
    frequencies,
    scales,
    cos,
    sin,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    STRIDE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    PERIOD: tl.constexpr,
):
    """Write cosines and sines of position · frequency, times the scale of the position's period. Grid: (T,)."""
    token = tl.program_id(0)
    at = tl.arange(0, HALF_PAD)
    position = tl.load(positions + token)
    angle = position.to(tl.float32) * tl.load(frequencies + at, mask=at < HALF, other=0.0)
    c, s = tl.cos(angle), tl.sin(angle)
    if HAS_SCALES:
        factor = tl.load(scales + tl.minimum(position // PERIOD, NUM_SCALES - 1))
        c, s = c * factor, s * factor
    tl.store(cos + token * STRIDE + at, c, mask=at < HALF)
    tl.store(sin + token * STRIDE + at, s, mask=at < HALF)
