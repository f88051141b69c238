"""GGUF files to test with: whole tiny models, by the gguf package's writer.

Single header fields byte by byte are in `tests.weights.gguf_cases.py`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

from quire.weights.weight_tensor import BLOCK_FORMATS

WIDTH, MLP_WIDTH, VOCAB_SIZE, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS = 64, 96, 40, 2, 4, 2


@dataclass
class TinyModel:
    """A random model of a few kilobytes. `changes` replaces metadata (None removes a key); `tensors` likewise."""

    architecture: str = "llama"
    format: str = "F32"
    tied: bool = False
    bias: bool = False
    head_size: int = WIDTH // NUM_HEADS
    changes: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray | None] = field(default_factory=dict)

    def metadata(self) -> dict[str, Any]:
        prefix = self.architecture
        values: dict[str, Any] = {
            f"{prefix}.context_length": 128,
            f"{prefix}.embedding_length": WIDTH,
            f"{prefix}.block_count": NUM_LAYERS,
            f"{prefix}.feed_forward_length": MLP_WIDTH,
            f"{prefix}.attention.head_count": NUM_HEADS,
            f"{prefix}.attention.head_count_kv": NUM_KV_HEADS,
            f"{prefix}.attention.layer_norm_rms_epsilon": 1e-6,
            f"{prefix}.rope.freq_base": 10000.0,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }
        if self.head_size != WIDTH // NUM_HEADS:
            values[f"{prefix}.attention.key_length"] = self.head_size
            values[f"{prefix}.attention.value_length"] = self.head_size
        values |= self.changes
        return {key: value for key, value in values.items() if value is not None}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        queries, keys = NUM_HEADS * self.head_size, NUM_KV_HEADS * self.head_size
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB_SIZE, WIDTH), "output_norm.weight": (WIDTH,)}
        if not self.tied:
            shapes["output.weight"] = (VOCAB_SIZE, WIDTH)
        for layer in range(NUM_LAYERS):
            parts: dict[str, tuple[int, ...]] = {
                "attn_norm.weight": (WIDTH,),
                "attn_q.weight": (queries, WIDTH),
                "attn_k.weight": (keys, WIDTH),
                "attn_v.weight": (keys, WIDTH),
                "attn_output.weight": (WIDTH, queries),
                "ffn_norm.weight": (WIDTH,),
                "ffn_gate.weight": (MLP_WIDTH, WIDTH),
                "ffn_up.weight": (MLP_WIDTH, WIDTH),
                "ffn_down.weight": (WIDTH, MLP_WIDTH),
            }
            if self.bias:
                for name in ("attn_q", "attn_k", "attn_v", *(("attn_output",) if self.architecture == "llama" else ())):
                    parts[f"{name}.bias"] = parts[f"{name}.weight"][:1]
            if self.architecture == "qwen3":
                parts |= {"attn_q_norm.weight": (self.head_size,), "attn_k_norm.weight": (self.head_size,)}
            shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
        return shapes

    def arrays(self) -> dict[str, np.ndarray]:
        """The fp32 values by GGUF name."""
        random = np.random.default_rng(0)
        values: dict[str, np.ndarray | None] = {
            name: random.standard_normal(shape).astype(np.float32) for name, shape in self.shapes().items()
        }
        values |= self.tensors
        return {name: value for name, value in values.items() if value is not None}

    def write(self, path: Path) -> dict[str, np.ndarray]:
        """Write the file; returns the fp32 values before quantisation, by GGUF name."""
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.metadata().items():
            add_value(writer, key, value)
        written = self.arrays()
        for name, value in written.items():
            kind = gguf.GGMLQuantizationType[self.format if value.ndim > 1 else "F32"]
            writer.add_tensor(name, quantize(value, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return written


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def random_rows(format_name: str, num_rows: int, blocks_per_row: int, *, seed: int = 0) -> np.ndarray:
    """Any bytes at all as blocks: every scale, also infinite and not-a-number ones. Shapes: uint8 `[rows, bytes]`."""
    width = blocks_per_row * BLOCK_FORMATS[format_name].block_bytes
    return np.random.default_rng(seed).integers(0, 256, (num_rows, width), dtype=np.uint8)
