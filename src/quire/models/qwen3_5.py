"""Qwen3.5, dense, which sees images: its language model, without images.

Next to read: `qwen3_5_text.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from quire.models.hf_delta_net import DeltaNetConfig
from quire.models.hf_wrapper import RENAMES, VISION_TENSORS, language_config
from quire.models.qwen3_5_text import Qwen35ForCausalLM


@dataclass(frozen=True, kw_only=True)
class Qwen35WithImagesConfig(DeltaNetConfig):
    """The fields in `text_config`."""

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> Self:
        """See `DecoderConfig.from_hf`."""
        return super().from_hf(language_config(hf_config, ("qwen3_5_text",)))


class Qwen35ForConditionalGeneration(Qwen35ForCausalLM):
    """The language model, under the names of the whole."""

    Config = Qwen35WithImagesConfig
    renames: ClassVar[Mapping[str, str]] = RENAMES

    def __init__(self, config: DeltaNetConfig, *args: Any) -> None:
        super().__init__(config, *args)
        self.ignored_tensors = (*self.ignored_tensors, *VISION_TENSORS)


ARCHITECTURES = {"Qwen3_5ForConditionalGeneration": Qwen35ForConditionalGeneration}
