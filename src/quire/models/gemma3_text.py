"""Gemma 3, its language model: Gemma 2 with norms of heads, five windows in six layers, and angles of two bases.

Next to read: `gemma2.py`.
"""

from dataclasses import dataclass
from typing import Any

from quire.layers.rotary import RopeConfig
from quire.models.gemma2 import Gemma2Config, Gemma2ForCausalLM, Pattern
from quire.models.hf_config import FULL, SLIDING, HFConfigReader
from quire.models.hf_rope import read_rope_of_type
from quire.models.qwen3 import Qwen3Attention

DEFAULT_PATTERN = 6
DEFAULT_THETA, DEFAULT_LOCAL_THETA = 1e6, 1e4


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(Gemma2Config):
    """Gemma 2's fields, with two bases of angles."""

    required = {**Gemma2Config.required, "attn_logit_softcapping": None}
    unused = ("_sliding_window_pattern",)
    default_caps = (None, None)

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        local = read_rope_of_type(reader, SLIDING, theta_name="rope_local_base_freq", theta=DEFAULT_LOCAL_THETA)
        return super().read(reader) | {"local_rope": local}

    @classmethod
    def read_pattern(cls, reader: HFConfigReader) -> Pattern:
        pattern = reader.integer("sliding_window_pattern", DEFAULT_PATTERN)
        return lambda index: (index + 1) % pattern != 0

    @classmethod
    def read_rope(cls, reader: HFConfigReader) -> RopeConfig:
        """Read the angles of layers without a window."""
        return read_rope_of_type(reader, FULL, theta=DEFAULT_THETA)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 2 with norms of heads and two rotations."""

    Config = Gemma3Config
    attention_class = Qwen3Attention


ARCHITECTURES = {"Gemma3ForCausalLM": Gemma3ForCausalLM}
