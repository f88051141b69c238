"""`without_images`: the language model of a model that also sees images or hears, which is run without them.

Next to read: `gemma3.py`.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self, TypeVar

from quire.errors import UnsupportedModelError
from quire.models.hf_config import HFConfigReader, wrong
from quire.weight_map import Layout

_T = TypeVar("_T")
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
"""Prefixes of the language model's tensors, in checkpoints of transformers 4 and 5."""
VISION_TENSORS = (
    r"^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower|embed_vision|embed_audio)\.",
)
"""Patterns of the tensors that only images and sound need."""
VISION_FIELDS = (
    "text_config", "vision_config", "image_token_index", "image_token_id", "boi_token_index", "boi_token_id",
    "eoi_token_index", "eoi_token_id", "mm_tokens_per_image", "projector_hidden_act", "vision_feature_layer",
    "multimodal_projector_bias", "spatial_merge_size", "video_token_id", "vision_start_token_id", "vision_end_token_id",
    "vision_soft_tokens_per_image", "audio_config", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index",
)  # fmt: skip
"""Fields of the whole model that the language model does not depend on."""


def language_model(
    hf_config: Mapping[str, Any], model: Any, tensors: Mapping[str, _T]
) -> tuple[Mapping[str, Any], dict[str, _T]]:
    """Return the config.json and the tensors, by name, of the language model of a whole model of class `model`.

    Of another class they are those given.
    """
    if not hasattr(model, "language_class"):
        return hf_config, dict(tensors)
    named = sys.modules[model.language_class.__module__].ARCHITECTURES
    of_language = Layout(prefixes=PREFIXES, unused=VISION_TENSORS).used_names(tensors)
    bare = {name: tensors[stored] for name, stored in of_language.items()}
    return {**model.Config.language_fields(hf_config), "architectures": list(named)}, bare


def language_config(hf_config: Mapping[str, Any], model_types: tuple[str, ...], **defaults: Any) -> dict[str, Any]:
    """Return the fields of the language model. `defaults`: of fields that `text_config` may leave out.

    `tie_word_embeddings` of the whole model takes precedence, as in Transformers 5.
    Raises: ModelFileError; UnsupportedModelError for another model type or an unknown field.
    """
    text_config = hf_config.get("text_config")
    if not isinstance(text_config, Mapping):
        raise wrong("text_config", text_config, "a config")
    reader = HFConfigReader(hf_config)
    for name in VISION_FIELDS:
        reader.raw(name)
    ties = reader.raw("tie_word_embeddings")
    reader.finish()
    fields = {"model_type": model_types[0], **defaults, **text_config}
    if fields["model_type"] not in model_types:
        raise UnsupportedModelError(
            f"the model's config has text_config.model_type={str(fields['model_type'])[:60]!r}; supported are "
            f"{', '.join(model_types)}"
        )
    return fields if ties is None else fields | {"tie_word_embeddings": ties}


def without_images(model_class: Any, *model_types: str, refuses_head: bool = False, **defaults: Any) -> Any:
    """Return the class of the whole model that runs its language model alone, of class `model_class`.

    `model_types`: of the language model; `refuses_head`: a stored head is an error where embeddings are tied, instead
    of being ignored; `defaults`: of fields that `text_config` may leave out.
    """

    class LanguageConfig(model_class.Config):  # type: ignore[misc]
        """The fields in `text_config`."""

        @classmethod
        def from_hf(cls, hf_config: Mapping[str, Any]) -> Self:
            return super().from_hf(cls.language_fields(hf_config))

        @staticmethod
        def language_fields(hf_config: Mapping[str, Any]) -> dict[str, Any]:
            return language_config(hf_config, model_types, **defaults)

    class LanguageModel(model_class):  # type: ignore[misc]
        """The language model, under the names of the whole."""

        Config = LanguageConfig
        language_class = model_class

        def layout(self) -> Layout:
            """Return that of the language model, with other prefixes."""
            own = super().layout() | Layout(unused=VISION_TENSORS, ties_once=refuses_head)
            return replace(own, prefixes=PREFIXES)

    return LanguageModel
