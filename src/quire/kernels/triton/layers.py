"""Norms, elementwise functions, rotation with the write to the KV cache, products of one row.

Values are computed in fp32 and rounded where they are stored. Rows of padding are computed like others: nothing reads
their results, and their keys and values are not written.
Next to read: `attention.py`.
"""

import triton
import triton.language as tl


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Return the values behind an activation, by its name in `kernels/activations.py`."""
    if ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        x = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(y)) / 2 = 1 / (1 + e^-2y)
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return x


@triton.jit
def map_rows(
    x,
    other,
    out,
    ids,
    WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    OTHER_STRIDE: tl.constexpr,
    OTHER_STEP: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    FUNCTION: tl.constexpr,
    NUMBER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_IDS: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Compute an elementwise function of rows. Grid: (T, ceil(WIDTH / CHUNK)).

    FUNCTION: none, add, multiply, sigmoid (a gate), scale (by `other`), factor or cap (by NUMBER). HAS_IDS: row t is
    row ids[t] + OFFSET of x. HAS_BIAS: `other` is added to each row. OTHER_STEP 0: it has one value per row.
    """
    row, at = tl.program_id(0), tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    real = at < WIDTH
    from_row = row.to(tl.int64)
    if HAS_IDS:
        from_row = (tl.load(ids + row) + OFFSET).to(tl.int64)
    base = x + from_row * X_STRIDE + at
    value = tl.load(base, mask=real, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(other + at, mask=real, other=0.0).to(tl.float32)
    elif FUNCTION != "none" and FUNCTION != "factor" and FUNCTION != "cap":
        second = tl.load(other + row.to(tl.int64) * OTHER_STRIDE + at * OTHER_STEP, mask=real, other=0.0)
        second = second.to(tl.float32)
        if FUNCTION == "add":
            value += second
        elif FUNCTION == "sigmoid":
            value = value / (1.0 + tl.exp(-second))
        else:
            value *= second
    if FUNCTION == "factor":
        value *= NUMBER
    elif FUNCTION == "cap":
        value = NUMBER * (1.0 - 2.0 / (tl.exp(value * (2.0 / NUMBER)) + 1.0))
    value = activated(value, ACTIVATION)
    if GATED:
        up = tl.load(base + WIDTH, mask=real, other=0.0).to(tl.float32)
        if HAS_BIAS:
            up += tl.load(other + WIDTH + at, mask=real, other=0.0).to(tl.float32)
        value *= up
    place = out + row.to(tl.int64) * OUT_STRIDE + at
    if ADD:
        value += tl.load(place, mask=real, other=0.0).to(tl.float32)
    tl.store(place, value.to(out.dtype.element_ty), mask=real)


@triton.jit
def norm_rows(
    x,
    weight,
    bias,
    out,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    EPSILON: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Norm each group of WIDTH values: out = x / √(mean(x²) + ε) · weight + bias. Grid: (T, groups)."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, PADDED)
    real = at < WIDTH
    value = tl.load(x + row * X_STRIDE + group * WIDTH + at, mask=real, other=0.0).to(tl.float32)
    if SUBTRACT_MEAN:
        value = tl.where(real, value - tl.sum(value, 0) / WIDTH, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + EPSILON)
    if HAS_WEIGHT:
        value *= tl.load(weight + group * WEIGHT_STRIDE + at, mask=real, other=0.0)
    if HAS_BIAS:
        value += tl.load(bias + at, mask=real, other=0.0)
    place = out + row * OUT_STRIDE + group * WIDTH + at
    if ADD:
        value += tl.load(place, mask=real, other=0.0).to(tl.float32)
    tl.store(place, value.to(out.dtype.element_ty), mask=real)


@triton.jit
def _norm_weights(q_norm, k_norm, is_q, is_k, dim, D: tl.constexpr, HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr):
    """Return the weights of the norms of heads, 1 where a head has none."""
    result = tl.full([is_q.shape[0], dim.shape[1]], 1.0, tl.float32)
    if HAS_Q_NORM:
        result = tl.where(is_q, tl.load(q_norm + dim, mask=dim < D, other=0.0).to(tl.float32), result)
    if HAS_K_NORM:
        result = tl.where(is_k, tl.load(k_norm + dim, mask=dim < D, other=0.0).to(tl.float32), result)
    return result


@triton.jit
def write_kv(
    q,
    k,
    v,
    q_norm,
    k_norm,
    cos,
    sin,
    q_cos,
    q_sin,
    slots,
    kv,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    ROTATION_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    PLANE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    EPSILON: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm and rotate heads: queries in place, keys and values to the cache. Grid: (T, ceil((H + 2K) / HEADS)).

    Shapes: q [T, H, D], k, v [T, K, D], strided over T; q_norm, k_norm [D]; cos, sin, q_cos, q_sin [T, HALF];
        slots [T]: -1 is not written; kv [N, 2, B, K, D], strided. Mutates: q, kv.
    """
    token = tl.program_id(0)
    at = token.to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dim = tl.arange(0, D_PAD)[None, :]
    is_q, is_k, is_v = head < H, (head >= H) & (head < H + K), (head >= H + K) & (head < H + 2 * K)
    real = dim < D
    # The other half of each pair; a dimension beyond the rotated ones is its own.
    pair = tl.where(dim < HALF, dim + HALF, tl.where(dim < 2 * HALF, dim - HALF, dim))
    turned = (dim < 2 * HALF) & (is_q | is_k)
    # These are older than the kernel before.
    slot = tl.load(slots + token)
    of_norm = _norm_weights(q_norm, k_norm, is_q, is_k, dim, D, HAS_Q_NORM, HAS_K_NORM)
    if HAS_ROTATION:
        of_pair = _norm_weights(q_norm, k_norm, is_q, is_k, pair, D, HAS_Q_NORM, HAS_K_NORM)
        angle = at * ROTATION_STRIDE + tl.where(dim < HALF, dim, dim - HALF)
        c = tl.load(cos + angle, mask=turned & is_k, other=0.0) + tl.load(q_cos + angle, mask=turned & is_q, other=0.0)
        s = tl.load(sin + angle, mask=turned & is_k, other=0.0) + tl.load(q_sin + angle, mask=turned & is_q, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(q + at * Q_STRIDE + head * D + dim, mask=is_q & real, other=0.0).to(tl.float32)
    x += tl.load(k + at * K_STRIDE + (head - H) * D + dim, mask=is_k & real, other=0.0).to(tl.float32)
    x += tl.load(v + at * V_STRIDE + (head - H - K) * D + dim, mask=is_v & real, other=0.0).to(tl.float32)
    if HAS_ROTATION:
        y = tl.load(q + at * Q_STRIDE + head * D + pair, mask=is_q & real, other=0.0).to(tl.float32)
        y += tl.load(k + at * K_STRIDE + (head - H) * D + pair, mask=is_k & real, other=0.0).to(tl.float32)
    if HAS_Q_NORM or HAS_K_NORM:
        factor = tl.rsqrt(tl.sum(x * x, 1) / D + EPSILON)[:, None]
        factor = tl.where((is_q & HAS_Q_NORM) | (is_k & HAS_K_NORM), factor, 1.0)
        x *= factor * of_norm
        if HAS_ROTATION:
            y *= factor * of_pair
    if HAS_ROTATION:
        x = tl.where(turned, x * c + y * tl.where(dim < HALF, -s, s), x)
    # Threads of this program still read other halves of pairs, which lie where others write.
    tl.debug_barrier()
    tl.store(q + at * Q_STRIDE + head * D + dim, x.to(q.dtype.element_ty), mask=is_q & real)
    kv_head = tl.where(is_k, head - H, head - H - K)
    place = (slot // BLOCK).to(tl.int64) * BLOCK_STRIDE + slot % BLOCK * TOKEN_STRIDE + kv_head * HEAD_STRIDE
    place += tl.where(is_v, PLANE_STRIDE, 0)
    written = tl.where(is_k | is_v, slot, -1) >= 0
    tl.store(kv + place + dim, x.to(kv.dtype.element_ty), mask=written & real)


@triton.jit
def linear_row(
    x,
    weight,
    norm,
    bias,
    out,
    N: tl.constexpr,
    IN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    EPSILON: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NORMED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply one row by a matrix, without tensor cores. Grid: (ceil(N / OUTPUTS),).

    NORMED: of x / rms(x) · norm. The division is by one number, so that it is done to the result: a norm costs no
    launch. GATED: the matrix has N gates and N ups.

    Shapes: x [IN]; weight [N or 2N, IN]; norm [IN]; bias [N or 2N]; out [N]. Mutates: out.
    """
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    real = n < N
    base = weight + n[:, None].to(tl.int64) * IN
    acc = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    acc_up = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    squares = tl.zeros([INPUTS], tl.float32)
    # Weights are read one tile ahead: they do not depend on the kernel before, which may still run.
    k = tl.arange(0, INPUTS)
    inside = real[:, None] & (k < IN)[None, :]
    w = tl.load(base + k[None, :], mask=inside, other=0.0)
    w_up = tl.load(base + N * IN + k[None, :], mask=inside, other=0.0) if GATED else w
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for begin in range(0, IN, INPUTS):
        at = begin + k
        row = tl.load(x + at, mask=at < IN, other=0.0).to(tl.float32)
        ahead = at + INPUTS
        inside = real[:, None] & (ahead < IN)[None, :]
        next_w = tl.load(base + ahead[None, :], mask=inside, other=0.0)
        if NORMED:
            squares += row * row
            row *= tl.load(norm + at, mask=at < IN, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * row[None, :]
        w = next_w
        if GATED:
            next_up = tl.load(base + N * IN + ahead[None, :], mask=inside, other=0.0)
            acc_up += w_up.to(tl.float32) * row[None, :]
            w_up = next_up
    value = tl.sum(acc, 1)
    factor = tl.rsqrt(tl.sum(squares, 0) / IN + EPSILON) if NORMED else 1.0
    value *= factor
    if HAS_BIAS:
        value += tl.load(bias + n, mask=real, other=0.0)
    value = activated(value, ACTIVATION)
    if GATED:
        up = tl.sum(acc_up, 1) * factor
        if HAS_BIAS:
            up += tl.load(bias + N + n, mask=real, other=0.0)
        value *= up
    if ADD:
        value += tl.load(out + n, mask=real, other=0.0).to(tl.float32)
    tl.store(out + n, value.to(out.dtype.element_ty), mask=real)
