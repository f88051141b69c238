"""`load_model`: a model class and a checkpoint to a model with its weights, in the compute type, on the device.

Each stored tensor is decoded straight into its place, so that beside the model only a few decoded tensors exist. A
model says what it needs by its parameters' names and by `stacked_params`, `renames` and `ignored_tensors`; nothing
here knows an architecture.
Next to read: `models/registry.py` for model classes, `weights/checkpoint.py` for tensors.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire.config import EngineConfig
from quire.errors import ModelFileError
from quire.kernels.registry import check_environment
from quire.layers.linear import pack_weights
from quire.models.registry import ModelRegistry
from quire.runtime.dtypes import TORCH_DTYPES
from quire.weights.checkpoint import Checkpoint
from quire.weights.progress import Progress, ignore_progress
from quire.weights.weight_tensor import WeightTensor

NUM_NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Placement:
    """A stored tensor becomes rows `first_row` … of a parameter."""

    tensor: WeightTensor
    parameter_name: str
    first_row: int


def load_model(config: EngineConfig, checkpoint: Checkpoint, progress: Progress | None = None) -> nn.Module:
    """Build the model of `config.model.hf_config` and fill it.

    Returns: a module in eval mode whose parameters need no gradient.
    Raises: ConfigError for a wrong `QUIRE_KERNELS` or `QUIRE_TRACE`; UnsupportedModelError; ModelFileError naming
    tensors that are missing, unexpected or of a wrong shape.
    """
    check_environment()
    dtype, device = TORCH_DTYPES[config.dtype], torch.device(config.device)
    model = build_empty_model(config.model.hf_config, dtype, device)
    parameters = dict(model.named_parameters())
    if config.options.load_format == "dummy":
        fill_with_random(parameters, config.options.seed)
    else:
        _fill(parameters, plan_placements(model, checkpoint.tensors), dtype, progress or ignore_progress)
    pack_weights(model)
    return model


def build_empty_model(hf_config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model with uninitialised parameters of `dtype` on `device`; buffers keep the type the model gave them."""
    model = make_model(hf_config)
    # By identity, so that parameters which the model ties stay tied.
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(old) not in replaced:
                empty = torch.empty(old.shape, dtype=dtype, device=device)
                replaced[id(old)] = nn.Parameter(empty, requires_grad=False)
            setattr(module, name, replaced[id(old)])
    model.to(device)
    return model.eval()


def make_model(hf_config: Mapping[str, Any]) -> nn.Module:
    """An instance of the class registered for `hf_config["architectures"]`. Raises: UnsupportedModelError."""
    model_class = ModelRegistry.resolve(hf_config)
    model: nn.Module = model_class(model_class.Config.from_hf(hf_config))
    return model


def plan_placements(model: Any, tensors: Mapping[str, WeightTensor]) -> list[Placement]:
    """Where each stored tensor goes. Every parameter must be covered exactly, and every tensor used or ignored.

    Raises: ModelFileError.
    """
    parameters = dict(model.named_parameters())
    # Further names of tied parameters: a checkpoint may store these a second time.
    aliases = dict(model.named_parameters(remove_duplicate=False)).keys() - parameters.keys()
    ignored = [re.compile(pattern) for pattern in getattr(model, "ignored_tensors", ())]
    parts_of: dict[str, dict[int, WeightTensor]] = {name: {} for name in parameters}
    unexpected = []
    for name, tensor in tensors.items():
        target, part = target_of(name, model.renames, model.stacked_params)
        if target in parts_of:
            parts_of[target][part] = tensor
        elif target not in aliases and not any(pattern.search(name) for pattern in ignored):
            unexpected.append(name)
    missing: list[str] = []
    placements: list[Placement] = []
    for target, found in parts_of.items():
        expected = part_names(target, model.stacked_params)
        missing.extend(part for index, part in enumerate(expected) if index not in found)
        if len(found) == len(expected):
            placements.extend(_stack(target, parameters[target], [found[index] for index in range(len(expected))]))
    _complain("lacks", missing)
    _complain("has unexpected", unexpected)
    return placements


def target_of(name: str, renames: Mapping[str, str], stacked: Mapping[str, tuple[str, ...]]) -> tuple[str, int]:
    """A checkpoint's name to a parameter's name, and which part of a stacked parameter it is (0 if not stacked)."""
    for prefix, replacement in renames.items():
        if name.startswith(prefix):
            name = replacement + name[len(prefix) :]
            break
    segments = name.split(".")
    for stacked_name, part_list in stacked.items():
        for position, segment in enumerate(segments):
            if segment in part_list:
                whole = [*segments[:position], stacked_name, *segments[position + 1 :]]
                return ".".join(whole), part_list.index(segment)
    return name, 0


def part_names(target: str, stacked: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The names of the parts which make up a parameter: itself, unless it is stacked."""
    segments = target.split(".")
    for stacked_name, part_list in stacked.items():
        if stacked_name in segments:
            position = segments.index(stacked_name)
            return [".".join([*segments[:position], part, *segments[position + 1 :]]) for part in part_list]
    return [target]


def fill_with_random(parameters: Mapping[str, nn.Parameter], seed: int, *, first_index: int = 0) -> None:
    """Seeded weights that keep activations of order one: matrices N(0, 1/columns), vectors 1 or, for biases, 0.

    Mutates: parameters.
    """
    for index, (name, parameter) in enumerate(sorted(parameters.items()), first_index):
        if parameter.ndim < 2:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        generator = torch.Generator(parameter.device).manual_seed(seed * 1_000_003 + index)
        parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)


def _stack(target: str, parameter: nn.Parameter, parts: list[WeightTensor]) -> Iterator[Placement]:
    num_rows = sum(part.shape[0] if part.shape else 0 for part in parts)
    if (num_rows, *parts[0].shape[1:]) != tuple(parameter.shape) or len({part.shape[1:] for part in parts}) > 1:
        stored = ", ".join(f"{part.name} {list(part.shape)}" for part in parts)
        raise ModelFileError(
            f"the checkpoint has {stored}, but the model's configuration makes {target} {list(parameter.shape)}:"
            " configuration and weights do not belong together"
        )
    first_row = 0
    for part in parts:
        yield Placement(part, target, first_row)
        first_row += part.shape[0]


def _complain(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - NUM_NAMES_SHOWN} more" if len(names) > NUM_NAMES_SHOWN else ""
        noun = "tensor" if len(names) == 1 else "tensors"
        shown = ", ".join(names[:NUM_NAMES_SHOWN])
        raise ModelFileError(
            f"the checkpoint {what} {noun} {shown}{more}: it is incomplete or of another architecture than it says"
        )


def _fill(
    parameters: Mapping[str, nn.Parameter], placements: list[Placement], dtype: torch.dtype, progress: Progress
) -> None:
    total = sum(placement.tensor.num_bytes for placement in placements)
    done = 0
    # One after another: decoding is parallel inside, and a second tensor at a time only doubles the memory beside.
    for placement in placements:
        tensor = placement.tensor
        rows = parameters[placement.parameter_name].data.narrow(0, placement.first_row, tensor.shape[0])
        rows.copy_(tensor.to_torch(dtype))
        done += tensor.num_bytes
        progress("loading weights", done, total)
