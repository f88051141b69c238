"""Attention request by request and query by query, in fp32 (fp64 for fp64 input): the definition of correct."""

import torch

from quire.kernels.paged_attention.step import AttentionStep


def paged_attention(
    q: torch.Tensor, kv_cache: torch.Tensor, step: AttentionStep, group_index: int, scale: float, window: int | None
) -> torch.Tensor:
    """See `kernels.paged_attention.paged_attention`."""
    block_size, num_kv_heads = kv_cache.shape[2], kv_cache.shape[3]
    group_size = q.shape[1] // num_kv_heads
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    token = 0
    for request, (query_len, seq_len) in enumerate(zip(step.query_lens_list, step.seq_lens_list, strict=True)):
        block_table = step.block_tables[group_index][request].tolist()
        for position in range(seq_len - query_len, seq_len):
            first = 0 if window is None else max(0, position - window + 1)
            attended = range(first, position + 1)
            kv = torch.stack([kv_cache[block_table[p // block_size], :, p % block_size] for p in attended]).to(wide)
            k, v = kv.repeat_interleave(group_size, dim=2).unbind(1)  # [attended, H, D]
            scores = scale * torch.einsum("hd,phd->hp", q[token].to(wide), k)
            out[token] = torch.einsum("hp,phd->hd", scores.softmax(-1), v).to(q.dtype)
            token += 1
    return out
