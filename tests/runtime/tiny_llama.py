"""A real architecture with random weights, small enough for hundreds of steps a second."""

from pathlib import Path
from typing import Any

from quire.config import EngineConfig, EngineOptions, Hardware
from quire.models.registry import ModelRegistry
from quire.resolve import resolve
from quire.weights.checkpoint import Checkpoint
from quire.weights.sources import ModelFiles

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tiny_llama(**options: Any) -> tuple[EngineConfig, Checkpoint]:
    """Return a resolved configuration and a checkpoint without tensors: weights are dummies."""
    chosen = {"load_format": "dummy", "dtype": "float32", "block_size": 4, "num_blocks_override": 128, **options}
    chosen.setdefault("max_num_seqs", min(16, chosen.get("max_num_batched_tokens", 16)))
    device = chosen.get("device", "cpu")
    hardware = Hardware(device, 2**33, 2**33, has_fast_bfloat16=False, num_threads=1, num_devices=8)
    config = resolve(EngineOptions(**chosen), hardware, ModelRegistry.make_model_config(TINY_LLAMA))
    files = ModelFiles(name="tiny", path=Path("tiny"), kind="hf", origin="test")
    return config, Checkpoint(files, TINY_LLAMA)
