"""Attention of new tokens to their own request's cached keys. Next to read: `instructions.py`, for plans."""

from typing import Protocol

from quire.kernels.paged_attention import instructions
from quire.kernels.registry import kernel
from quire.lazy_torch import Tensor, torch

__all__ = ["AttentionStep", "instructions", "paged_attention"]
QUERY_TILE = 256
"""Most queries of one product: bounds the memory of the scores to QUERY_TILE · H · P values."""


class AttentionStep(Protocol):
    """The part of `layers.forward_batch.ForwardBatch` that attention reads: this folder may not import that one."""

    block_tables: tuple[Tensor, ...]
    query_lens_list: tuple[int, ...]
    seq_lens_list: tuple[int, ...]


@kernel.with_traits(takes_in=("rope", "rms_norm"))
def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    step: AttentionStep,
    group_index: int,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend each query to the keys of its request at its own and earlier positions.

    out[t, h] = softmax(scale · q[t, h] @ K[first…p].T) @ V[first…p], with p the position of token t, K and V of KV
    head h // (H / K), and first = max(0, p - window + 1).     (Vaswani 2017 eq. 1; paging: Kwon 2023 sec. 4)
    With a `soft_cap`, a score s becomes soft_cap · tanh(s / soft_cap).     (Gemma 2, sec. 2)

    With `sinks`, e^sinks[h] is added to the sum that the softmax divides by.     (Xiao 2024; gpt-oss)

    Request r's token at position p lies at kv_cache[block_tables[group_index][r, p // B], :, p % B]. Its new tokens
    are the last ones, and are written already. No other keys are read: the rest of the pool may hold NaN.

    Shapes: q [T, H, D] (may be strided over T); kv_cache [N, 2, B, K, D] (may be strided over N); sinks [H] or None
    -> [T, H, D].
    Dtypes: q bf16, fp16 or fp32; kv_cache any of these; sums in fp32; returns q.dtype.
    Units: window in tokens, the query's own included; None attends to everything before.
    """
    block_size, num_kv_heads = kv_cache.shape[2:4]
    num_tokens, num_heads, head_size = q.shape
    queries = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_size)  # [T, K, G, D]
    out = torch.empty(queries.shape, dtype=q.dtype, device=q.device)
    token = 0
    for request, (query_len, seq_len) in enumerate(zip(step.query_lens_list, step.seq_lens_list, strict=True)):
        for tile in range(seq_len - query_len, seq_len, QUERY_TILE):
            end = min(tile + QUERY_TILE, seq_len)
            first = 0 if window is None else max(0, tile - window + 1)
            keys = torch.arange(first, end, device=q.device)  # positions attended to, [P]
            blocks = step.block_tables[group_index][request, keys // block_size].long()
            k, v = kv_cache[blocks, :, keys % block_size].float().unbind(1)  # [P, K, D]
            rows = slice(token, token + end - tile)
            scores = scale * torch.einsum("tkgd,pkd->kgtp", queries[rows].float(), k)
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            distance = torch.arange(tile, end, device=q.device)[:, None] - keys
            hidden = (distance < 0) | (distance >= (window or end + 1))
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                shape = (num_kv_heads, num_heads // num_kv_heads, end - tile, 1)
                scores = torch.cat([scores, sinks.float().view(*shape[:2], 1, 1).expand(shape)], -1)
            weights = scores.softmax(-1)[..., : len(keys)]
            out[rows] = torch.einsum("kgtp,pkd->tkgd", weights, v).to(q.dtype)
            token += end - tile
    return out.view(q.shape)
