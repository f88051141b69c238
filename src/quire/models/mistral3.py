"""Ministral 3, which sees images: its language model, without images.

Next to read: `ministral3.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from quire.models.hf_llama import LlamaConfig
from quire.models.hf_wrapper import RENAMES, VISION_TENSORS, language_config
from quire.models.ministral3 import Ministral3Config, Ministral3ForCausalLM


@dataclass(frozen=True, kw_only=True)
class Mistral3Config(Ministral3Config):
    """The fields in `text_config`."""

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> Self:
        """See `DecoderConfig.from_hf`."""
        return super().from_hf(language_config(hf_config, ("ministral3",)))


class Mistral3ForConditionalGeneration(Ministral3ForCausalLM):
    """The language model, under the names of the whole. A head that the config does not tell of is an error."""

    Config: ClassVar[type[LlamaConfig]] = Mistral3Config
    renames: ClassVar[Mapping[str, str]] = RENAMES

    def __init__(self, config: Ministral3Config, *args: Any) -> None:
        super().__init__(config, *args)
        self.ignored_tensors = (r"rotary_emb\.inv_freq$", *VISION_TENSORS)


ARCHITECTURES = {"Mistral3ForConditionalGeneration": Mistral3ForConditionalGeneration}
