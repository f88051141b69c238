"""`write_random_adapter`: a LoRA adapter of random values on disk, for measurements where none is at hand.

Next to read: `adapters.py`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from quire import nn
from quire.layers.linear import Linear
from quire.lazy_torch import on_meta
from quire.runtime.loader import make_model
from quire.weight_map import weight_map

SPREAD = 0.02
"""Standard deviation of A and B; models are initialised with it too."""


def linear_shapes(hf_config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of every stored linear layer but the head, by the name of its module."""
    with on_meta():
        model = make_model(hf_config)
    sources, shapes = weight_map(model, ()).sources, {}
    for path, module in nn.named_modules(model):
        if not isinstance(module, Linear) or path.rpartition(".")[2] == "lm_head":
            continue
        stored = sources[f"{path}.weight"]
        num_outputs, num_inputs = module.weight.shape
        # A layer that stacks stored tensors says how many outputs each of them has.
        parts = getattr(module, "partitions", {}).get("weight") if len(stored) > 1 else None
        sizes = [num_outputs] if parts is None else [part.whole for part in parts.rows]
        for source, size in zip(stored, sizes, strict=True):
            shapes[source.name.removesuffix(".weight")] = size, num_inputs
    return shapes


def num_parameters(shapes: Mapping[str, tuple[int, int]], rank: int) -> int:
    """Return the values of an adapter's matrices: R (N + I) for each layer."""
    return sum(rank * (num_outputs + num_inputs) for num_outputs, num_inputs in shapes.values())


def write_random_adapter(folder: Path, shapes: Mapping[str, tuple[int, int]], rank: int, seed: int) -> Path:
    """Write an adapter of these layers as PEFT does, in fp16. Returns: `folder`, which is made."""
    random, tensors = np.random.default_rng(seed), {}
    for module, (num_outputs, num_inputs) in shapes.items():
        for matrix, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
            values = random.standard_normal(shape, np.float32) * np.float32(SPREAD)
            tensors[f"base_model.model.{module}.lora_{matrix}.weight"] = values.astype(np.float16)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
