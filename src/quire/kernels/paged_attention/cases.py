"""Inputs for every version of paged attention: mixed steps over a pool that holds NaN wherever no token lies."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from quire.kernels.case import Arguments, Case, Check, random
from quire.kernels.paged_attention import KERNEL
from quire.kernels.paged_attention.step import AttentionStep


@dataclass
class CaseStep:
    """A minimal `AttentionStep`."""

    block_tables: tuple[torch.Tensor, ...]
    query_lens_list: tuple[int, ...]
    seq_lens_list: tuple[int, ...]


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
        values = random(seq_len, 2, kv_heads, head_size, seed=request)
        for position in range(visible_from, seq_len):
            block = int(table[request, position // block_size])
            kv_cache[block, :, position % block_size] = values[position]
    num_tokens = sum(new for new, _ in requests)
    step = CaseStep((table,), tuple(new for new, _ in requests), tuple(seq_lens))
    return {
        "q": random(num_tokens, heads + 1, head_size, seed=9)[:, :heads],
        "kv_cache": kv_cache,
        "step": step,
        "group_index": 0,
        "scale": head_size**-0.5,
        "window": window,
        "soft_cap": soft_cap,
    }


def plain(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    step: AttentionStep,
    group_index: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """Softmax attention per request with all keys of the request gathered and repeated, in q's own dtype."""
    block_size, kv_heads = kv_cache.shape[2:4]
    outs: list[torch.Tensor] = []
    for request, (query_len, seq_len) in enumerate(zip(step.query_lens_list, step.seq_lens_list, strict=True)):
        positions = torch.arange(seq_len, device=q.device)
        blocks = step.block_tables[group_index][request].long()[positions // block_size]
        kv = kv_cache[blocks, :, positions % block_size].to(q.dtype).nan_to_num()
        k, v = kv.repeat_interleave(q.shape[1] // kv_heads, 2).permute(1, 2, 0, 3)  # [H, S, D]
        done = sum(out.shape[0] for out in outs)
        scores = q[done : done + query_len].transpose(0, 1) @ k.transpose(1, 2) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = positions[seq_len - query_len :, None] - positions
        hidden = (distance < 0) | (distance >= (window or seq_len + 1))
        outs.append((functional.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v).transpose(0, 1))
    return torch.cat(outs) if outs else torch.empty_like(q)


DECODES = [(1, 0), (1, 6), (1, 7), (1, 8), (1, 40), (1, 22)]
MIXED = [(1, 30), (5, 0), (3, 17), (1, 2), (12, 9)]

CASES = (
    Case("empty", lambda: make_arguments([])),
    Case("one token", lambda: make_arguments([(1, 0)])),
    Case("decodes", lambda: make_arguments(DECODES)),
    Case("equal decodes", lambda: make_arguments([(1, 19)] * 3)),
    Case("prompt", lambda: make_arguments([(23, 0)])),
    Case("prompt longer than a tile", lambda: make_arguments([(300, 0)])),
    Case("chunk after a prefix, longer than a tile", lambda: make_arguments([(270, 35)])),
    Case("mixed", lambda: make_arguments(MIXED)),
    Case("sliding window", lambda: make_arguments(MIXED, window=7)),
    Case("sliding window of one", lambda: make_arguments(MIXED, window=1)),
    Case("sliding window shorter than a tile", lambda: make_arguments([(300, 20), (1, 300)], window=50)),
    Case("sliding window longer than a tile", lambda: make_arguments([(300, 100), (1, 400)], window=280)),
    Case("scores capped", lambda: make_arguments(MIXED, soft_cap=0.7)),
    Case("pages that are not whole rows", lambda: make_arguments(MIXED, padding=10)),
    Case("block size 1", lambda: make_arguments(MIXED, block_size=1)),
    *(
        Case(f"head size {size}", lambda size=size: make_arguments(MIXED, head_size=size))  # type: ignore[misc]
        for size in (16, 80, 96, 128, 256)
    ),
    *(
        Case(name, lambda heads=heads: make_arguments(MIXED, heads=heads[0], kv_heads=heads[1]))  # type: ignore[misc]
        for name, heads in {
            "multi-head": (3, 3),
            "group of 3": (6, 2),
            "group of 7": (14, 2),
            "one KV head": (8, 1),
        }.items()
    ),
)

CHECKS = (Check(KERNEL, CASES, plain),)
