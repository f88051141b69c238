"""Inputs for every version of `write_kv`."""

import torch

from quire.kernels.case import Arguments, Case, Check, random
from quire.kernels.write_kv import KERNEL


def _make(
    num_tokens: int, *, kv_heads: int = 3, head_size: int = 64, layers: int = 2, padding: int = 0, last: bool = False
) -> Arguments:
    """The second layer's view of a block-major pool of NaN; `padding`: further values at the end of each block."""
    num_blocks, block_size = 11, 8
    layer_size = 2 * block_size * kv_heads * head_size
    pool = torch.full((num_blocks, layers * layer_size + padding), torch.nan)
    view = pool[:, layer_size : 2 * layer_size].view(num_blocks, 2, block_size, kv_heads, head_size)
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(3))[:num_tokens]
    if last:
        slots = torch.arange(num_blocks * block_size - num_tokens, num_blocks * block_size)
    fused = random(num_tokens, 2 * kv_heads + 1, head_size)
    k, v = fused[:, :kv_heads], fused[:, kv_heads : 2 * kv_heads]
    return {"k": k, "v": v, "kv_cache": view, "slot_mapping": slots}


CHECKS = (
    Check(
        KERNEL,
        (
            Case("empty", lambda: _make(0)),
            Case("one token", lambda: _make(1)),
            Case("scattered slots", lambda: _make(37)),
            Case("largest block id", lambda: _make(5, last=True)),
            Case("one KV head of 80", lambda: _make(9, kv_heads=1, head_size=80)),
            Case("pages that are not whole rows", lambda: _make(9, padding=10)),
        ),
        None,
        mutated="kv_cache",
    ),
)
