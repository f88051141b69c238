"""Adapters of random values on disk, and the models that they make of their base when they are merged into it."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from quire.weights.gguf_fields import rotary_row_order

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Matrices = dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]


def random_matrices(base: Path, seed: int, rank: int = 4, modules: tuple[str, ...] = LINEAR) -> Matrices:
    """A and B by the names of weights."""
    random = np.random.default_rng(seed)
    return {
        name: (
            random.normal(0, 0.3, (rank, values.shape[1])).astype(np.float32),
            random.normal(0, 0.3, (values.shape[0], rank)).astype(np.float32),
        )
        for name, values in load_file(base / "model.safetensors").items()
        if name.removesuffix(".weight").rpartition(".")[2] in modules
    }


def write_peft(path: Path, matrices: Matrices, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    tensors = {}
    for name, (a, b) in matrices.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    save_file(tensors, path / "adapter_model.safetensors")
    rank = len(next(iter(matrices.values()))[0]) if matrices else 4
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(LINEAR), **config}
    (path / "adapter_config.json").write_text(json.dumps(fields))
    return path


def write_gguf(path: Path, matrices: Matrices, head_size: int, **metadata: str) -> Path:
    """The same as llama.cpp's converter writes it: rows of queries and keys in its order of rotated pairs."""
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
             "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"general.type": "adapter", "adapter.type": "lora", **metadata}.items():
        writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", 2.0 * len(next(iter(matrices.values()))[0]))
    for name, (a, b) in matrices.items():
        _, _, layer, _, module, _ = name.split(".")
        stored = b
        if module in ("q_proj", "k_proj"):
            stored = np.empty_like(b)
            stored[rotary_row_order(len(b), head_size)] = b
        writer.add_tensor(f"blk.{layer}.{names[module]}.weight.lora_a", a)
        writer.add_tensor(f"blk.{layer}.{names[module]}.weight.lora_b", stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_merged(path: Path, base: Path, matrices: Matrices, scale: float = 2.0) -> Path:
    """The base with W + scale · B A."""
    shutil.copytree(base, path)
    tensors = load_file(base / "model.safetensors")
    for name, (a, b) in matrices.items():
        tensors[name] = (tensors[name].astype(np.float64) + scale * (b.astype(np.float64) @ a)).astype(np.float32)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path
