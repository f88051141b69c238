"""Qwen3.5, with experts, which sees images: its language model, without images.

Next to read: `qwen3_5_moe_text.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from quire.models.hf_wrapper import RENAMES, VISION_TENSORS, language_config
from quire.models.qwen3_5_moe_text import Qwen35MoeConfig, Qwen35MoeForCausalLM


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeWithImagesConfig(Qwen35MoeConfig):
    """The fields in `text_config`."""

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> Self:
        """See `DecoderConfig.from_hf`."""
        return super().from_hf(language_config(hf_config, ("qwen3_5_moe_text",)))


class Qwen35MoeForConditionalGeneration(Qwen35MoeForCausalLM):
    """The language model, under the names of the whole."""

    Config = Qwen35MoeWithImagesConfig
    renames: ClassVar[Mapping[str, str]] = RENAMES

    def __init__(self, config: Qwen35MoeConfig, *args: Any) -> None:
        super().__init__(config, *args)
        self.ignored_tensors = (*self.ignored_tensors, *VISION_TENSORS)


ARCHITECTURES = {"Qwen3_5MoeForConditionalGeneration": Qwen35MoeForConditionalGeneration}
