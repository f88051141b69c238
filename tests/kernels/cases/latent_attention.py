"""Cases of `kernels/latent_attention.py`, and the formulas that it must equal."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from quire.kernels.latent_attention import latent_attention, write_latent
from quire.lazy_torch import Tensor, functional, torch
from tests.kernels.case import Arguments, Check, random


def _write_formula(latent: Tensor, rotary: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    for token, slot in enumerate(slot_mapping.tolist()):
        kv_cache[slot // kv_cache.shape[1], slot % kv_cache.shape[1]] = torch.cat((latent[token], rotary[token, 0]))


def _formula(q: Any, up: Any, kv_cache: Any, step: Any, group_index: int, rotary_size: int, scale: float) -> Any:
    """The plain form, token by token and head by head."""
    num_heads, rank = q.shape[1], up.shape[1]
    rows = up.view(num_heads, -1, rank)
    out = q.new_empty(*q.shape[:2], rows.shape[1] - q.shape[2] + rotary_size)
    token = 0
    for request, (query_len, seq_len) in enumerate(zip(step.query_lens_list, step.seq_lens_list, strict=True)):
        for position in range(seq_len - query_len, seq_len):
            seen = torch.arange(position + 1)
            blocks = step.block_tables[group_index][request].long()[seen // kv_cache.shape[1]]
            entries = kv_cache[blocks, seen % kv_cache.shape[1]].to(q.dtype)
            for head in range(num_heads):
                keys, values = (entries[:, :rank] @ rows[head].T).split((q.shape[2] - rotary_size, out.shape[2]), 1)
                scores = q[token, head] @ torch.cat((entries[:, rank:], keys), 1).T
                out[token, head] = functional.softmax(scale * scores, -1) @ values
            token += 1
    return out


def make_arguments(
    requests: Sequence[tuple[int, int]],
    *,
    heads: int = 3,
    rank: int = 32,
    rotary: int = 8,
    nope: int = 16,
    value: int = 16,
    block_size: int = 8,
) -> Arguments:
    """Make a step of `requests`, each (new tokens, tokens before), over a pool that holds NaN where no token lies."""
    seq_lens = [new + before for new, before in requests]
    counts = [-(-length // block_size) for length in seq_lens]
    ids = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(5)) + 1
    table = torch.zeros(len(requests), max(counts, default=1), dtype=torch.int32)
    pool = torch.full((sum(counts) + 3, 2, block_size, rank + rotary), torch.nan)
    kv_cache = pool[:, 1]  # the second layer's
    for request, (seq_len, count) in enumerate(zip(seq_lens, counts, strict=True)):
        table[request, :count] = ids[:count]
        ids = ids[count:]
        positions = torch.arange(seq_len)
        entries = random(seq_len, rank + rotary, seed=request)
        kv_cache[table[request].long()[positions // block_size], positions % block_size] = entries
    step = SimpleNamespace(
        block_tables=(table,), query_lens_list=tuple(new for new, _ in requests), seq_lens_list=tuple(seq_lens)
    )
    up = random(heads * (nope + value), rank, seed=7, scale=rank**-0.5)
    return {
        "q": random(sum(new for new, _ in requests), heads, rotary + nope, seed=9), "up": up, "kv_cache": kv_cache,
        "step": step, "group_index": 0, "rotary_size": rotary, "scale": (rotary + nope) ** -0.5,
    }  # fmt: skip


def _make_write(num_tokens: int) -> Arguments:
    slots = torch.randperm(88, generator=torch.Generator().manual_seed(3))[:num_tokens]
    cache = torch.full((11, 2, 8, 40), torch.nan)[:, 1]
    return {
        "latent": random(num_tokens, 32), "rotary": random(num_tokens, 1, 8, seed=1), "kv_cache": cache,
        "slot_mapping": slots,
    }  # fmt: skip


MIXED = [(1, 30), (50, 0), (3, 17), (1, 0), (40, 9)]


CHECKS = (
    Check(
        write_latent,
        _write_formula,
        {"empty": partial(_make_write, 0), "one token": partial(_make_write, 1), "more": partial(_make_write, 37)},
        mutated="kv_cache",
    ),
    Check(
        latent_attention,
        _formula,
        {
            "empty": partial(make_arguments, []),
            "decodes": partial(make_arguments, [(1, 0), (1, 7), (1, 8), (1, 200)]),
            "prompts and decodes": partial(make_arguments, MIXED),
            "odd sizes": partial(make_arguments, MIXED, rank=22, rotary=6, nope=5, value=9, heads=2),
            "absorbed only": partial(make_arguments, MIXED, rank=16, nope=16, value=16),
            "longer than a tile": partial(make_arguments, [(300, 20)], block_size=16),
        },
    ),
)
