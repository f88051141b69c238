"""`DeltaNetConfig`: the fields of models with gated delta nets beside full attention (Qwen3-Next, Qwen3.5).

Next to read: `qwen3_next.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.cache_spec import CacheSpec, RecurrentState
from quire.kernels.recurrence import MAX_TAPS
from quire.layers.recurrent import state_bytes
from quire.models.hf_config import HFConfigReader, check_divides
from quire.models.hf_hybrid import read_recurrent_layers
from quire.models.hf_llama import LlamaConfig

DEFAULT_INTERVAL = 4


@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig(LlamaConfig):
    """Llama's fields, and sizes of delta nets in the layers of `recurrent_layers`. `num_taps`: of convolutions."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    num_taps: int
    defaults: ClassVar[Mapping[str, Any]] = {"head_dim": 256, "partial_rotary_factor": 0.25}
    rope_options: ClassVar[Mapping[str, Any]] = {
        "rotates_part": True, "ignored": ("mrope_section", "mrope_interleaved"),
    }  # fmt: skip
    """Of text, all parts of a multimodal position are the same number."""
    required: ClassVar[Mapping[str, Any]] = {"attn_output_gate": True, "use_sliding_window": False, "mlp_bias": False}
    unused = ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    """Of the heads that predict further tokens, which are not loaded, and of the state's type, which is fp32."""

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields = super().read(reader)
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

    def state_spec(self) -> CacheSpec:
        """See `LlamaConfig.state_spec`."""
        num_channels = 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size
        matrices = self.num_key_heads, self.num_value_heads, self.key_size, self.value_size
        return RecurrentState(state_bytes(num_channels, self.num_taps, *matrices))


def _read_layers(reader: HFConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Read which layers are delta nets: all but every fourth, if `layer_types` does not say."""
    interval = reader.integer("full_attention_interval", DEFAULT_INTERVAL)
    return read_recurrent_layers(reader, num_layers, lambda index: (index + 1) % interval > 0)
