"""Attention through PyTorch's fused operator: decodes together, prompts in tiles of queries.

Keys and values are gathered token by token: as fast as by whole blocks (0.26 ms for 32 x 200 tokens of 3 heads of 64 in
bf16), and padding can repeat valid tokens, so that memory never written, which may hold NaN, is never read.
Query heads of one KV head are rows of one product, so KV heads are never expanded. What depends only on lengths and
block tables is planned once per step by `plan.py` and shared by all layers.
"""

import torch
from torch.nn import functional

from quire.kernels.cache_rows import as_rows, rows_per_block
from quire.kernels.paged_attention.plan import DecodeBucket, Prefill, plan_attention
from quire.kernels.paged_attention.step import AttentionStep


def paged_attention(
    q: torch.Tensor, kv_cache: torch.Tensor, step: AttentionStep, group_index: int, scale: float, window: int | None
) -> torch.Tensor:
    """See `kernels.paged_attention.paged_attention`."""
    num_kv_heads, head_size = kv_cache.shape[3:]
    key = ("paged_attention", group_index, window, q.dtype, kv_cache.stride(0))
    plan = step.derived.get(key)
    if plan is None:
        plan = step.derived[key] = plan_attention(step, group_index, kv_cache, window, q.dtype)
    queries = q.view(q.shape[0], num_kv_heads, q.shape[1] // num_kv_heads, head_size)  # [T, K, G, D]
    out = torch.empty(queries.shape, dtype=q.dtype, device=q.device)
    for bucket in plan.decodes:
        _attend_decodes(queries, kv_cache, bucket, scale, out)
    for prefill in plan.prefills:
        _attend_prefill(queries, kv_cache, prefill, scale, out)
    return out.view(q.shape)


def _attend_decodes(
    queries: torch.Tensor, kv_cache: torch.Tensor, bucket: DecodeBucket, scale: float, out: torch.Tensor
) -> None:
    """One query of each of r requests, in one call over keys padded to P positions. Mutates: out."""
    num_requests, length = bucket.num_requests, bucket.length
    requests = bucket.requests
    chosen = queries[:num_requests] if requests is None else queries.index_select(0, requests)  # [r, K, G, D]
    kv = _gather(kv_cache, bucket.rows, queries.dtype).view(2, num_requests, length, *kv_cache.shape[3:])
    k, v = kv.transpose(2, 3)  # [r, K, P, D]
    group_size = chosen.shape[2]
    # On CPU, two query rows are 3 times as fast as one, four 20 % faster than three; only in fp32 one is fastest.
    if group_size % 2 and chosen.device.type == "cpu" and (group_size > 1 or chosen.dtype != torch.float32):
        chosen = functional.pad(chosen, (0, 0, 0, 1))
    attended = functional.scaled_dot_product_attention(chosen, k, v, attn_mask=bucket.mask, scale=scale)
    attended = attended[:, :, :group_size]
    if requests is None:
        out[:num_requests] = attended
    else:
        out.index_copy_(0, requests, attended)


def _attend_prefill(
    queries: torch.Tensor, kv_cache: torch.Tensor, prefill: Prefill, scale: float, out: torch.Tensor
) -> None:
    """The new tokens of one request, tile by tile, each with the keys it can see. Mutates: out."""
    num_kv_heads, head_size = kv_cache.shape[3:]
    group_size = queries.shape[2]
    kv = _gather(kv_cache, prefill.rows, queries.dtype).view(2, -1, num_kv_heads, 1, head_size)
    k, v = kv.permute(0, 2, 3, 1, 4).expand(-1, -1, group_size, -1, -1)  # [K, G, P, D], G without memory of its own
    for tile in prefill.tiles:
        attended = functional.scaled_dot_product_attention(
            queries[tile.first_token : tile.end_token].permute(1, 2, 0, 3),  # [K, G, tile, D]
            k[:, :, tile.first_key : tile.end_key],
            v[:, :, tile.first_key : tile.end_key],
            attn_mask=tile.mask,
            scale=scale,
        )
        out[tile.first_token : tile.end_token] = attended.permute(2, 0, 1, 3)


def _gather(kv_cache: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of one token [rows, K·D] of a layer's cache; see `plan.token_rows` for their numbers."""
    block_size = kv_cache.shape[2]
    num_rows = rows_per_block(kv_cache)
    if num_rows is None:
        planes, offsets = rows // block_size, rows % block_size
        return kv_cache[planes // 2, planes % 2, offsets].flatten(1).to(dtype)
    return as_rows(kv_cache, num_rows).flatten(1).index_select(0, rows).to(dtype)
