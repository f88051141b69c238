"""`write_random_adapter`: a LoRA adapter of random values on disk, for measurements where none is at hand.

Next to read: `adapters.py`.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SPREAD = 0.02
"""Standard deviation of A and B; models are initialised with it too."""


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
