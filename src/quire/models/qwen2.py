"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and a window in the upper layers of some.

Next to read: `llama.py`.
"""

from dataclasses import dataclass
from typing import Any

from quire.models import hf_config
from quire.models.hf_config import HFConfigReader
from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaForCausalLM

DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28
"""The number of lower layers without a window, for a config that sets `use_sliding_window` and not this number."""


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(LlamaConfig):
    """Llama's fields, with the biases fixed and windows per layer."""

    required = {"attention_bias": True, "mlp_bias": False, "use_mrope": False}

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields = super().read(reader)
        return fields | {
            "qkv_bias": True,
            "output_bias": False,
            "windows": read_windows(reader, fields["num_layers"]),
        }


def read_windows(reader: HFConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: by `layer_types`, or else the layers from `max_window_layers` on have one."""
    uses_windows = reader.flag("use_sliding_window", False)
    window = reader.optional_integer("sliding_window", minimum=int(uses_windows)) or DEFAULT_WINDOW
    first = reader.integer("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, minimum=0)
    return hf_config.read_windows(reader, num_layers, window if uses_windows else None, lambda index: index >= first)


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama with biases and windows."""

    Config = Qwen2Config


ARCHITECTURES = {"Qwen2ForCausalLM": Qwen2ForCausalLM}
