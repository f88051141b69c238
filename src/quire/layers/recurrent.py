"""`CausalConv` and `recur`: the parts of a layer with recurrent state. Next to read: `kernels/recurrence.py`.

A model with such layers returns `RecurrentState` specs of `state_bytes` for them from its config's `kv_specs`.
"""

from collections.abc import Sequence

from quire import nn
from quire.kernels.recurrence import causal_conv, conv_state_bytes, linear_recurrence, recurrent_state_bytes
from quire.layers.forward_batch import ForwardBatch
from quire.layers.group import Partition, Share
from quire.lazy_torch import Tensor
from quire.weight_map import Taps


def state_bytes(
    num_channels: int, num_taps: int, num_key_heads: int = 0, num_heads: int = 0, key_size: int = 0, value_size: int = 0
) -> int:
    """Bytes of a layer's state: that of a convolution, then those of a recurrence."""
    recurrent_bytes = recurrent_state_bytes(num_key_heads, num_heads, key_size, value_size)
    return conv_state_bytes(num_channels, num_taps) + recurrent_bytes


class CausalConv(nn.Module):
    """A convolution of each channel over time, split by channels like the projection before it.

    Checkpoints store the weight as [C, 1, W].
    Shapes: x [T, C] -> [T, C]; weight [W · C], the oldest input's first; bias [C] or None.
    Mutates: the layer's states of the step's requests.
    """

    def __init__(
        self, layer_index: int, parts: Sequence[Share], num_taps: int, *, activation: str | None, bias: bool = False
    ) -> None:
        super().__init__()
        num_channels = sum(part.size for part in parts)
        self.layer_index, self.activation = layer_index, activation
        self.weight = nn.Parameter(nn.empty(num_taps * num_channels))
        self.bias = nn.Parameter(nn.empty(num_channels)) if bias else None
        self.state_bytes = conv_state_bytes(num_channels, num_taps)
        self.stored_views = {"weight": (Taps(),)}
        self.partitions = {"weight": Partition(rows=tuple(parts) * num_taps), "bias": Partition(rows=tuple(parts))}

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        cache, group_index = batch.kv_caches[self.layer_index], batch.layer_groups[self.layer_index]
        return causal_conv(x, self.weight, self.bias, self.activation, cache, batch, group_index)


def recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: ForwardBatch,
    layer_index: int,
    *,
    gates: Tensor | None = None,
    log_rates: Tensor | None = None,
    time_bias: Tensor | None = None,
    skip: Tensor | None = None,
    offset_bytes: int = 0,
    delta: bool = False,
) -> Tensor:
    """Compute `linear_recurrence` on a layer's states, which lie behind `offset_bytes` of another part.

    Shapes: q, k [T, K, D]; v [T, H, V]; gates [T, H] or [T, 2H]; log_rates, time_bias, skip [H] -> [T, H, V].
    Mutates: the layer's states of the step's requests.
    """
    cache, group_index = batch.kv_caches[layer_index], batch.layer_groups[layer_index]
    return linear_recurrence(q, k, v, gates, log_rates, time_bias, skip, cache, batch, group_index, offset_bytes, delta)
