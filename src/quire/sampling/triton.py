"""Kernels from rows of logits to tokens, with the bits of the CPU's sampler (`native/sampling/row.cpp`, `kernels.h`).

That sampler is made for it: a token's weight is an integer in units of 2^-40, so sums are exact in any order, and a
draw is a pure function of (seed, position, attempt) by Philox4x32-10. Four launches, none with a run-time integer:
`scan` (maxima of 16 logits), `weigh` (weights of chunks), `collect` (the best tokens, if top_k or top_p is set),
`choose`.
Weights need the polynomial's fused multiply-adds and no others: `NO_FUSION` is given at every launch.
`runtime/device/sampler.py` fills the settings of the rows and launches the kernels.
"""

import triton
import triton.language as tl

CHUNK = 1024
GROUP = 16
POOL = 1024
"""Best tokens that `choose` can sort."""
NUCLEUS = 128
"""Likeliest tokens looked at for top_p before a row counts as flat."""
MAX_K = 512
NO_FUSION = {"enable_fp_fusion": False}
NUM_OPTIONS = tl.constexpr(16)
"""Columns of a row's settings, int32; floats are stored by their bits. A row without a target is padding."""
LOGIT_ROW, TARGET, POSITION, TOP_K = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
TAKES_ALL, SEED_LOW, SEED_HIGH = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
SHARE_LOW, SHARE_HIGH = tl.constexpr(7), tl.constexpr(8)
SCALE, LOWEST, MIN_P, TEMPERATURE = tl.constexpr(9), tl.constexpr(10), tl.constexpr(11), tl.constexpr(12)
_LEAST = tl.constexpr(-2139095040)
"""`_order` of the most negative finite fp32: -inf is never collected."""
_NO_KEY = tl.constexpr(-9223372036854775808)
_NO_ID = tl.constexpr(2147483647)


@triton.jit
def _option(settings, row, COLUMN: tl.constexpr):
    return tl.load(settings + row * NUM_OPTIONS + COLUMN)


@triton.jit
def _float_option(settings, row, COLUMN: tl.constexpr):
    return tl.load(settings + row * NUM_OPTIONS + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def _row_of(logits, settings, row, V: tl.constexpr):
    """Return the address of a row's logits."""
    return logits + _option(settings, row, LOGIT_ROW).to(tl.int64) * V


@triton.jit
def _load_chunk(x_row, chunk, V: tl.constexpr, CHUNK: tl.constexpr):
    """Return ids and logits of a chunk; -inf behind the vocabulary."""
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    return at, tl.load(x_row + at, mask=at < V, other=float("-inf"))


@triton.jit
def _exp2_scaled(x, scale):
    """Return 2^(x · scale) as native/ops/functions.h: the same operations in the same order."""
    rounded = tl.fma(x, scale, 12582912.0)
    r = tl.fma(x, scale, 12582912.0 - rounded)
    p = tl.full(x.shape, 0.00015353361959569156, tl.float32)  # 0x1.41fbbcp-13
    p = tl.fma(p, r, 0.0013398875016719103)  # 0x1.5f3e54p-10
    p = tl.fma(p, r, 0.00961843691766262)  # 0x1.3b2d4cp-7
    p = tl.fma(p, r, 0.055503323674201965)  # 0x1.c6aee8p-5
    p = tl.fma(p, r, 0.24022647738456726)  # 0x1.ebfbdcp-3
    p = tl.fma(p, r, 0.6931471824645996)  # 0x1.62e430p-1
    p = tl.fma(p, r, 1.0)
    bits = p.to(tl.int32, bitcast=True) + (rounded.to(tl.int32, bitcast=True) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _weight_of(x, largest, settings, row):
    """Return the weights of logits in units of 2^-40. Dtypes: -> int64."""
    scale, lowest = _float_option(settings, row, SCALE), _float_option(settings, row, LOWEST)
    weight = _exp2_scaled(tl.maximum(x - largest, lowest), scale)
    weight = tl.where(weight < _float_option(settings, row, MIN_P), 0.0, weight)
    rounded = weight + 3.0
    rest = weight - (rounded - 3.0)
    coarse = rounded.to(tl.int32, bitcast=True) - 0x40400000
    fine = (rest + 1.1444091796875e-05).to(tl.int32, bitcast=True) - 0x37400000  # 0x1.8p-17
    return (coarse.to(tl.int64) << 18) + fine.to(tl.int64)


@triton.jit
def _uniform(settings, row, attempt):
    """Return the number in [0, 1) of a row's seed and position. Dtypes: -> fp64."""
    position = _option(settings, row, POSITION)
    a, b = position.to(tl.uint32), tl.zeros_like(position).to(tl.uint32)
    c, d = b + attempt.to(tl.uint32), b
    low = _option(settings, row, SEED_LOW).to(tl.uint32, bitcast=True)
    high = _option(settings, row, SEED_HIGH).to(tl.uint32, bitcast=True)
    for _ in tl.static_range(10):
        left = a.to(tl.uint64) * 0xD2511F53
        right = c.to(tl.uint64) * 0xCD9E8D57
        a, c = (right >> 32).to(tl.uint32) ^ b ^ low, (left >> 32).to(tl.uint32) ^ d ^ high
        b, d = right.to(tl.uint32), left.to(tl.uint32)
        low += 0x9E3779B9
        high += 0xBB67AE85
    bits = (a.to(tl.uint64) << 21) | (b >> 11).to(tl.uint64)
    return bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _order(value):
    """Return an int32 that ranks as the float does; both zeros are one."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _middle(low, high):
    """Return the upper middle of low … high, whose difference may exceed int32."""
    return low + ((high - low).to(tl.uint32, bitcast=True) + 1 >> 1).to(tl.int32)


@triton.jit
def _target_of(number, weight):
    """Return the place in 0 … weight - 1 at which a number in [0, 1) points."""
    return tl.minimum((number * weight.to(tl.float64)).to(tl.int64), weight - 1)


@triton.jit
def _limit_of(settings, row, weight):
    """Return the weight that reaches top_p of `weight`."""
    low = _option(settings, row, SHARE_LOW).to(tl.uint32, bitcast=True).to(tl.int64)
    bits = (_option(settings, row, SHARE_HIGH).to(tl.int64) << 32) | low
    return tl.maximum((weight.to(tl.float64) * bits.to(tl.float64, bitcast=True)).to(tl.int64), 1)


# --- Passes over the vocabulary -----------------------------------------------------------------------------------


@triton.jit
def scan(
    logits,
    settings,
    maxima,
    chunk_maxima,
    V: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Find the maxima of each 16 logits of a row, and of each chunk; NaN where one is. Grid: (S, NUM_CHUNKS)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _option(settings, row, TARGET) >= 0:
        _, x = _load_chunk(_row_of(logits, settings, row, V), chunk, V, CHUNK)
        x = tl.reshape(x, (CHUNK // GROUP, GROUP))
        found = tl.max(x, 1)
        is_nan = tl.max((x != x).to(tl.int32), 1) > 0
        found = tl.where(is_nan, float("nan"), found)
        base = maxima + (row * NUM_CHUNKS + chunk) * (CHUNK // GROUP)
        tl.store(base + tl.arange(0, CHUNK // GROUP), found)
        has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
        of_chunk = tl.max(tl.where(is_nan, float("-inf"), found), 0)
        tl.store(chunk_maxima + row * NUM_CHUNKS + chunk, tl.where(has_nan, float("nan"), of_chunk))


@triton.jit
def _largest(chunk_maxima, row, NUM_CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr):
    """Return a row's largest logit, NaN if one is, and the chunks' maxima."""
    at = tl.arange(0, PADDED_CHUNKS)
    values = tl.load(chunk_maxima + row * NUM_CHUNKS + at, mask=at < NUM_CHUNKS, other=float("-inf"))
    has_nan = tl.max((values != values).to(tl.int32), 0) > 0
    largest = tl.max(tl.where(values != values, float("-inf"), values), 0)
    return tl.where(has_nan, float("nan"), largest), values


@triton.jit
def weigh(
    logits,
    settings,
    maxima,
    chunk_maxima,
    chunk_weights,
    bounds,
    num_pooled,
    V: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    NUCLEUS: tl.constexpr,
):
    """Sum the weights of each chunk of a row, and find a value that its best tokens of top_k or top_p reach.

    Grid: (S, NUM_CHUNKS + 1): the last program of a row finds the bound.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if (_option(settings, row, TARGET) >= 0) & (_float_option(settings, row, TEMPERATURE) != 0.0):
        largest, _ = _largest(chunk_maxima, row, NUM_CHUNKS, PADDED_CHUNKS)
        top_k = _option(settings, row, TOP_K)
        if chunk < NUM_CHUNKS:
            at, x = _load_chunk(_row_of(logits, settings, row, V), chunk, V, CHUNK)
            weights = tl.where(at < V, _weight_of(x, largest, settings, row), 0)
            tl.store(chunk_weights + row * NUM_CHUNKS + chunk, tl.sum(weights, 0))
        elif (top_k > 0) | (_option(settings, row, TAKES_ALL) == 0):
            size = tl.where(top_k > 0, top_k, NUCLEUS)
            groups = tl.arange(0, PADDED)
            found = tl.load(maxima + row * NUM_GROUPS + groups, mask=groups < NUM_GROUPS, other=float("-inf"))
            ranks = _order(found)
            low = tl.full([], _LEAST, tl.int32)
            high = _order(largest)
            if tl.sum((ranks >= low).to(tl.int32), 0) >= size:
                while low < high:  # the largest value that `size` maxima reach
                    middle = _middle(low, high)
                    enough = tl.sum((ranks >= middle).to(tl.int32), 0) >= size
                    low = tl.where(enough, middle, low)
                    high = tl.where(enough, high, middle - 1)
            tl.store(bounds + row, low)
            tl.store(num_pooled + row, 0)


@triton.jit
def _keys(rank, ids):
    """Return keys that rank as the CPU's: by value, equal ones by id."""
    return (rank.to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def collect(
    logits,
    settings,
    maxima,
    bounds,
    num_pooled,
    pool,
    V: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    POOL: tl.constexpr,
):
    """Collect keys of a row's tokens that reach its bound, in any order. Grid: (S, NUM_CHUNKS)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_limited = (_option(settings, row, TOP_K) > 0) | (_option(settings, row, TAKES_ALL) == 0)
    is_drawn = (_option(settings, row, TARGET) >= 0) & (_float_option(settings, row, TEMPERATURE) != 0.0)
    if is_limited & is_drawn:
        bound = tl.load(bounds + row)
        of_groups = tl.load(maxima + (row * NUM_CHUNKS + chunk) * GROUPS + tl.arange(0, GROUPS))
        if tl.max(_order(of_groups), 0) >= bound:
            at, x = _load_chunk(_row_of(logits, settings, row, V), chunk, V, CHUNK)
            rank = _order(x)
            found = (rank >= bound) & (at < V)
            place = tl.cumsum(found.to(tl.int32), 0) - 1
            base = tl.atomic_add(num_pooled + row, tl.sum(found.to(tl.int32), 0))
            tl.store(pool + row * POOL + base + place, _keys(rank, at), mask=found & (base + place < POOL))


# --- Choosing -----------------------------------------------------------------------------------------------------


@triton.jit
def _recollect(x_row, pool_row, low, largest, size, V: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Collect exactly the `size` best tokens, where more than the pool holds reach the bound `low`. Mutates: pool."""
    high = _order(largest)
    while low < high:  # the value of the last of them
        middle = _middle(low, high)
        count = tl.zeros_like(low)
        for chunk in range(0, NUM_CHUNKS):
            _, x = _load_chunk(x_row, chunk, V, CHUNK)
            count += tl.sum((_order(x) >= middle).to(tl.int32), 0)
        low = tl.where(count >= size, middle, low)
        high = tl.where(count >= size, high, middle - 1)
    num_equal = size
    for chunk in range(0, NUM_CHUNKS):
        _, x = _load_chunk(x_row, chunk, V, CHUNK)
        num_equal -= tl.sum((_order(x) > low).to(tl.int32), 0)
    base = tl.zeros_like(size)
    for chunk in range(0, NUM_CHUNKS):
        at, x = _load_chunk(x_row, chunk, V, CHUNK)
        rank = _order(x)
        is_equal = (rank == low).to(tl.int32)
        kept = (rank > low) | ((rank == low) & (tl.cumsum(is_equal, 0) <= num_equal))
        num_equal -= tl.minimum(tl.sum(is_equal, 0), num_equal)
        place = base + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(pool_row + place, _keys(rank, at), mask=kept)
        base += tl.sum(kept.to(tl.int32), 0)
    tl.debug_barrier()


@triton.jit
def _in_order(weights, target, ids):
    """Return the first of ids, whose weights are given, up to which they weigh more than `target`."""
    below = tl.cumsum(weights, 0) <= target
    return tl.min(tl.where(below, _NO_ID, ids), 0)


@triton.jit
def _draw(
    x_row,
    settings,
    row,
    weights_row,
    total,
    number,
    largest,
    pivot,
    pivot_id,
    V: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Draw by weight in the order of ids, from the tokens before the pivot, whose chunks' weights are given."""
    target = _target_of(number, total)
    index = tl.arange(0, PADDED_CHUNKS)
    weights = tl.load(weights_row + index, mask=index < NUM_CHUNKS, other=0)
    chunk = _in_order(weights, target, index)
    target -= tl.sum(tl.where(index < chunk, weights, 0), 0)
    at, x = _load_chunk(x_row, chunk, V, CHUNK)
    before = (x > pivot) | ((x == pivot) & (at < pivot_id))
    own = tl.where((at < V) & before, _weight_of(x, largest, settings, row), 0)
    return _in_order(own, target, at)


@triton.jit
def _draw_by_trial(
    x_row,
    settings,
    row,
    weights_row,
    total,
    limit,
    largest,
    V: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Draw from all tokens until those before the drawn one leave it inside of top_p. Mutates: the chunks' weights."""
    attempt = tl.zeros([], tl.int32)
    token = attempt
    pivot, pivot_id = tl.full([], float("-inf"), tl.float32), attempt + V
    going = True
    while going:
        number = _uniform(settings, row, attempt)
        token = _draw(
            x_row,
            settings,
            row,
            weights_row,
            total,
            number,
            largest,
            pivot,
            pivot_id,
            V,
            NUM_CHUNKS,
            PADDED_CHUNKS,
            CHUNK,
        )
        pivot, pivot_id = tl.load(x_row + token), token
        total = tl.zeros_like(total)
        tl.debug_barrier()
        for chunk in range(0, NUM_CHUNKS):
            at, x = _load_chunk(x_row, chunk, V, CHUNK)
            before = (x > pivot) | ((x == pivot) & (at < pivot_id))
            kept = tl.sum(tl.where((at < V) & before, _weight_of(x, largest, settings, row), 0), 0)
            tl.store(weights_row + chunk, kept)
            total += kept
        tl.debug_barrier()
        attempt += 1
        going = total >= limit
    return token


@triton.jit
def _draw_from_pool(
    settings, row, pool_row, size, total, largest, V: tl.constexpr, POOL: tl.constexpr, NUCLEUS: tl.constexpr
):
    """Draw from the `size` best tokens, in their order; -2 if top_p may go beyond them."""
    top_k = _option(settings, row, TOP_K)
    place = tl.arange(0, POOL)
    keys = tl.load(pool_row + place, mask=place < size, other=_NO_KEY)
    keys = tl.sort(keys, descending=True)
    size = tl.where(top_k > 0, tl.minimum(top_k, size), tl.minimum(NUCLEUS, size))
    kept = place < size
    rank = (keys >> 32).to(tl.int32)
    value = tl.where(rank < 0, rank ^ 0x7FFFFFFF, rank).to(tl.float32, bitcast=True)
    own = tl.where(kept, _weight_of(tl.where(kept, value, largest), largest, settings, row), 0)
    sums = tl.cumsum(own, 0)
    pool_weight = tl.sum(own, 0)
    limit = _limit_of(settings, row, tl.where(top_k > 0, pool_weight, total))
    last, is_whole = size - 1, True
    if _option(settings, row, TAKES_ALL) == 0:
        last = tl.minimum(tl.sum((sums < limit).to(tl.int32), 0), size - 1)
        # A last kept value that also ends the pool may go on outside of it.
        of_last = tl.sum(tl.where(place == last, rank, 0), 0)
        of_end = tl.sum(tl.where(place == size - 1, rank, 0), 0)
        may_go_on = (size == NUCLEUS) & (V > NUCLEUS) & (of_last == of_end)
        is_whole = (top_k > 0) | ((pool_weight >= limit) & ~may_go_on)
    weight = tl.sum(tl.where(place == last, sums, 0), 0)
    target = _target_of(_uniform(settings, row, tl.zeros_like(top_k)), weight)
    drawn = tl.minimum(tl.sum((sums <= target).to(tl.int32), 0), last)
    key = tl.sum(tl.where(place == drawn, keys, 0), 0)
    return tl.where(is_whole, (0xFFFFFFFF - (key & 0xFFFFFFFF)).to(tl.int32), -2)


@triton.jit
def _choose_drawn(
    x_row,
    settings,
    row,
    largest,
    weights_row,
    bounds,
    pool_row,
    num_pooled,
    V: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    POOL: tl.constexpr,
    NUCLEUS: tl.constexpr,
):
    """Return the token of a row that draws."""
    index = tl.arange(0, PADDED_CHUNKS)
    total = tl.sum(tl.load(weights_row + index, mask=index < NUM_CHUNKS, other=0), 0)
    top_k = _option(settings, row, TOP_K)
    token = tl.zeros_like(top_k) - 2
    number = _uniform(settings, row, tl.zeros_like(top_k))
    none = float("-inf")
    if (top_k == 0) & (_option(settings, row, TAKES_ALL) != 0):
        token = _draw(
            x_row, settings, row, weights_row, total, number, largest, none, V, V, NUM_CHUNKS, PADDED_CHUNKS, CHUNK
        )
    else:
        pooled = tl.load(num_pooled + row)
        if pooled > POOL:
            pooled = tl.where(top_k > 0, top_k, NUCLEUS)
            _recollect(x_row, pool_row, tl.load(bounds + row), largest, pooled, V, NUM_CHUNKS, CHUNK)
        token = _draw_from_pool(settings, row, pool_row, pooled, total, largest, V, POOL, NUCLEUS)
    if token == -2:
        limit = _limit_of(settings, row, total)
        token = _draw_by_trial(
            x_row, settings, row, weights_row, total, limit, largest, V, NUM_CHUNKS, PADDED_CHUNKS, CHUNK
        )
    return token


@triton.jit
def choose(
    logits,
    settings,
    chunk_maxima,
    chunk_weights,
    bounds,
    pool,
    num_pooled,
    tokens,
    last_tokens,
    V: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    POOL: tl.constexpr,
    NUCLEUS: tl.constexpr,
):
    """Choose the token of a row, -1 if its logits leave no choice, and keep it for the next step. Grid: (S,).

    Mutates: chunk_weights, pool.
    """
    row = tl.program_id(0).to(tl.int64)
    target = _option(settings, row, TARGET)
    if target >= 0:
        x_row = _row_of(logits, settings, row, V)
        largest, values = _largest(chunk_maxima, row, NUM_CHUNKS, PADDED_CHUNKS)
        token = tl.zeros_like(target) - 1
        if largest - largest == 0.0:  # finite
            if _float_option(settings, row, TEMPERATURE) == 0.0:
                first = tl.min(tl.where(values == largest, tl.arange(0, PADDED_CHUNKS), NUM_CHUNKS), 0)
                at, x = _load_chunk(x_row, first, V, CHUNK)
                token = tl.min(tl.where(x == largest, at, _NO_ID), 0)
            else:
                token = _choose_drawn(
                    x_row,
                    settings,
                    row,
                    largest,
                    chunk_weights + row * NUM_CHUNKS,
                    bounds,
                    pool + row * POOL,
                    num_pooled,
                    V,
                    NUM_CHUNKS,
                    PADDED_CHUNKS,
                    CHUNK,
                    POOL,
                    NUCLEUS,
                )
        tl.store(tokens + row, token)
        tl.store(last_tokens + target, token)
