"""Mistral: Llama with a sliding window in every layer.

Next to read: `llama.py`.
"""

from dataclasses import dataclass

from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaForCausalLM


@dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    """Llama's fields, with windows; `sliding_window` is null, for none, in later releases."""

    has_window = True
    default_window = 4096


class MistralForCausalLM(LlamaForCausalLM):
    """Llama with windows."""

    Config = MistralConfig


ARCHITECTURES = {"MistralForCausalLM": MistralForCausalLM}
