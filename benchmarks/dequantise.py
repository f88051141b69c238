"""A GGUF file as a Hugging Face directory in a plain dtype: the model for peers that cannot read GGUF.

Every weight is decoded to float32 by Quire's reader and rounded once.
"""

import json
from pathlib import Path
from typing import Any

import platformdirs
import torch
from safetensors.torch import save_file

from quire.text.gguf_tokenizer import build_gguf_tokenizer
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.sources import resolve_source

WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer_config.json"


def dequantised(model: str, dtype: str = "bfloat16", to: Path | None = None) -> Path:
    """The directory with the weights of `model` in `dtype`, made when it is not there yet."""
    files = resolve_source(model)
    if files.kind != "gguf":
        return files.path
    directory = to or Path(platformdirs.user_cache_dir("quire")) / "benchmarks" / f"{files.path.stem}-{dtype}"
    if not (directory / WEIGHTS).exists():
        _write(open_checkpoint(files), dtype, directory)
    if not (directory / TOKENIZER).exists():
        _write_tokenizer(open_checkpoint(files, with_tensors=False), directory)
    return directory


def _write(checkpoint: Checkpoint, dtype: str, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {**checkpoint.hf_config, "torch_dtype": dtype, "dtype": dtype}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    if checkpoint.generation_config:
        (directory / "generation_config.json").write_text(json.dumps(dict(checkpoint.generation_config), indent=1))
    tensors = {name: tensor.to_torch(getattr(torch, dtype)).contiguous() for name, tensor in checkpoint.tensors.items()}
    unfinished = directory / f"{WEIGHTS}.part"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.rename(directory / WEIGHTS)


def _write_tokenizer(checkpoint: Checkpoint, directory: Path) -> None:
    """With the chat template, for servers."""
    build_gguf_tokenizer(checkpoint.metadata).backend.save(str(directory / "tokenizer.json"))
    found = checkpoint.metadata
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos"):
        if (token_id := found.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{name}_token"] = found["tokenizer.ggml.tokens"][token_id]
    if template := found.get("tokenizer.chat_template"):
        config["chat_template"] = template
    (directory / TOKENIZER).write_text(json.dumps(config, indent=1))
