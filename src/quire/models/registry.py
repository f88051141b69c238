"""`ModelRegistry`: architecture names to model classes, and a model's `config.json` to `config.ModelConfig`.

A file `models/<model_type>.py` with an `ARCHITECTURES` table is found by existing. Models from outside come by
`ModelRegistry.register_model` or, from installed packages, by entry points of the group `quire.models`.
It must not know weights or tensors' values. Next to read: `llama.py`.
"""

import functools
import importlib
import inspect
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from quire import nn
from quire.config import ModelConfig
from quire.errors import ConfigError, InvalidParameterError, ModelFileError, UnsupportedModelError, nearest, printable
from quire.extras import install_command
from quire.layers.group import SINGLE
from quire.lazy_torch import on_meta, require_torch
from quire.models.hf_config import HFConfigReader, wrong
from quire.sampling_params import MODEL_DEFAULTS, SamplingParams

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

NOT_MODELS = ("_", "hf_", "registry")
"""Prefixes of the files here that are not models."""
ENTRY_POINT_GROUP = "quire.models"
CLASSIFIER = "ForSequenceClassification"
"""End of the names of architectures with a classification head instead of one for tokens."""
MAX_LABELS = 1 << 16
FALLBACK = "TransformersForCausalLM"
"""Architecture of any causal language model that Transformers' own module computes."""
_ADVICE = "{} lets Transformers' own module compute most of the others. "
ModelClass = Any
"""A class like `llama.LlamaForCausalLM`: an nn.Module made of (config, group), with Config, `layout`, `forward` and
`compute_logits`."""


class ModelRegistry:
    """All architectures that can be built. State is per process: `register_model` holds for every engine in it."""

    _registered: ClassVar[dict[str, ModelClass | str]] = {}

    @classmethod
    def register_model(cls, architecture: str, model_class: ModelClass | str) -> None:
        """Use this class for checkpoints of this architecture, instead of a built-in one if there is one.

        `model_class`: a class as `llama.LlamaForCausalLM`, or "package.module:Class", imported when first needed.
        Raises: ConfigError if it is neither.
        """
        if isinstance(model_class, str):
            if model_class.count(":") != 1:
                raise ConfigError(f"model {model_class!r} for {architecture} is not of the form 'package.module:Class'")
        else:
            _check_model_class(architecture, model_class)
        cls._registered[architecture] = model_class

    @classmethod
    def has_registered(cls) -> bool:
        """Return whether `register_model` was called."""
        return bool(cls._registered)

    @classmethod
    def is_built_in(cls, hf_config: Mapping[str, Any]) -> bool:
        """Return whether the model's code is Quire's own: that of others may change without notice."""
        return str(cls.resolve(hf_config).__module__).startswith("quire.models.")

    @classmethod
    def resolve(cls, hf_config: Mapping[str, Any]) -> ModelClass:
        """The class for a model's config: registered, else built in, else from an entry point.

        Raises: UnsupportedModelError listing what is supported; ModelFileError if the config names no architecture.
        """
        names = _architectures(hf_config)
        if names == [FALLBACK]:
            return _fallback()
        for name in names:
            if name in cls._registered:
                return _load(name, cls._registered[name])
        by_file = _architectures_in(str(hf_config.get("model_type")))
        for name in names:
            found = by_file.get(name) or _scan().get(name)
            if found is not None:
                return found
        for name in names:
            for point in external_models().select(name=name):
                return _load(name, point.value)
        model_type = str(hf_config.get("model_type"))
        known = _architecture_in_transformers(model_type)
        # Some types share a class with another: InternLM3 is Llama to Transformers.
        of_type = model_type.replace("_", "") + "forcausallm"
        if known and all(name in known or name.lower() == of_type for name in names):
            return _fallback()
        supported = cls.supported()
        advice = _ADVICE.format(install_command("hf")) if find_spec("transformers") is None else ""
        raise UnsupportedModelError(
            f"architecture {printable(', '.join(names))} is not supported{nearest(names[0], supported)}; "
            f"supported are {', '.join(supported)}. {advice}"
            "Others can be added with ModelRegistry.register_model"
        )

    @classmethod
    def supported(cls) -> list[str]:
        """Names of all architectures, sorted."""
        return sorted({*cls._registered, *_scan(), *(point.name for point in external_models())})

    @classmethod
    def make_model_config(
        cls,
        hf_config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
        model_impl: str = "auto",
    ) -> ModelConfig:
        """Make the `ModelConfig` of a model. `overrides` replace fields of `hf_config` first.

        `model_impl`: see `EngineOptions`.
        Raises: UnsupportedModelError, ModelFileError.
        """
        merged = {**hf_config, **(overrides or {})}
        names = _architectures(merged)
        architecture, merged["architectures"] = names[0], names
        label_tokens = merged.pop("classifier_from_token", None) or ()
        if not isinstance(label_tokens, list | tuple) or not all(isinstance(token, str) for token in label_tokens):
            raise wrong("classifier_from_token", label_tokens, "a list of texts")
        merged.pop("is_original_qwen3_reranker", None)
        labels: tuple[str, ...] = ()
        if architecture.endswith(CLASSIFIER):
            merged["architectures"] = [architecture.replace(CLASSIFIER, "ForCausalLM")]
            if not label_tokens:
                labels, merged["tie_word_embeddings"] = _labels(merged), True  # there is no head for tokens
        if model_impl == "transformers":
            merged["architectures"] = [FALLBACK]
        generation = generation_config or {}
        model_class = cls.resolve(merged)
        implementation = "transformers" if model_class.__name__ == FALLBACK else "quire"
        if model_impl == "quire" != implementation:
            raise UnsupportedModelError(
                f"architecture {architecture} has no implementation in Quire: --model-impl auto runs Transformers' own"
            )
        config = model_class.Config.from_hf(merged)
        with on_meta():
            model = model_class(config, SINGLE)
        num_experts = getattr(config, "num_experts", 0) or 1
        bos_token_ids = _token_ids("bos_token_id", generation, merged)
        return ModelConfig(
            architecture=architecture,
            implementation=implementation,
            labels=labels,
            label_tokens=tuple(label_tokens),
            hf_config=merged,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            context_len=config.context_len,
            num_parameters=sum(parameter.numel() for _, parameter in nn.named_parameters(model)),
            chosen_share=min(1.0, getattr(config, "top_k", 1) / num_experts),
            cache_specs=tuple(config.kv_specs()),
            bos_token_id=bos_token_ids[0] if bos_token_ids else None,
            eos_token_ids=_token_ids("eos_token_id", generation, merged),
            generation_defaults=_generation_defaults(generation),
        )


def external_models() -> "EntryPoints":
    """Return the models of installed packages, by the names of their architectures."""
    from importlib.metadata import entry_points  # takes 10 ms, and most models are found before

    return entry_points(group=ENTRY_POINT_GROUP)


def model_types() -> list[str]:
    """The model types that have a file in this package, without importing it."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith(NOT_MODELS))


@functools.cache
def _architectures_in(model_type: str) -> Mapping[str, ModelClass]:
    """The ARCHITECTURES of one file; empty if there is no such file. Raises: UnsupportedModelError if it has none."""
    if model_type not in model_types():
        return {}
    module = importlib.import_module(f"quire.models.{model_type}")
    found: Mapping[str, ModelClass] | None = getattr(module, "ARCHITECTURES", None)
    if found is None:
        raise UnsupportedModelError(
            f"{module.__file__} has no ARCHITECTURES: end it with ARCHITECTURES = {{'<architecture>': TheClass}}, the "
            "name that config.json has in 'architectures'"
        )
    return found


def _scan() -> dict[str, ModelClass]:
    """All built-in architectures; imports every model file."""
    return {name: found for model_type in model_types() for name, found in _architectures_in(model_type).items()}


def _architectures(hf_config: Mapping[str, Any]) -> list[str]:
    """Return the names in `architectures`, or without that field those of the model type, here or in Transformers."""
    names = hf_config.get("architectures")
    if not names:
        model_type = str(hf_config.get("model_type"))
        names = list(_architectures_in(model_type)) or _architecture_in_transformers(model_type)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ModelFileError(
            f"the model's config names no architecture: architectures={hf_config.get('architectures')!r}, "
            f"model_type={hf_config.get('model_type')!r}; name one with hf_overrides={{'architectures': […]}}"
        )
    return names


def _fallback() -> ModelClass:
    if find_spec("transformers") is None:
        raise UnsupportedModelError(f"model_impl='transformers' needs Transformers: {install_command('hf')}")
    require_torch("Transformers' own module")
    return importlib.import_module("quire.models.hf_fallback").TransformersForCausalLM


def _architecture_in_transformers(model_type: str) -> list[str]:
    """Return the causal language model of a type, as a list; empty if Transformers has none or is not installed."""
    if find_spec("transformers") is None:
        return []
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    name = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return [] if name is None else [name]


def _load(architecture: str, model_class: ModelClass | str) -> ModelClass:
    if not isinstance(model_class, str):
        return model_class
    module_name, _, class_name = model_class.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            require_torch(f"{model_class}, the model of {architecture},")
        raise UnsupportedModelError(f"{architecture} is registered as {model_class}, which fails: {error}") from error
    _check_model_class(architecture, found)
    return found


def _check_model_class(architecture: str, model_class: ModelClass) -> None:
    needed = ("Config", "layout", "forward", "compute_logits")
    missing = [name for name in needed if not hasattr(model_class, name)]
    if missing or not isinstance(model_class, type):
        raise ConfigError(
            f"{model_class!r} for {architecture} is not a model class: it lacks {', '.join(missing) or 'a type'}; "
            "subclass quire.models.llama.LlamaForCausalLM, or see CONTRIBUTING.md"
        )
    try:
        inspect.signature(model_class).bind(None, SINGLE)
    except TypeError as error:
        raise ConfigError(
            f"{model_class!r} for {architecture} cannot be built: its __init__ must take (config, group), {error}"
        ) from None


def _labels(hf_config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a classification head's rows; Transformers makes two unless told otherwise."""
    named = hf_config.get("id2label")
    if not isinstance(named, dict):
        num_labels = HFConfigReader(hf_config).integer("num_labels", 2, maximum=MAX_LABELS)
        named = {index: f"LABEL_{index}" for index in range(num_labels)}
    if not all(re.fullmatch(r"\d{1,9}", str(index), re.ASCII) for index in named):
        raise wrong("id2label", named, "an object of names by number")
    return tuple(str(named[index]) for index in sorted(named, key=int))


def _generation_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The model's own sampling values, under the names of `SamplingParams`. Raises: ModelFileError for a bad value."""
    values = {name: generation_config.get(name) for name in MODEL_DEFAULTS}
    values["max_tokens"] = generation_config.get("max_new_tokens")
    given = {name: value for name, value in values.items() if value is not None}
    try:
        SamplingParams(**given)
    except InvalidParameterError as error:
        name = "max_new_tokens" if error.field == "max_tokens" else error.field
        raise ModelFileError(
            f"the model's generation_config.json has {name}={error.value!r}, which is not {error.limit}; "
            "correct it there"
        ) from None
    return given


def _token_ids(name: str, generation_config: Mapping[str, Any], hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids of this field; generation_config.json overrides config.json, as in Transformers."""
    value = generation_config.get(name)
    value = hf_config.get(name) if value is None else value
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise ModelFileError(f"the model's config has {name}={value!r}, which is not a token id or a list of them")
    return tuple(ids)
