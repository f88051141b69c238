"""`describe_config`, `name_tensors`: a Hugging Face model under the keys and tensor names of GGUF.

The opposite of `quire/weights/gguf_config.py` and `checkpoint.py`, of the same tables (`gguf_architectures.py`), for
decoders whose config these keys say completely; the caller reads the keys back and compares. Next to read:
`layout.py`, `quantize_source.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.errors import UnsupportedModelError
from quire.weight_map import Layout
from quire.weights.gguf_architectures import ARCHITECTURES, GRANITE4_DENSE, Architecture
from quire.weights.gguf_config import file_views
from quire.weights.gguf_fields import write_fields
from quire.weights.gguf_file import PREDICTORS
from quire.weights.gguf_recurrent import StateSizes
from quire.weights.gguf_rope import rope_keys
from quire.weights.weight_tensor import WeightTensor
from quire_workshop.gguf.layout import as_file, undone


def architecture_for(config: Mapping[str, Any]) -> tuple[str, Architecture]:
    """GGUF's name of a model, and what it stores. Raises: UnsupportedModelError."""
    model_type = str(config.get("model_type"))
    is_dense = not config.get("num_local_experts", 8) and config.get("position_embedding_type") == "rope"
    if model_type == "granitemoehybrid" and is_dense and "mamba" not in config.get("layer_types", ("mamba",)):
        return "granite", GRANITE4_DENSE
    for name, whole in ARCHITECTURES.items():
        for architecture in (whole, *(variant for *_, variant in whole.variants)):
            if architecture.model_type == model_type:
                return name, architecture
    raise UnsupportedModelError(
        f"model_type '{model_type}' is not written to GGUF here; if llama.cpp's convert_hf_to_gguf.py knows the "
        "model, convert it there, then quantise the result"
    )


def completed(config: Mapping[str, Any], read: Any) -> dict[str, Any]:
    """Return the config with defaults of its model, and with Llama's names of sizes. `read`: the model's `Config`."""
    _, architecture = architecture_for(config)
    fields = {field.name: field.value(config, read) for field in architecture.base if field.name}
    known = {name: value for name, value in fields.items() if value is not None}
    # Rotary scaling stretches the context; files have it as it is without.
    context_len = config.get("max_position_embeddings") or getattr(read, "context_len", None)
    ties = getattr(read, "tie_word_embeddings", None)
    return {**config, **known, "max_position_embeddings": context_len, "tie_word_embeddings": ties}


def describe_config(config: Mapping[str, Any], read: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the keys that say what the config says, and tensors of divisors of the rotary frequencies.

    `config`: with the model's defaults, see `completed`; `read`: the model's `Config`.
    Shapes: float32 `[D / 2]`. Raises: UnsupportedModelError; ModelFileError for missing sizes.
    """
    name, architecture = architecture_for(config)
    rope, factors = rope_keys(config, read)
    keys = {**rope, **write_fields(architecture.rows, config, read)}
    if count := getattr(read, "num_predictors", 0):
        keys |= {PREDICTORS: count, "block_count": keys["block_count"] + count}
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in keys.items()}}, factors


def name_tensors(
    config: Mapping[str, Any], read: Any, tensors: Mapping[str, WeightTensor], layout: Layout
) -> dict[str, tuple[str | None, list[WeightTensor]]]:
    """The stored tensors by GGUF name: the Hugging Face name of a single one, and the matrices, several for experts.

    `layout`: the model's. Raises: UnsupportedModelError for a tensor that has no GGUF name.
    """
    _, architecture = architecture_for(config)
    own = {name: tensors[stored] for name, stored in layout.used_names(tensors).items()}
    own = as_file(own, architecture, read, StateSizes.of(write_fields(architecture.rows, config, read)))
    if config.get("tie_word_embeddings"):
        own.pop("lm_head.weight", None)
    has_experts = any(".experts." in name for name in own)
    found: dict[str, tuple[str | None, list[WeightTensor]]] = {}
    used: set[str] = set()
    num_layers = config["num_hidden_layers"] + getattr(read, "num_predictors", 0)
    for name, hf_name in architecture.tensor_names.all(num_layers):
        parts = _parts(layout.own_name(hf_name), own)
        # Without experts, an MLP that has the name of a shared expert is none.
        if not parts or used.intersection(parts) or ("_shexp." in name and not has_experts):
            continue
        used |= set(parts)
        stored = [own[part] for part in parts]
        views = undone(file_views(name, math.prod(stored[0].shape[:1]), architecture, config))
        is_whole = parts == [layout.own_name(hf_name)]
        found[name] = (stored[0].name if is_whole else None, [each.viewed(views) for each in stored])
    if left := [name for name in own if name not in used]:
        raise UnsupportedModelError(f"tensor {own[left[0]].name} has no GGUF name here; use llama.cpp's converter")
    return found


def _parts(name: str, tensors: Mapping[str, WeightTensor]) -> list[str]:
    """Return the names of the tensors that a file has as this one: it, or the matrices of experts or of heads."""
    if name in tensors:
        return [name]
    stem, _, kind = name.rpartition(".")
    numbered = name if "*" in name else f"{stem}.*.{kind}"
    count = next(index for index in range(len(tensors) + 1) if numbered.replace("*", str(index)) not in tensors)
    return [numbered.replace("*", str(index)) for index in range(count)]
