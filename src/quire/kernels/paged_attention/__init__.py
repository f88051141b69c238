"""Attention of new tokens to their own request's cached keys.

Next to read: `reference.py`, then `instructions.py` for plans.
"""

import torch

from quire.kernels.paged_attention import instructions, reference
from quire.kernels.paged_attention.step import AttentionStep
from quire.kernels.registry import Kernel

__all__ = ["KERNEL", "instructions", "paged_attention"]
KERNEL = Kernel(
    "paged_attention",
    "paged_attention",
    {"reference": reference.paged_attention},
    preferred={"*": "reference"},
)


def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    step: AttentionStep,
    group_index: int,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attend each query to the keys of its request at its own and earlier positions.

    out[t, h] = softmax(scale · q[t, h] @ K[first…p].T) @ V[first…p], with p the position of token t, K and V of KV
    head h // (H / K), and first = max(0, p - window + 1).     (Vaswani 2017 eq. 1; paging: Kwon 2023 sec. 4)
    With a `soft_cap`, a score s becomes soft_cap · tanh(s / soft_cap).     (Gemma 2, sec. 2)

    Request r's token at position p lies at kv_cache[block_tables[group_index][r, p // B], :, p % B]. Its new tokens
    are the last ones, and are written already. No other keys are read: the rest of the pool may hold NaN.

    Shapes: q [T, H, D] (may be strided over T); kv_cache [N, 2, B, K, D] (may be strided over N) -> [T, H, D].
    Dtypes: q bf16, fp16 or fp32; kv_cache any of these; sums in fp32; returns q.dtype.
    Units: window in tokens, the query's own included; None attends to everything before.
    """
    return KERNEL.on(q.device.type)(q, kv_cache, step, group_index, scale, window, soft_cap)
