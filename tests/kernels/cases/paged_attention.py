"""Cases of `kernels/paged_attention.py`: mixed steps over a pool that holds NaN wherever no token lies."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from quire.kernels.paged_attention import paged_attention, write_kv
from quire.lazy_torch import Tensor, functional, torch
from tests.kernels.case import Arguments, Check, random


def make_arguments(
    requests: Sequence[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 64,
    window: int | None = None,
    block_size: int = 8,
    padding: int = 0,
    soft_cap: float | None = None,
    has_sinks: bool = False,
) -> Arguments:
    """Make a step of `requests`, each (new tokens, tokens before), decodes first.

    Blocks are drawn at random from the pool, the largest id among them, and block tables are padded with block 0.
    `padding`: further values at the end of each page of the pool, as other groups' layers leave them.
    """
    requests = sorted(requests, key=lambda request: request[0] > 1)
    seq_lens = [new + before for new, before in requests]
    counts = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(counts) + 3
    ids = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(5)) + 1
    if counts:
        swapped = int((ids == num_blocks - 1).nonzero())
        ids[swapped], ids[0] = int(ids[0]), num_blocks - 1
    table = torch.zeros(len(requests), max(counts, default=1), dtype=torch.int32)
    layer_size = 2 * block_size * kv_heads * head_size
    pool = torch.full((num_blocks, 2 * layer_size + padding), torch.nan)
    kv_cache = pool[:, layer_size : 2 * layer_size].view(num_blocks, 2, block_size, kv_heads, head_size)
    for request, (seq_len, count) in enumerate(zip(seq_lens, counts, strict=True)):
        table[request, :count] = ids[:count]
        ids = ids[count:]
        visible_from = 0 if window is None else max(0, requests[request][1] - window + 1)
        positions = torch.arange(visible_from, seq_len)
        values = random(seq_len, 2, kv_heads, head_size, seed=request)
        kv_cache[table[request].long()[positions // block_size], :, positions % block_size] = values[visible_from:]
    q = random(sum(new for new, _ in requests), heads + 1, head_size, seed=9)[:, :heads]
    step = SimpleNamespace(
        block_tables=(table,), query_lens_list=tuple(new for new, _ in requests), seq_lens_list=tuple(seq_lens)
    )
    return {
        "q": q, "kv_cache": kv_cache, "step": step, "group_index": 0, "scale": head_size**-0.5, "window": window,
        "soft_cap": soft_cap, "sinks": random(heads, seed=4, scale=2.0) if has_sinks else None,
    }  # fmt: skip


def _formula(
    q: Any, kv_cache: Any, step: Any, group_index: int, scale: float, window: Any, soft_cap: Any, sinks: Any
) -> Any:
    """Softmax attention per request, with all keys of the request gathered, and repeated per query head."""
    block_size, kv_heads = kv_cache.shape[2:4]
    outs = [q[:0]]
    for request, (query_len, seq_len) in enumerate(zip(step.query_lens_list, step.seq_lens_list, strict=True)):
        positions = torch.arange(seq_len, device=q.device)
        blocks = step.block_tables[group_index][request].long()[positions // block_size]
        kv = kv_cache[blocks, :, positions % block_size].to(q.dtype).nan_to_num()
        k, v = kv.repeat_interleave(q.shape[1] // kv_heads, 2).permute(1, 2, 0, 3)  # [H, S, D]
        done = sum(map(len, outs))
        scores = q[done : done + query_len].transpose(0, 1) @ k.transpose(1, 2) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = positions[seq_len - query_len :, None] - positions
        hidden = (distance < 0) | (distance >= (window or seq_len + 1))
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, query_len, 1)], -1)
        outs.append((functional.softmax(scores, -1)[..., :seq_len] @ v).transpose(0, 1))
    return torch.cat(outs)


DECODES = [(1, 0), (1, 6), (1, 7), (1, 8), (1, 40), (1, 22)]
MIXED = [(1, 30), (5, 0), (3, 17), (1, 2), (12, 9)]

CASES = {
    "empty": partial(make_arguments, []),
    "decodes": partial(make_arguments, DECODES),
    "prompt longer than a tile": partial(make_arguments, [(300, 0)]),
    "chunk after a prefix, longer than a tile": partial(make_arguments, [(270, 35)]),
    "sliding window": partial(make_arguments, MIXED, window=7),
    "sliding window of one": partial(make_arguments, MIXED, window=1),
    "sliding window shorter than a tile": partial(make_arguments, [(300, 20), (1, 300)], window=50),
    "sliding window longer than a tile": partial(make_arguments, [(300, 100), (1, 400)], window=280),
    "scores capped": partial(make_arguments, MIXED, soft_cap=0.7),
    "sinks": partial(make_arguments, MIXED, has_sinks=True),
    "pages that are not whole rows": partial(make_arguments, MIXED, padding=10),
    "block size 1": partial(make_arguments, MIXED, block_size=1),
    "head size 80": partial(make_arguments, MIXED, head_size=80),
    "multi-head": partial(make_arguments, MIXED, heads=3, kv_heads=3),
    "group of 7": partial(make_arguments, MIXED, heads=14, kv_heads=2),
    "one KV head": partial(make_arguments, MIXED, heads=8, kv_heads=1),
}


def _write_formula(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    for token, slot in enumerate(slot_mapping.tolist()):
        kv_cache[slot // kv_cache.shape[2], :, slot % kv_cache.shape[2]] = torch.stack((k[token], v[token]))


def _make_write(
    num_tokens: int, *, kv_heads: int = 3, head_size: int = 64, padding: int = 0, last: bool = False
) -> Arguments:
    """The second layer's view of a block-major pool of NaN; `padding`: further values at the end of each block."""
    num_blocks, block_size = 11, 8
    layer_size = 2 * block_size * kv_heads * head_size
    pool = torch.full((num_blocks, 2 * layer_size + padding), torch.nan)
    view = pool[:, layer_size : 2 * layer_size].view(num_blocks, 2, block_size, kv_heads, head_size)
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(3))
    slots = slots.sort().values[-num_tokens:] if last else slots[:num_tokens]
    fused = random(num_tokens, 2 * kv_heads + 1, head_size)
    return {"k": fused[:, :kv_heads], "v": fused[:, kv_heads:-1], "kv_cache": view, "slot_mapping": slots}


CHECKS = (
    Check(
        write_kv,
        _write_formula,
        {
            "empty": partial(_make_write, 0),
            "one token": partial(_make_write, 1),
            "scattered slots": partial(_make_write, 37),
            "largest block id": partial(_make_write, 5, last=True),
            "pages that are not whole rows": partial(_make_write, 9, kv_heads=1, head_size=80, padding=10),
        },
        mutated="kv_cache",
    ),
    Check(paged_attention, _formula, CASES),
)
