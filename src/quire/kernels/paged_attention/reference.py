"""Attention request by request in fp32 (fp64 for fp64 input): the definition, and what runs op by op.

Plans have native attention, several times as fast. Next to read: `native/ops/attend.h`.
"""

import torch

from quire.kernels.paged_attention.step import AttentionStep

QUERY_TILE = 256
"""Most queries of one product: bounds the memory of the scores to QUERY_TILE · H · P values."""


def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    step: AttentionStep,
    group_index: int,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """See `kernels.paged_attention.paged_attention`."""
    block_size, num_kv_heads = kv_cache.shape[2:4]
    num_tokens, num_heads, head_size = q.shape
    queries = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_size)  # [T, K, G, D]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty(queries.shape, dtype=q.dtype, device=q.device)
    token = 0
    for request, (query_len, seq_len) in enumerate(zip(step.query_lens_list, step.seq_lens_list, strict=True)):
        for tile in range(seq_len - query_len, seq_len, QUERY_TILE):
            end = min(tile + QUERY_TILE, seq_len)
            first = 0 if window is None else max(0, tile - window + 1)
            keys = torch.arange(first, end, device=q.device)  # positions attended to, [P]
            blocks = step.block_tables[group_index][request, keys // block_size].long()
            k, v = kv_cache[blocks, :, keys % block_size].to(wide).unbind(1)  # [P, K, D]
            rows = slice(token, token + end - tile)
            scores = scale * torch.einsum("tkgd,pkd->kgtp", queries[rows].to(wide), k)
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            distance = torch.arange(tile, end, device=q.device)[:, None] - keys
            hidden = (distance < 0) | (distance >= (window or end + 1))
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[rows] = torch.einsum("kgtp,pkd->tkgd", weights, v).to(q.dtype)
            token += end - tile
    return out.view(q.shape)
