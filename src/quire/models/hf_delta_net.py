"""`DeltaNetConfig`: the fields of models with gated delta nets beside full attention (Qwen3-Next, Qwen3.5).

Next to read: `qwen3_next.py`.
"""

from dataclasses import dataclass
from typing import Any

from quire.cache_spec import CacheSpec, PagedKV, RecurrentState
from quire.kernels.recurrence import MAX_TAPS
from quire.layers.recurrent import state_bytes
from quire.layers.rotary import RopeConfig
from quire.models.hf_config import HFConfigReader, check_divides
from quire.models.hf_hybrid import read_recurrent_layers
from quire.models.hf_llama import LlamaConfig
from quire.models.hf_rope import read_rope

DEFAULT_HEAD_SIZE = 256
DEFAULT_ROTATED_SHARE = 0.25
DEFAULT_INTERVAL = 4
FIELDS_OF_OTHER_PARTS = ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
"""Of the heads that predict further tokens, which are not loaded, and of the state's type, which is fp32."""


@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig(LlamaConfig):
    """Llama's fields, and sizes of delta nets in the layers of `recurrent_layers`. `num_taps`: of convolutions."""

    recurrent_layers: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    num_taps: int

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        """See `LlamaConfig.read`."""
        for name in FIELDS_OF_OTHER_PARTS:
            reader.raw(name)
        reader.require("attn_output_gate", True)
        reader.require("use_sliding_window", False)
        reader.require("mlp_bias", False)
        head_size = reader.integer("head_dim", DEFAULT_HEAD_SIZE)
        fields = super().read(reader) | {"head_size": head_size}
        sizes = {
            "num_key_heads": reader.integer("linear_num_key_heads", 16),
            "num_value_heads": reader.integer("linear_num_value_heads", 32),
            "key_size": reader.integer("linear_key_head_dim", 128),
            "value_size": reader.integer("linear_value_head_dim", 128),
            "num_taps": reader.integer("linear_conv_kernel_dim", 4, maximum=MAX_TAPS),
        }
        check_divides(
            "linear_num_key_heads", sizes["num_key_heads"], "linear_num_value_heads", sizes["num_value_heads"]
        )
        check_divides("2 at least", 1 if sizes["num_taps"] > 1 else 2, "linear_conv_kernel_dim", sizes["num_taps"])
        return fields | sizes | {"recurrent_layers": _read_layers(reader, fields["num_layers"])}

    @classmethod
    def read_rope(cls, reader: HFConfigReader) -> RopeConfig:
        """Read the angles of a share of each head. Of text, all parts of a multimodal position are the same number."""
        return read_rope(reader, share=DEFAULT_ROTATED_SHARE, ignored=("mrope_section", "mrope_interleaved"))

    def kv_specs(self) -> list[CacheSpec]:
        """See `DecoderConfig.kv_specs`."""
        num_channels = 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size
        matrices = self.num_key_heads, self.num_value_heads, self.key_size, self.value_size
        state = RecurrentState(state_bytes(num_channels, self.num_taps, *matrices))
        attention = PagedKV(self.num_kv_heads, self.head_size, 1)
        return [state if is_recurrent else attention for is_recurrent in self.recurrent_layers]


def _read_layers(reader: HFConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Read which layers are delta nets: all but every fourth, if `layer_types` does not say."""
    interval = reader.integer("full_attention_interval", DEFAULT_INTERVAL)
    return read_recurrent_layers(reader, num_layers, lambda index: (index + 1) % interval > 0)
