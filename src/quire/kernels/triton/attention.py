"""Paged attention of a mixed step: one kernel for prompts and decodes, a merge of splits, and their work lists.

The unit of work is an item: a request, its first query token, a range of keys. Prompts have one item per tile of
queries, which attends to all its keys. Requests of few new tokens (decodes, or drafts) have one per split of their
keys. Where a request is split depends on its own length alone, and splits are merged in ascending order: its result
has the same bits in every batch. Programs take items in turn, so that their number does not depend on the step.
Next to read: `runtime/device/triton_ops.py`, which launches these.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def split_keys(
    start, end, WINDOW: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, DOUBLINGS: tl.constexpr
):
    """Return how the keys of a request are split: keys per split, the first split, and the number of splits.

    `start`, `end`: positions of its new tokens. There are at most MAX_SPLITS splits, of SPLIT keys or twice, four times
    … as many.
    """
    low = tl.maximum(start - WINDOW + 1, 0) if WINDOW else start * 0
    length = start * 0 + SPLIT
    for _ in tl.static_range(DOUBLINGS):
        length = tl.where(end - low > length * (MAX_SPLITS - 1), length * 2, length)
    first = low // length
    return length, first, (end + length - 1) // length - first


@triton.jit
def plan_items(
    starts,
    counts,
    item_request,
    item_index,
    first_part,
    num_splits,
    tile_request,
    tile_query,
    num_tiles,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the work lists of a step. Grid: R programs; each writes the items of its own request.

    Shapes: starts, counts [R]; item_request, item_index [items]; first_part, num_splits [R + 1], whose last entry is
        the total number of items; tile_request, tile_query [tiles]; num_tiles [1]. Dtypes: int32.
    """
    request = tl.program_id(0)
    every = tl.arange(0, R_PAD)
    count = tl.load(counts + every, mask=every < R, other=0)
    start = tl.load(starts + every, mask=every < R, other=0)
    _, low, splits = split_keys(start, start + count, WINDOW, SPLIT, MAX_SPLITS, DOUBLINGS)
    splits = tl.where((count > 0) & (count <= MAX_QUERIES), splits, 0)
    tiles = tl.where(count > MAX_QUERIES, (count + TILE_QUERIES - 1) // TILE_QUERIES, 0)
    before = tl.sum(tl.where(every < request, splits, 0))
    own = tl.sum(tl.where(every == request, splits, 0))
    own_low = tl.sum(tl.where(every == request, low, 0))
    # Each new token of a split has a place of its own in the memory of partial results.
    tl.store(first_part + request, tl.sum(tl.where(every < request, splits * count, 0)))
    tl.store(num_splits + request, own)
    for begin in range(0, own, CHUNK):
        index = begin + tl.arange(0, CHUNK)
        tl.store(item_request + before + index, tl.zeros_like(index) + request, mask=index < own)
        tl.store(item_index + before + index, own_low + index, mask=index < own)
    before_tiles = tl.sum(tl.where(every < request, tiles, 0))
    own_tiles = tl.sum(tl.where(every == request, tiles, 0))
    for begin in range(0, own_tiles, CHUNK):
        index = begin + tl.arange(0, CHUNK)
        # The last tile of a prompt has the most keys: it goes first.
        tl.store(tile_request + before_tiles + index, tl.zeros_like(index) + request, mask=index < own_tiles)
        tl.store(tile_query + before_tiles + index, (own_tiles - 1 - index) * TILE_QUERIES, mask=index < own_tiles)
    if request == 0:
        tl.store(num_splits + R, tl.sum(splits))
        tl.store(num_tiles, tl.sum(tiles))


@triton.jit
def _attend_tile(
    q,
    best,
    total,
    acc,
    kv,
    table,
    key0,
    low,
    high,
    position,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    PLANE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return the online softmax, in base 2, behind one more tile of keys. `kv`: of this head."""
    key = key0 + tl.arange(0, TILE)
    dims = tl.arange(0, D_PAD)
    inside = (key >= low) & (key < high)
    # Masked, not clamped: a table is read only where it is filled, and the pool only where it is written.
    block = tl.load(table + key // BLOCK, mask=inside, other=0) if MASKED else tl.load(table + key // BLOCK)
    at = block.to(tl.int64) * BLOCK_STRIDE + (key % BLOCK) * TOKEN_STRIDE
    if MASKED or D != D_PAD:
        k = tl.load(kv + at[None, :] + dims[:, None], mask=inside[None, :] & (dims < D)[:, None], other=0.0)
        v = tl.load(
            kv + PLANE_STRIDE + at[:, None] + dims[None, :], mask=inside[:, None] & (dims < D)[None, :], other=0.0
        )
    else:
        k = tl.load(kv + at[None, :] + dims[:, None])
        v = tl.load(kv + PLANE_STRIDE + at[:, None] + dims[None, :])
    score = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if SOFT_CAP != 0.0:
        # cap · tanh(s / cap), with tanh(x) = 1 - 2 / (e^2x + 1).
        score = SOFT_CAP * (1.0 - 2.0 / (tl.exp2(score * (SCALE * 2.0 / SOFT_CAP * LOG2E)) + 1.0)) * LOG2E
    else:
        score *= SCALE * LOG2E
    if MASKED:
        seen = inside[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
    new_best = tl.maximum(best, tl.max(score, 1))
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)
    weight = tl.exp2(score - safe[:, None])
    decay = tl.exp2(best - safe)
    total = total * decay + tl.sum(weight, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
    return new_best, total, acc


@triton.jit
def attend(
    q,
    out,
    part,
    part_sums,
    kv,
    table,
    rows,
    starts,
    counts,
    first_rows,
    item_request,
    item_at,
    num_items,
    first_part,
    sinks,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    PLANE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ALONE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend the queries of each item to its keys. Grid: (any number of programs, K). SPLIT 0: of prompts.

    ALONE: the step has one request, whose items need no list.
    A program has ROWS rows: row i is query token i // G of its item and head i % G of the KV head's G heads.

    Shapes: q, out [T, H, D], strided over T; part [parts, H, D]; part_sums [parts, H, 2]: the base-2 maximum and sum;
        kv [N, 2, B, K, D], strided; table [requests, TABLE_STRIDE]; rows, starts, counts, first_rows [R]; item_request,
        item_at [items]: the split's index or the first query token; sinks [H].
    Dtypes: q any; part, part_sums, sinks fp32; products are of out's type, with fp32 sums.
    Mutates: out, or part and part_sums.
    """
    G: tl.constexpr = H // K
    TOKENS: tl.constexpr = MAX_QUERIES if SPLIT else ROWS // G
    head = tl.program_id(1)
    if ALONE:
        # These are older than the kernel before.
        row, start, count, first = tl.load(rows), tl.load(starts), tl.load(counts), tl.load(first_rows)
        _, first_split, total_items = split_keys(start, start + count, WINDOW, SPLIT, MAX_SPLITS, DOUBLINGS)
    else:
        total_items = tl.load(num_items)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.arange(0, ROWS)
    dims = tl.arange(0, D_PAD)
    of_head = head * G + index % G
    for item in range(tl.program_id(0), total_items, tl.num_programs(0)):
        if ALONE:
            at, part0 = first_split + item, 0
        else:
            request = tl.load(item_request + item)
            at, part0 = tl.load(item_at + item), tl.load(first_part + request)
            row, start = tl.load(rows + request), tl.load(starts + request)
            count, first = tl.load(counts + request), tl.load(first_rows + request)
        query0 = 0 if SPLIT else at
        token = query0 + index // G
        is_row = (index < TOKENS * G) & (token < count)
        position = start + token
        q_at = (first + token).to(tl.int64)[:, None] * Q_STRIDE + of_head[:, None] * D + dims[None, :]
        queries = tl.load(q + q_at, mask=is_row[:, None] & (dims < D)[None, :], other=0.0).to(out.dtype.element_ty)
        own_table = table + row.to(tl.int64) * TABLE_STRIDE
        low = tl.maximum(0, start + query0 - WINDOW + 1) if WINDOW else start * 0
        high = start + tl.minimum(count, query0 + TOKENS)
        if SPLIT:
            length, first_split_of, splits = split_keys(start, start + count, WINDOW, SPLIT, MAX_SPLITS, DOUBLINGS)
            split = at - first_split_of
            is_part = index + splits > index + 1
            low = tl.maximum(low, at * length)
            high = tl.minimum(high, at * length + length)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D_PAD], tl.float32)
        begin = low // TILE * TILE
        # Tiles that every row sees whole need no mask: those up to the first query, if no window cuts them.
        whole = begin if WINDOW else tl.maximum(begin, tl.minimum(start + query0 + 1, high) // TILE * TILE)
        own_kv = kv + head * HEAD_STRIDE
        for key0 in range(begin, whole, TILE):
            best, total, acc = _attend_tile(
                queries,
                best,
                total,
                acc,
                own_kv,
                own_table,
                key0,
                low,
                high,
                position,
                SCALE,
                SOFT_CAP,
                D,
                D_PAD,
                BLOCK,
                BLOCK_STRIDE,
                PLANE_STRIDE,
                TOKEN_STRIDE,
                TILE,
                WINDOW,
                False,
            )
        for key0 in range(whole, high, TILE):
            best, total, acc = _attend_tile(
                queries,
                best,
                total,
                acc,
                own_kv,
                own_table,
                key0,
                low,
                high,
                position,
                SCALE,
                SOFT_CAP,
                D,
                D_PAD,
                BLOCK,
                BLOCK_STRIDE,
                PLANE_STRIDE,
                TOKEN_STRIDE,
                TILE,
                WINDOW,
                True,
            )
        is_whole = is_row
        if SPLIT:
            stored = is_row & is_part
            is_whole = is_row & ~is_part
            part_at = ((part0 + split * count + token) * H).to(tl.int64) + of_head
            tl.store(part + part_at[:, None] * D + dims[None, :], acc, mask=stored[:, None] & (dims < D)[None, :])
            tl.store(part_sums + part_at * 2, best, mask=stored)
            tl.store(part_sums + part_at * 2 + 1, total, mask=stored)
        if HAS_SINKS:
            total += tl.exp2(tl.load(sinks + of_head) * LOG2E - best)
        out_at = (first + token).to(tl.int64)[:, None] * OUT_STRIDE + of_head[:, None] * D + dims[None, :]
        # Rows beyond the item's tokens have seen no key.
        value = acc / tl.where(is_whole, total, 1.0)[:, None]
        tl.store(out + out_at, value.to(out.dtype.element_ty), mask=is_whole[:, None] & (dims < D)[None, :])


@triton.jit
def merge_splits(
    out,
    part,
    part_sums,
    starts,
    counts,
    first_rows,
    first_part,
    num_splits,
    sinks,
    H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    WAYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ALONE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the splits of each request, WAYS at a time, in ascending order. Grid: (R, ceil(H / HEADS)).

    What has one split is written by `attend`. Shapes: see there.
    """
    request = tl.program_id(0)
    count, first = tl.load(counts + request), tl.load(first_rows + request)
    if ALONE:
        start, before = tl.load(starts), 0
        _, _, own = split_keys(start, start + count, WINDOW, SPLIT, MAX_SPLITS, DOUBLINGS)
    else:
        own, before = tl.load(num_splits + request), tl.load(first_part + request)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, D_PAD)
    real = (head < H)[:, None] & (dims < D)[None, :]
    if own > 1:
        for token in range(0, count):
            best = tl.full([HEADS], float("-inf"), tl.float32)
            total = tl.zeros([HEADS], tl.float32)
            acc = tl.zeros([HEADS, D_PAD], tl.float32)
            for begin in range(0, own, WAYS):
                way = begin + tl.arange(0, WAYS)
                at = (before + way * count + token).to(tl.int64)[:, None] * H + head[None, :]
                inside = (way < own)[:, None] & (head < H)[None, :]
                bests = tl.load(part_sums + at * 2, mask=inside, other=float("-inf"))
                sums = tl.load(part_sums + at * 2 + 1, mask=inside, other=0.0)
                values = tl.load(
                    part + at[:, :, None] * D + dims[None, None, :],
                    mask=inside[:, :, None] & (dims < D)[None, None, :],
                    other=0.0,
                )
                new_best = tl.maximum(best, tl.max(bests, 0))
                # A draft's later tokens may see keys of a split of which its first token sees none.
                weights = tl.where(bests == float("-inf"), 0.0, tl.exp2(bests - new_best[None, :]))
                decay = tl.where(best == float("-inf"), 0.0, tl.exp2(best - new_best))
                total = total * decay + tl.sum(sums * weights, 0)
                acc = acc * decay[:, None] + tl.sum(values * weights[:, :, None], 0)
                best = new_best
            if HAS_SINKS:
                total += tl.exp2(tl.load(sinks + head, mask=head < H, other=0.0) * LOG2E - best)
            at_out = (first + token).to(tl.int64) * OUT_STRIDE + head[:, None] * D + dims[None, :]
            # Heads beyond the last one have no sums.
            value = acc / tl.where(head < H, total, 1.0)[:, None]
            tl.store(out + at_out, value.to(out.dtype.element_ty), mask=real)
