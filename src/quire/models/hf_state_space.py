"""`StateSpaceMixer`: the layer of Mamba 2, which hybrid models have too.

Next to read: `mamba2.py`; `layers/recurrent.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire import nn
from quire.cache_spec import RecurrentState
from quire.errors import UnsupportedModelError
from quire.kernels.activations import silu
from quire.kernels.recurrence import MAX_TAPS, recurrent_state_bytes
from quire.kernels.rms_norm import rms_norm
from quire.layers.forward_batch import ForwardBatch
from quire.layers.group import SINGLE, Group, Partition, Share, share
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.norms import RMSNorm, SharedRMSNorm
from quire.layers.recurrent import CausalConv, recur, state_bytes
from quire.layers.rotary import Rotation
from quire.lazy_torch import Tensor
from quire.models.hf_config import HFConfigReader, check_divides, wrong

NO_LIMITS = (None, [0.0, math.inf], (0.0, math.inf), [0.0, {"__float__": "Infinity"}])
"""Of time steps, as Python's JSON and Transformers 5 write them."""


@dataclass(frozen=True, kw_only=True)
class StateSpaceSizes:
    """Sizes of a state space: H heads of `head_size` channels, and keys and queries of `state_size` per group."""

    hidden_size: int
    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    num_taps: int
    conv_bias: bool
    bias: bool
    epsilon: float

    def spec(self) -> RecurrentState:
        """The state of one layer. Where all heads share a key, every rank has it."""
        inner, keys = self.num_heads * self.head_size, 2 * self.num_groups * self.state_size
        matrices = self.num_groups, self.num_heads, self.state_size, self.head_size
        num_bytes, whole_bytes = state_bytes(inner + keys, self.num_taps, *matrices), 0
        if self.num_groups == 1:
            whole_bytes = 4 * (self.num_taps - 1) * keys + recurrent_state_bytes(1, 0, self.state_size, 0)
        return RecurrentState(num_bytes, whole_bytes=whole_bytes)


def read_state_space(reader: HFConfigReader, hidden_size: int, epsilon: float, names: Sequence[str]) -> StateSpaceSizes:
    """Read sizes. `names`: of heads, their size, groups, state size, taps, expansion, and biases of convolution and
    projections; the config has their defaults.

    Raises: ModelFileError for sizes that do not fit; UnsupportedModelError if time steps are limited.
    """
    heads, head_size, groups, state_size, taps, expand, conv_bias, bias = names
    limit = reader.raw("time_step_limit")
    if limit not in NO_LIMITS:
        raise UnsupportedModelError(
            f"the model's config has time_step_limit={limit}; Quire computes only [0, Infinity]"
        )
    num_heads, num_groups, times = reader.integer(heads), reader.integer(groups), reader.integer(expand)
    is_derived = reader.raw(head_size) in (None, "auto")
    size = times * hidden_size // num_heads if is_derived else reader.integer(head_size)
    if num_heads * size != times * hidden_size:
        raise wrong(heads, f"{num_heads} of {head_size}={size}", f"{expand}={times} times hidden_size={hidden_size}")
    check_divides(groups, num_groups, heads, num_heads)
    return StateSpaceSizes(
        hidden_size=hidden_size,
        num_heads=num_heads,
        head_size=size,
        num_groups=num_groups,
        state_size=reader.integer(state_size),
        num_taps=reader.integer(taps, maximum=MAX_TAPS),
        conv_bias=reader.flag(conv_bias, True),
        bias=reader.flag(bias, False),
        epsilon=epsilon,
    )


class GroupRMSNorm(RMSNorm):
    """RMS norm of each of `num_groups` equal parts of a row. Shapes: x [T, size] -> the same; weight [size]."""

    def __init__(self, part: Share, num_groups: int, epsilon: float) -> None:
        super().__init__(part.size, epsilon)
        self.num_groups = num_groups
        self.partitions = {"weight": Partition(rows=(part,))}

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [T, size] -> [T, size]."""
        size = len(self.weight)
        return rms_norm(x.view(-1, self.num_groups, size // self.num_groups), self.weight, self.epsilon).flatten(1)


class StateSpaceMixer(nn.Module):
    """Project, convolve over time, apply the state space, gate and norm, project back. (Dao & Gu 2024)"""

    name_in_layer = "mamba"

    def __init__(self, config: Any, layer_index: int, group: Group = SINGLE) -> None:
        """`config`: one with `state_space`."""
        super().__init__()
        sizes: StateSpaceSizes = config.state_space
        heads, is_shared = share("heads of state spaces", sizes.num_heads, group), sizes.num_groups == 1
        groups = Share(0, 1, 1) if is_shared else share("groups of state spaces", sizes.num_groups, group)
        inner, keys = heads * sizes.head_size, groups * sizes.state_size
        self.layer_index, self.widths, self.state_size = (
            layer_index,
            (inner.size, keys.size, keys.size),
            sizes.state_size,
        )
        self.head_size, self.num_heads = sizes.head_size, heads.size
        self.in_proj = ColumnParallelLinear(sizes.hidden_size, (inner, inner, keys, keys, heads), bias=sizes.bias)
        self.conv1d = CausalConv(
            layer_index, (inner, keys, keys), sizes.num_taps, activation="silu", bias=sizes.conv_bias
        )
        vectors = [nn.Parameter(nn.empty(heads.size)) for _ in range(3)]
        self.dt_bias, self.A_log, self.D = vectors
        # One group is the whole row, of which a rank has a part.
        self.norm: RMSNorm = (
            SharedRMSNorm(inner, sizes.epsilon, group) if is_shared else GroupRMSNorm(inner, groups.size, sizes.epsilon)
        )
        self.out_proj = RowParallelLinear(inner, sizes.hidden_size, group, bias=sizes.bias)
        self.partitions = dict.fromkeys(("dt_bias", "A_log", "D"), Partition(rows=(heads,)))

    def forward(self, x: Tensor, rotation: Rotation | None, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        inner = self.widths[0]
        z, xbc, steps = self.in_proj(x).split((inner, sum(self.widths), self.num_heads), dim=1)
        values, keys, queries = self.conv1d(xbc, batch).split(self.widths, dim=1)
        keys, queries = (part.view(-1, self.widths[1] // self.state_size, self.state_size) for part in (keys, queries))
        found = recur(
            queries,
            keys,
            values.view(-1, self.num_heads, self.head_size),
            batch,
            self.layer_index,
            gates=steps,
            log_rates=self.A_log,
            time_bias=self.dt_bias,
            skip=self.D,
            offset_bytes=self.conv1d.state_bytes,
        )  # [T, H, V]
        return self.out_proj(self.norm(found.flatten(1) * silu(z)))
