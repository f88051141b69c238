"""Gemma 3 of 4, 12 and 27 B parameters, which see images: their language model, without images.

Next to read: `gemma3_text.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from quire.models.gemma3_text import Gemma3Config, Gemma3ForCausalLM
from quire.models.hf_llama import LlamaConfig
from quire.models.hf_wrapper import RENAMES, VISION_TENSORS, language_config

DEFAULTS = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
}  # fmt: skip
"""Of Gemma 3; the configs name what differs."""


@dataclass(frozen=True, kw_only=True)
class Gemma3WithImagesConfig(Gemma3Config):
    """The fields in `text_config`."""

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> Self:
        """See `DecoderConfig.from_hf`."""
        return super().from_hf(language_config(hf_config, ("gemma3_text",), **DEFAULTS))


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The language model, under the names of the whole."""

    Config: ClassVar[type[LlamaConfig]] = Gemma3WithImagesConfig
    renames: ClassVar[Mapping[str, str]] = RENAMES

    def __init__(self, config: Gemma3Config, *args: Any) -> None:
        super().__init__(config, *args)
        self.ignored_tensors = (*self.ignored_tensors, *VISION_TENSORS)


ARCHITECTURES = {"Gemma3ForConditionalGeneration": Gemma3ForConditionalGeneration}
