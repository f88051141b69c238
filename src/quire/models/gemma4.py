"""Gemma 4, which sees images and hears: its language model, without images and sound.

Next to read: `gemma4_text.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from quire.models.gemma4_text import Gemma4ForCausalLM
from quire.models.hf_gemma4 import Gemma4Config
from quire.models.hf_llama import LlamaConfig
from quire.models.hf_wrapper import RENAMES, VISION_TENSORS, language_config


@dataclass(frozen=True, kw_only=True)
class Gemma4WithImagesConfig(Gemma4Config):
    """The fields in `text_config`."""

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> Self:
        """See `DecoderConfig.from_hf`."""
        return super().from_hf(language_config(hf_config, ("gemma4_text",)))


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """The language model, under the names of the whole."""

    Config: ClassVar[type[LlamaConfig]] = Gemma4WithImagesConfig
    renames: ClassVar[Mapping[str, str]] = RENAMES

    def __init__(self, config: Gemma4Config, *args: Any) -> None:
        super().__init__(config, *args)
        self.ignored_tensors = (*self.ignored_tensors, *VISION_TENSORS)


ARCHITECTURES = {"Gemma4ForConditionalGeneration": Gemma4ForConditionalGeneration}
