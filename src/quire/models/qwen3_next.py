"""Qwen3-Next: gated delta nets in three layers of four, gated attention in the others, and mixtures of experts.

Checkpoints store the weights of most norms without their 1, which is added when they are loaded.
Next to read: `layers/recurrent.py`; `qwen2_moe.py` for the experts.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from quire import nn
from quire.cache_spec import CacheSpec, RecurrentState
from quire.kernels.activations import silu
from quire.kernels.elementwise import gate_rows
from quire.kernels.recurrence import MAX_TAPS
from quire.layers.forward_batch import ForwardBatch
from quire.layers.group import SINGLE, Group, Partition, share, share_heads
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.norms import RMSNorm
from quire.layers.recurrent import CausalConv, recur, state_bytes
from quire.layers.rotary import Rotation
from quire.lazy_torch import Tensor
from quire.models.hf_config import HFConfigReader, check_divides, read_recurrent_layers
from quire.models.hf_llama import LlamaConfig
from quire.models.hf_moe import read_moe
from quire.models.llama import QKV, LlamaForCausalLM
from quire.models.qwen2_moe import GatedSharedMoE
from quire.models.qwen3 import Qwen3Attention
from quire.weight_map import Layout, Offset, Rows, View

DEFAULT_INTERVAL = 4


@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig(LlamaConfig):
    """Llama's fields, and sizes of delta nets in the layers of `recurrent_layers`. `num_taps`: of convolutions."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    num_taps: int
    defaults = {"head_dim": 256, "partial_rotary_factor": 0.25}
    rope_options = {
        "rotates_part": True,
        "ignored": ("mrope_section", "mrope_interleaved"),
    }
    """Of text, all parts of a multimodal position are the same number."""
    required = {"attn_output_gate": True, "use_sliding_window": False, "mlp_bias": False}
    unused = ("mamba_ssm_dtype", "mtp_use_dedicated_embeddings")
    """Of the state's type, which is fp32, and copies of the embeddings."""

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields = super().read(reader)
        sizes = {
            "num_key_heads": reader.integer("linear_num_key_heads", 16),
            "num_value_heads": reader.integer("linear_num_value_heads", 32),
            "key_size": reader.integer("linear_key_head_dim", 128),
            "value_size": reader.integer("linear_value_head_dim", 128),
            "num_taps": reader.integer("linear_conv_kernel_dim", 4, minimum=2, maximum=MAX_TAPS),
        }
        check_divides(
            "linear_num_key_heads", sizes["num_key_heads"], "linear_num_value_heads", sizes["num_value_heads"]
        )
        interval = reader.integer("full_attention_interval", DEFAULT_INTERVAL)
        return (
            fields
            | sizes
            | {
                "recurrent_layers": read_recurrent_layers(
                    reader, fields["num_layers"], lambda index: (index + 1) % interval > 0
                ),
                "num_predictors": reader.integer("mtp_num_hidden_layers", 1, minimum=0, maximum=1),
            }
        )

    def state_spec(self) -> CacheSpec:
        num_channels = 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size
        matrices = self.num_key_heads, self.num_value_heads, self.key_size, self.value_size
        return RecurrentState(state_bytes(num_channels, self.num_taps, *matrices))


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(DeltaNetConfig):
    """Fields of delta nets, and experts as `Qwen2MoeConfig` has them."""

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields, shared_size = super().read(reader), reader.integer("shared_expert_intermediate_size", 512)
        experts = read_moe(reader, fields, renormalises=True, expert_size=512)
        return fields | experts | {"shared_size": shared_size}


class GatedAttention(Qwen3Attention):
    """Qwen3's, whose results are multiplied by the sigmoid of gates that are projected beside queries."""

    def __init__(self, config: DeltaNetConfig, layer_index: int, group: Group = SINGLE) -> None:
        super().__init__(config, layer_index, group)  # type: ignore[arg-type]  # it reads Llama's fields
        heads, kv_heads = share_heads(config.num_heads, config.num_kv_heads, group)
        q, k = heads * config.head_size, kv_heads * config.head_size
        self.qkv_proj = ColumnParallelLinear(config.hidden_size, (q, q, k, k), bias=config.qkv_bias, stored=QKV)

    def forward(self, x: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E]; rotation: cos, sin [T, C] -> [T, E]."""
        gqkv = self.qkv_proj(x).view(-1, 2 * (self.num_heads + self.num_kv_heads), self.head_size)  # [T, 2H + 2K, D]
        gates, qk, v = gqkv.split((self.num_heads, self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        q, k = self.rotate(qk, rotation)  # [T, H, D], [T, K, D]
        found = self.attention(q, k, v, batch).flatten(1)  # [T, H * D]
        return self.o_proj(gate_rows(found, gates.flatten(1)))


class GatedDeltaNet(nn.Module):
    """Convolve queries, keys and values over time, apply the gated delta rule, norm and gate. (Yang 2024)

    K key heads of D, H value heads of V on this rank.
    """

    name_in_layer = "linear_attn"

    def __init__(self, config: DeltaNetConfig, layer_index: int, group: Group = SINGLE) -> None:
        super().__init__()
        key_heads = share("key heads of delta nets", config.num_key_heads, group)
        heads = share("value heads of delta nets", config.num_value_heads, group)
        keys, values = key_heads * config.key_size, heads * config.value_size
        self.layer_index, self.sizes = layer_index, (config.key_size, config.value_size)
        self.widths = keys.size, keys.size, values.size
        # Qwen3-Next's checkpoints have them whole, Qwen3.5's and GGUF files in parts.
        self.in_proj_qkvz = ColumnParallelLinear(
            config.hidden_size, (keys, keys, values, values), stored=("in_proj_qkv", "in_proj_z")
        )
        self.in_proj_ba = ColumnParallelLinear(  # time steps first
            config.hidden_size, (heads, heads), stored=("in_proj_a", "in_proj_b")
        )
        self.conv1d = CausalConv(layer_index, (keys, keys, values), config.num_taps, activation="silu")
        self.dt_bias = nn.Parameter(nn.empty(heads.size))
        self.A_log = nn.Parameter(nn.empty(heads.size))
        self.norm = RMSNorm(config.value_size, config.rms_norm_epsilon)
        self.out_proj = RowParallelLinear(values, config.hidden_size, group)
        self.partitions = dict.fromkeys(("dt_bias", "A_log"), Partition(rows=(heads,)))

    def forward(self, x: Tensor, rotation: Rotation | None, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        qkv, z = self.in_proj_qkvz(x).split((sum(self.widths), self.widths[2]), dim=1)  # [T, 2KD + HV], [T, HV]
        q, k, v = self.conv1d(qkv, batch).split(self.widths, dim=1)
        key_size, value_size = self.sizes
        found = recur(
            q.view(-1, self.widths[0] // key_size, key_size),
            k.view(-1, self.widths[0] // key_size, key_size),
            v.view(-1, self.widths[2] // value_size, value_size),
            batch,
            self.layer_index,
            gates=self.in_proj_ba(x),
            log_rates=self.A_log,
            time_bias=self.dt_bias,
            offset_bytes=self.conv1d.state_bytes,
            delta=True,
        )  # [T, H, V]
        return self.out_proj(self.norm(found).flatten(1) * silu(z))


class DeltaNetForCausalLM(LlamaForCausalLM):
    """Delta nets beside attention, with Llama's MLP."""

    Config = DeltaNetConfig
    attention_class = GatedAttention
    recurrent_class = GatedDeltaNet
    predictor_keeps_norm = True
    config: DeltaNetConfig

    def layout(self) -> Layout:
        """Return Llama's, with most norms without their 1, and behind each head's query its gate."""
        heads, size = self.config.num_heads, self.config.head_size
        gates_first = np.arange(2 * heads * size).reshape(heads, 2, size).swapaxes(0, 1)[::-1].reshape(-1)
        norms = r"^(mtp\.0\.)?norm\.|(layernorm|[qk]_norm|pre_fc_norm_\w+)\.weight$"
        views: dict[str, tuple[View, ...]] = {norms: (Offset(1.0),), r"\.q_proj\.": (Rows(gates_first),)}
        return super().layout() | Layout(views=views)


class Qwen3NextForCausalLM(DeltaNetForCausalLM):
    """Delta nets beside attention, with experts. Projections are stored in pieces, one per key head."""

    Config = Qwen3NextConfig
    moe_class = GatedSharedMoE

    def layout(self) -> Layout:
        """Return Llama's, with rows of all parts for each key head."""
        config = self.config
        keys, ratio = config.num_key_heads, config.num_value_heads // config.num_key_heads
        values = ratio * config.value_size
        return super().layout() | Layout(
            views={
                r"\.in_proj_qkvz\.": (Rows(_parts_first(keys, (config.key_size, config.key_size, values, values))),),
                r"\.in_proj_ba\.": (Rows(_parts_first(keys, (ratio, ratio), (1, 0))),),
            }
        )


def _parts_first(num_pieces: int, sizes: tuple[int, ...], order: tuple[int, ...] | None = None) -> np.ndarray:
    """Stored positions of rows, by part, of pieces that have rows of all parts. `order`: of the parts wanted."""
    rows = np.arange(num_pieces * sum(sizes)).reshape(num_pieces, -1)
    parts = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
    return np.concatenate([parts[at].reshape(-1) for at in order or range(len(sizes))])


ARCHITECTURES = {"Qwen3NextForCausalLM": Qwen3NextForCausalLM}
