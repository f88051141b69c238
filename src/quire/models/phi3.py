"""Phi-3 and Phi-4 (mini and 14B): Llama with fused projections as they are stored, and LongRoPE on a part of each head.

Next to read: `llama.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.layers.rotary import RopeConfig
from quire.models.hf_config import HFConfigReader
from quire.models.hf_llama import LlamaConfig
from quire.models.hf_rope import read_rope
from quire.models.llama import LlamaForCausalLM

DEFAULT_ORIGINAL_CONTEXT = 4096
OLD_NAMES_OF_LONGROPE = ("su", "yarn")


@dataclass(frozen=True, kw_only=True)
class Phi3Config(LlamaConfig):
    """Llama's fields, with one window in all layers."""

    required: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), False), "full_attn_mod": 1,
        "interpolate_factor": 1,
    }  # fmt: skip
    unused = ("resid_pdrop", "embd_pdrop")

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        """See `LlamaConfig.read`."""
        fields = super().read(reader)
        return fields | {"windows": (reader.optional_integer("sliding_window"),) * fields["num_layers"]}

    @classmethod
    def read_rope(cls, reader: HFConfigReader) -> RopeConfig:
        """Read the angles; early configs call LongRoPE "su" or "yarn"."""
        renames = dict.fromkeys(OLD_NAMES_OF_LONGROPE, "longrope")
        return read_rope(reader, share=1.0, default_original=DEFAULT_ORIGINAL_CONTEXT, renames=renames)


class Phi3ForCausalLM(LlamaForCausalLM):
    """Llama whose checkpoints have `qkv_proj` and `gate_up_proj`."""

    Config = Phi3Config
    stacked_params: ClassVar[Mapping[str, tuple[str, ...]]] = {}


ARCHITECTURES = {"Phi3ForCausalLM": Phi3ForCausalLM}
