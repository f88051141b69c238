"""`load_model`: a model class and a checkpoint to the model of one rank as PyTorch tensors, which runs op by op.

Each stored tensor is decoded straight into its place. Next to read: `loader.py` for the places, `forward.py`, which
runs the model.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from quire import nn
from quire.config import EngineConfig
from quire.kernels.registry import check_environment
from quire.layers.group import SINGLE, Group
from quire.runtime.fallback import load_fallback
from quire.runtime.loader import ModelShare, make_share, random_weights
from quire.weights.checkpoint import Checkpoint
from quire.weights.model_files import Progress, ignore_progress


def load_model(
    config: EngineConfig, checkpoint: Checkpoint, progress: Progress | None = None, group: Group = SINGLE
) -> Any:
    """Build this rank's share of the model of `config.model.hf_config` and fill it.

    Returns: a module in eval mode whose parameters need no gradient.
    Raises: ConfigError for a wrong `QUIRE_KERNELS` or `QUIRE_TRACE`, or for a group that does not fit the model;
    UnsupportedModelError; ModelFileError naming tensors that are missing, unexpected or of a wrong shape.
    """
    check_environment()
    if config.model.implementation == "transformers" and config.options.load_format != "dummy":
        return load_fallback(config, checkpoint.tensors)
    share = make_share(config, checkpoint, group)
    dtype, model = getattr(torch, config.dtype), share.model
    # Only a slice of a vocabulary has rows that are never filled.
    give_memory(model, dtype, torch.device(config.device), torch.empty if group.size == 1 else torch.zeros)
    parameters = dict(nn.named_parameters(model))
    share = replace(share, parameters=parameters)  # those of torch.nn's modules had memory too
    fill_tensors(config, share, {name: each.data for name, each in parameters.items()}, progress or ignore_progress)
    return model


def fill_tensors(
    config: EngineConfig, share: ModelShare, tensors: Mapping[str, torch.Tensor], progress: Progress
) -> None:
    """Read the stored tensors of a rank's share, or make random ones. Mutates: tensors, by the parameters' names."""
    if config.options.load_format == "dummy":
        for name, values in random_weights(share, config.options.seed):
            tensors[name][: len(values)] = torch.from_numpy(values)
    total, done = sum(item.tensor.num_bytes for item in share.placements), 0
    for item in share.placements:
        target, rows = tensors[item.parameter_name], slice(item.first_row, item.first_row + item.tensor.shape[0])
        target[rows] = item.tensor.to_torch(target.dtype)
        done += item.tensor.num_bytes
        progress("loading weights", done, total)


def give_memory(model: Any, dtype: torch.dtype, device: torch.device, allocate: Callable[..., torch.Tensor]) -> Any:
    """Put tensors in the places of all parameters of a model, and return it; buffers keep their types."""
    # By identity, so that parameters which the model ties stay tied.
    replaced, types = dict[int, Any](), nn.parameter_types()
    for _, module in list(nn.named_modules(model)):
        for name, old in list(nn.attributes(module)):
            if isinstance(old, types):
                if id(old) not in replaced:
                    values = allocate(tuple(old.shape), dtype=dtype, device=device)
                    replaced[id(old)] = torch.nn.Parameter(values, requires_grad=False)
                setattr(module, name, replaced[id(old)])
        if isinstance(module, torch.nn.Module):
            module.to(device).eval()
    return model
