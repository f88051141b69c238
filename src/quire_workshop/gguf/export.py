"""A Hugging Face model under the keys and tensor names of GGUF, and any model as the tensors and keys of one that is to
be quantised.

The opposite of `quire/weights/gguf_config.py` and `checkpoint.py`, of the same tables (`gguf_architectures.py`), for
decoders whose config these keys say completely; the caller reads the keys back and compares. Next to read:
`quantize.py`.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ModelFileError, UnsupportedModelError, printable
from quire.weight_map import Layout, Offset, Rows, Transpose, View
from quire.weights.gguf_architectures import ARCHITECTURES, GRANITE4_DENSE, Architecture
from quire.weights.gguf_config import file_views, sampling_keys, translate_config
from quire.weights.gguf_fields import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, TensorNames, write_fields
from quire.weights.gguf_file import DEFAULT_ALIGNMENT, PREDICTORS, GGUFFile, GGUFTensor
from quire.weights.gguf_recurrent import StateSizes, value_heads_in_turns
from quire.weights.gguf_rope import rope_keys
from quire.weights.weight_tensor import BLOCK_FORMATS, FLOATS, NVFP4, WeightTensor, decode, row_bytes
from quire_workshop.gguf.quantize import ModelToQuantize, SourceTensor
from quire_workshop.gguf.writer import key_value

# --- Tensors of a directory, taken apart and stored as in GGUF files ------------------------------
# They still have Hugging Face's names. The opposite of `quire/weights/gguf_recurrent.py`, and of what models say about
# their checkpoints. Source: llama.cpp's converter.

Named = Iterator[tuple[str, WeightTensor]]


def undone(views: tuple[View, ...]) -> tuple[View, ...]:
    """Return the views that make the file's tensor of Hugging Face's."""
    opposites: dict[type, Callable[[Any], View]] = {
        Rows: lambda view: Rows(np.argsort(view.order)),
        Offset: lambda view: Offset(-view.value),
        Transpose: lambda view: view,
    }
    return tuple(opposites[type(view)](view) for view in reversed(views))


def as_file(
    tensors: Mapping[str, WeightTensor], architecture: Architecture, read: Any, sizes: StateSizes | None
) -> dict[str, WeightTensor]:
    """Return the tensors by name; little of them is read.

    `read`: the model's `Config`; `sizes`: of layers with state, None for models without. Raises: UnsupportedModelError.
    """
    found = {}
    for name, tensor in tensors.items():
        for part_name, part in _taken_apart(name, tensor, architecture, read):
            if len(part.shape) == 3 and part_name.endswith(("conv.weight", "conv1d.weight")):
                channels, _, taps = part.shape
                part = replace(part, shape=(channels, taps), stored=part.stored.reshape(channels, -1))
            found[part_name] = part if sizes is None else _of_states(part_name, part, architecture, sizes)
    return found


def _taken_apart(name: str, tensor: WeightTensor, architecture: Architecture, read: Any) -> Named:
    kind = name.removesuffix(".weight").rpartition(".")[2]
    if ".experts." in name and kind.startswith(("gate_up_proj", "down_proj")) and len(tensor.shape) > 1:
        if "ffn_gate_up_exps.weight" in architecture.names or name.endswith(
            ".weight"
        ):  # Gemma 4's are whole; those of one expert
            yield name, tensor
        else:
            yield from _experts(name, tensor, architecture.model_type == "gpt_oss")
    elif kind == "gate_up_proj" and architecture.model_type.startswith("granite"):
        yield from _halves(name.replace("gate_up_proj.weight", "{}_proj.weight"), tensor)
    elif kind == "kv_b_proj":
        yield from _latents(name, tensor, read.num_heads, read.nope_size)
    elif kind == "in_proj_qkvz":
        yield from _delta_net(name, tensor, read)
    else:
        yield name, tensor


def _experts(name: str, stack: WeightTensor, is_gpt_oss: bool) -> Named:
    """The matrices `[X, rows, columns]` or biases `[X, rows]` of all experts.

    gpt-oss has gates and ups in turns, and inputs as rows where weights are not quantised.
    """
    prefix, _, kind = name.removesuffix("_bias").rpartition(".")
    end = "bias" if name.endswith("_bias") else "weight"
    for index, part in enumerate(stack.unstacked()):
        if end == "bias":
            part = replace(part, stored=part.stored.reshape(1, -1))
        elif is_gpt_oss and part.format in FLOATS:
            part = part.transposed()
        if kind == "down_proj":
            yield f"{prefix}.{index}.down_proj.{end}", part
        else:
            yield from _halves(f"{prefix}.{index}.{{}}_proj.{end}", part, in_turns=is_gpt_oss)


def _halves(name: str, tensor: WeightTensor, *, in_turns: bool = False) -> Named:
    """Gates and ups, which are the rows of one tensor."""
    rows = np.arange(tensor.shape[0])
    for kind, half in zip(("gate", "up"), rows.reshape(-1, 2).T if in_turns else np.split(rows, 2), strict=True):
        yield name.format(kind), tensor.with_rows(half)


def _latents(name: str, tensor: WeightTensor, num_heads: int, nope_size: int) -> Named:
    """The projections of latents to keys `[R, N]`, inputs last, and to values `[V, R]`, of each head."""
    if tensor.format not in FLOATS:
        values = tensor.to_numpy().astype(np.float16).view(np.uint8)
        tensor = WeightTensor(tensor.name, tensor.shape, "F16", values)
    size = tensor.shape[0] // num_heads
    for head in range(num_heads):
        keys = tensor.part(slice(head * size, head * size + nope_size), slice(None))
        values_part = tensor.part(slice(head * size + nope_size, (head + 1) * size), slice(None))
        yield name.replace("kv_b_proj", f"k_b_proj.{head}"), keys.transposed()
        yield name.replace("kv_b_proj", f"v_b_proj.{head}"), values_part


def _delta_net(name: str, tensor: WeightTensor, read: Any) -> Named:
    """Queries, keys and values of all heads, and their gates z, which are stored per key head."""
    values = read.num_value_heads // read.num_key_heads * read.value_size
    rows = np.arange(tensor.shape[0]).reshape(read.num_key_heads, -1)
    *qkv, z = np.split(rows, np.cumsum([read.key_size, read.key_size, values]), axis=1)
    yield name.replace("qkvz", "qkv"), tensor.with_rows(np.concatenate([part.reshape(-1) for part in qkv]))
    yield name.replace("qkvz", "z"), tensor.with_rows(z.reshape(-1))


def _of_states(name: str, tensor: WeightTensor, architecture: Architecture, sizes: StateSizes) -> WeightTensor:
    """Rates are stored instead of their logarithms, and vectors of state spaces as columns."""
    if name.endswith("A_log"):
        rates = -np.exp(tensor.to_numpy(), dtype=np.float64).astype(np.float32)
        tensor = replace(tensor, format="F32", stored=rates.view(np.uint8).reshape(1, -1))
    if "linear_attn." not in name and name.endswith((".A_log", ".D", "mixer.norm.weight", "mamba.norm.weight")):
        num_rows = sizes.num_groups if name.endswith("weight") else tensor.shape[0]
        shape = (num_rows, math.prod(tensor.shape) // num_rows)
        return replace(tensor, shape=shape, stored=tensor.stored.reshape(num_rows, -1))
    return value_heads_in_turns(tensor, sizes) if architecture.has_value_heads_in_turns else tensor


# --- Keys and names -------------------------------------------------------------------------------


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


# --- A model that is to be quantised --------------------------------------------------------------

FP32 = re.compile(r"ffn_gate_inp|ssm_[ad]$|ssm_norm|conv")


def from_gguf(file: GGUFFile, recommended_sampling: Mapping[str, float] | None = None) -> ModelToQuantize:
    """A GGUF file of any architecture. Raises: ModelFileError for a file that is no model.

    `recommended_sampling`: defaults of `SamplingParams` that the file may lack.
    """
    architecture = file.architecture

    def count(name: str, default: int) -> int:
        value: Any = file.metadata.get(f"{architecture}.{name}", default)
        largest = max(value) if isinstance(value, list) and value else value
        return largest if type(largest) is int and largest > 0 else default

    if "token_embd.weight" not in file.tensors:
        raise ModelFileError(f"{file.path}: there is no matrix 'token_embd.weight': no model to quantise")
    num_heads = count("attention.head_count", 1)
    names = ARCHITECTURES[architecture].tensor_names if architecture in ARCHITECTURES else TensorNames()
    return ModelToQuantize(
        keys={
            **{key: key_value(key, value) for key, value in sampling_keys(recommended_sampling or {}).items()},
            **{key: file.data[place].tobytes() for key, place in file.key_places.items()},
        },
        tensors=tuple(_tensor(file, stored, names) for stored in file.tensors.values()),
        num_layers=count("block_count", 1),
        num_heads=num_heads,
        num_kv_heads=count("attention.head_count_kv", num_heads),
        num_experts=count("expert_count", 0),
        alignment=file.metadata.get("general.alignment", DEFAULT_ALIGNMENT),
    )


def _tensor(file: GGUFFile, stored: GGUFTensor, names: TensorNames) -> SourceTensor:
    if stored.format is NVFP4:
        raise UnsupportedModelError(
            f"{file.path}: '{printable(stored.name)}' is stored as NVFP4, which is not quantised again: use a "
            "file with floats, or the original model"
        )
    rows = file.rows(stored)
    hf_name = names.huggingface(stored.name)

    def read(first: int, last: int) -> np.ndarray:
        return decode(rows[first:last], stored.format.name)

    return SourceTensor(stored.name, stored.shape, stored.format.name, read, lambda: rows, hf_name)


def from_tensors(
    keys: Mapping[str, Any],
    tensors: Mapping[str, tuple[str | None, list[WeightTensor]]],
    factors: Mapping[str, np.ndarray],
) -> ModelToQuantize:
    """A Hugging Face model under GGUF's names: see `export.py`. `factors`: rotary divisors by name, `[D / 2]`."""
    named = dict(tensors)
    for each, values in factors.items():
        named[each] = (None, [WeightTensor(each, values.shape, "F32", values.view(np.uint8).reshape(1, -1))])
    name = keys["general.architecture"]
    num_heads = keys[f"{name}.attention.head_count"]
    num_kv_heads = keys.get(f"{name}.attention.head_count_kv", num_heads)
    return ModelToQuantize(
        keys={key: key_value(key, value) for key, value in keys.items()},
        tensors=tuple(_stacked(name, *found) for name, found in named.items()),
        num_layers=keys[f"{name}.block_count"],
        num_heads=num_heads,
        num_kv_heads=(max(num_kv_heads) if isinstance(num_kv_heads, list) else num_kv_heads) or 1,
        num_experts=keys.get(f"{name}.expert_count", 0),
    )


def _stacked(name: str, hf_name: str | None, parts: list[WeightTensor]) -> SourceTensor:
    """Vectors, routers and small matrices of states are fp32, as llama.cpp expects them. Parts are of experts or heads
    if there is no `hf_name`."""
    first = parts[0]
    shape = first.shape if len(parts) == 1 else (len(parts), *first.shape)
    is_float = first.format in (*FLOATS, "MXFP4") and not first.offset
    is_kept = is_float and len(first.shape) >= 2 and FP32.search(name) is None
    rows = math.prod(first.shape[:-1])

    def read(start: int, end: int) -> np.ndarray:
        part = parts[start // rows]
        if len(part.shape) != 2:
            return part.to_numpy().reshape(-1, part.shape[-1])[start - start // rows * rows : end]
        at = start // rows * rows
        return part.part(slice(start - at, end - at), slice(None)).to_numpy()

    def copy() -> np.ndarray:
        stored = [part.raw if is_kept else part.to_numpy().astype("<f4").view(np.uint8).reshape(-1) for part in parts]
        return stored[0] if len(stored) == 1 else np.concatenate([each.reshape(-1) for each in stored])

    return SourceTensor(name, shape, first.format if is_kept else "F32", read, copy, hf_name)


def read_back(source: ModelToQuantize, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json that a reader of the file will find. Raises: as `translate_config`."""
    tensors, pieces, offset = {}, [], 0
    for tensor in source.tensors:
        block = BLOCK_FORMATS[tensor.format]
        num_bytes = math.prod(tensor.shape[:-1]) * row_bytes(block, tensor.shape[-1])
        is_read = tensor.name in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
        tensors[tensor.name] = GGUFTensor(tensor.name, tensor.shape, block, offset, num_bytes if is_read else 0)
        if is_read:
            pieces.append(tensor.copy().reshape(-1))
            offset += num_bytes
    data = np.concatenate(pieces) if pieces else np.empty(0, np.uint8)
    return translate_config(GGUFFile(Path("the model as GGUF"), 3, dict(keys), tensors, data))
