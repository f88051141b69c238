"""Mistral: Llama with a sliding window in every layer.

Next to read: `llama.py`.
"""

from dataclasses import dataclass
from typing import Any

from quire.models.hf_config import HFConfigReader
from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaForCausalLM

DEFAULT_WINDOW = 4096
"""The window of a config without `sliding_window`; null, as in later releases, means none."""


@dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    """Llama's fields, with windows."""

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields = super().read(reader)
        window = reader.optional_integer("sliding_window")
        if not reader.has("sliding_window"):
            window = DEFAULT_WINDOW
        return fields | {"windows": (window,) * fields["num_layers"]}


class MistralForCausalLM(LlamaForCausalLM):
    """Llama with windows."""

    Config = MistralConfig


ARCHITECTURES = {"MistralForCausalLM": MistralForCausalLM}
