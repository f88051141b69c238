"""`as_file`: a directory's tensors taken apart and stored as in GGUF files, still under Hugging Face's names.

The opposite of `quire/weights/gguf_recurrent.py`, and of what models say about their checkpoints. Source: llama.cpp's
converter. Next to read: `export.py`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from quire.weight_map import Offset, Rows, Transpose, View
from quire.weights.gguf_architectures import Architecture
from quire.weights.gguf_recurrent import StateSizes, value_heads_in_turns
from quire.weights.weight_tensor import FLOATS, WeightTensor

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
