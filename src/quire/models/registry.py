"""`ModelRegistry`: architecture names to model classes, and a model's `config.json` to `config.ModelConfig`.

A file `models/<model_type>.py` with an `ARCHITECTURES` table is found by existing. Models from outside come by
`ModelRegistry.register_model` or, from installed packages, by entry points of the group `quire.models`.
It must not know weights or tensors' values. Next to read: `llama.py`.
"""

import functools
import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

import torch

from quire.config import ModelConfig, canonical_dtype
from quire.errors import ConfigError, ModelFileError, UnsupportedModelError, nearest
from quire.types import KVCacheGroup, KVCacheSpec

NOT_MODELS = ("__init__", "registry", "hf_config")
ENTRY_POINT_GROUP = "quire.models"
GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of generation_config.json that become defaults of `SamplingParams`."""
ModelClass = Any
"""A class as `llama.LlamaForCausalLM` is one: an nn.Module with Config, stacked_params, renames and compute_logits."""


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
    def resolve(cls, hf_config: Mapping[str, Any]) -> ModelClass:
        """The class for a model's config: registered, else built in, else from an entry point.

        Raises: UnsupportedModelError listing what is supported; ModelFileError if the config names no architecture.
        """
        names = architectures_of(hf_config)
        for name in names:
            if name in cls._registered:
                return _load(name, cls._registered[name])
        built_in = built_in_architectures_of(str(hf_config.get("model_type", "")))
        for name in names:
            found = built_in.get(name) or _scan().get(name)
            if found is not None:
                return found
        for name in names:
            for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
                return _load(name, point.value)
        supported = cls.supported()
        raise UnsupportedModelError(
            f"architecture {', '.join(names)} is not supported{nearest(names[0], supported)}; "
            f"supported are {', '.join(supported)}. Others can be added with ModelRegistry.register_model"
        )

    @classmethod
    def supported(cls) -> list[str]:
        """Names of all architectures, sorted."""
        external = [point.name for point in entry_points(group=ENTRY_POINT_GROUP)]
        return sorted({*cls._registered, *_scan(), *external})

    @classmethod
    def built_in(cls) -> dict[str, ModelClass]:
        """The architectures of this package. Imports all model files."""
        return dict(_scan())

    @classmethod
    def make_model_config(
        cls,
        hf_config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> ModelConfig:
        """What the engine must know of a model. `overrides` replace fields of `hf_config` first; None removes one.

        Raises: UnsupportedModelError, ModelFileError.
        """
        merged = {**hf_config, **(overrides or {})}
        merged = {name: value for name, value in merged.items() if value is not None or name not in (overrides or {})}
        generation = generation_config or {}
        model_class = cls.resolve(merged)
        config = model_class.Config.from_hf(merged)
        return ModelConfig(
            architecture=next((name for name in architectures_of(merged)), model_class.__name__),
            hf_config=merged,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            context_len=config.context_len,
            num_parameters=count_parameters(model_class, config),
            kv_cache_groups=group_layers(config.kv_specs()),
            checkpoint_dtype=_checkpoint_dtype(merged),
            bos_token_id=_token_ids("bos_token_id", generation, merged)[:1][0]
            if _token_ids("bos_token_id", generation, merged)
            else None,
            eos_token_ids=_token_ids("eos_token_id", generation, merged),
            generation_defaults={name: generation[name] for name in GENERATION_FIELDS if name in generation},
        )
