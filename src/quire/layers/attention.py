"""`Attention`: write a step's keys and values to the cache, then attend. The same for every model with a KV cache.

The model does projections, norms of heads and rotation. Next to read: `kernels/paged_attention.py`.
"""

from quire import nn
from quire.kernels.paged_attention import paged_attention, write_kv
from quire.layers.forward_batch import ForwardBatch
from quire.lazy_torch import Tensor


class Attention(nn.Module):
    """Paged attention of one layer, or without `k` and `v` to the cache that another layer, `layer_index`, has written.

    Shapes: forward: q [T, H, D]; k, v [T, K, D] or None; sinks [H] or None -> [T, H, D].
    Units: window in tokens, the query's own included; None attends to all earlier tokens.
    Mutates: the layer's slots of the step in batch.kv_caches.
    """

    def __init__(
        self,
        layer_index: int,
        head_size: int,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        """`scale` of the scores: 1 / sqrt(head_size) unless given."""
        super().__init__()
        self.layer_index = layer_index
        self.scale = head_size**-0.5 if scale is None else scale
        self.window = window
        self.soft_cap = soft_cap

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        batch: ForwardBatch,
        sinks: Tensor | None = None,
    ) -> Tensor:
        kv_cache = batch.kv_caches[self.layer_index]  # [N, 2, B, K, D]
        group_index = batch.layer_groups[self.layer_index]
        if k is not None and v is not None:
            write_kv(k, v, kv_cache, batch.slot_mapping[group_index])
        return paged_attention(q, kv_cache, batch, group_index, self.scale, self.window, self.soft_cap, sinks)
