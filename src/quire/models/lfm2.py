"""LFM2: Llama with norms of heads, and short gated convolutions instead of attention in most layers.

Next to read: `layers/recurrent.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire import nn
from quire.cache_spec import CacheSpec, RecurrentState
from quire.kernels.recurrence import MAX_TAPS
from quire.layers.forward_batch import ForwardBatch
from quire.layers.group import Group, share
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.recurrent import CausalConv, state_bytes
from quire.layers.rotary import Rotation
from quire.lazy_torch import Tensor
from quire.models.hf_config import HFConfigReader, check_positive, read_recurrent_layers, wrong
from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaForCausalLM
from quire.models.qwen3 import Qwen3Attention
from quire.weight_map import Layout


@dataclass(frozen=True, kw_only=True)
class LFM2Config(LlamaConfig):
    """Llama's fields, and convolutions over `num_taps` tokens in the layers of `recurrent_layers`."""

    num_taps: int
    conv_bias: bool
    defaults = {"rope_theta": 1000000.0}
    required = {"attention_bias": False, "mlp_bias": False}
    unused = (
        "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu",
        "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc",
        "theta",
    )  # fmt: skip
    """Fields of published configs that Transformers does not read either."""

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> Self:
        """See `LlamaConfig.from_hf`. Some configs name the MLP's width `block_ff_dim` only."""
        return super().from_hf({"intermediate_size": hf_config.get("block_ff_dim", 12288), **hf_config})

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields = super().read(reader)
        attending = reader.raw("full_attn_idxs") if reader.has("full_attn_idxs") else None
        if attending is not None and not isinstance(attending, list):
            raise wrong("full_attn_idxs", repr(attending), "a list of layers")
        return fields | {
            "intermediate_size": _read_mlp_size(reader, fields["intermediate_size"]),
            "rms_norm_epsilon": reader.number("norm_eps", 1e-5),
            "tie_word_embeddings": reader.flag("tie_embedding", reader.flag("tie_word_embeddings", True)),
            "recurrent_layers": read_recurrent_layers(
                reader, fields["num_layers"], lambda index: attending is not None and index not in attending
            ),
            "num_taps": reader.integer("conv_L_cache", 3, minimum=2, maximum=MAX_TAPS),
            "conv_bias": reader.flag("conv_bias", False),
        }

    def state_spec(self) -> CacheSpec:
        return RecurrentState(state_bytes(self.hidden_size, self.num_taps))


def _read_mlp_size(reader: HFConfigReader, size: int) -> int:
    """The MLP's width, which `block_auto_adjust_ff_dim` derives from the stated one."""
    size = reader.integer("block_ff_dim", size)
    multiplier, multiple = reader.raw("block_ffn_dim_multiplier"), reader.integer("block_multiple_of", 256)
    if not reader.flag("block_auto_adjust_ff_dim", True):
        return size
    size = 2 * size // 3
    if reader.has("block_ffn_dim_multiplier") and multiplier is None:
        return size
    size = int(check_positive("block_ffn_dim_multiplier", 1.0 if multiplier is None else multiplier) * size)
    return -(-size // multiple) * multiple


class ShortConv(nn.Module):
    """Project to b, c and x, convolve b · x over time, multiply by c, project back."""

    name_in_layer = "conv"

    def __init__(self, config: LFM2Config, layer_index: int, group: Group) -> None:
        super().__init__()
        channels = share("channels of convolutions", config.hidden_size, group)
        self.in_proj = ColumnParallelLinear(config.hidden_size, (channels,) * 3, bias=config.conv_bias)
        self.conv = CausalConv(layer_index, (channels,), config.num_taps, activation=None, bias=config.conv_bias)
        self.o_proj = RowParallelLinear(channels, config.hidden_size, group, bias=config.conv_bias)

    def forward(self, x: Tensor, rotation: Rotation | None, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        b, c, x = self.in_proj(x).chunk(3, dim=1)  # [T, C] each
        return self.o_proj(c * self.conv(b * x, batch))


class LFM2ForCausalLM(LlamaForCausalLM):
    """Llama with convolutions. Parameters have Llama's names."""

    Config = LFM2Config
    attention_class = Qwen3Attention
    recurrent_class = ShortConv

    def layout(self) -> Layout:
        """Return Llama's, under other names."""
        return super().layout() | Layout(
            renames={
                "operator_norm": "input_layernorm",
                "ffn_norm": "post_attention_layernorm",
                "embedding_norm": "norm",
                "q_layernorm": "q_norm",
                "k_layernorm": "k_norm",
                "out_proj": "o_proj",
                "feed_forward": "mlp",
                "w1": "gate_proj",
                "w2": "down_proj",
                "w3": "up_proj",
            }
        )


ARCHITECTURES = {"Lfm2ForCausalLM": LFM2ForCausalLM}
