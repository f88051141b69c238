"""GGUF files with random weights in the shapes of published models, for measuring speed: their text is noise.

Blocks are random bits with scales that give weights a standard deviation of 0.02. The tensors' formats are those that
llama.cpp's quantiser chooses, and the vocabulary has the published size: SmolLM2's tokenizer and unused tokens.
`benchmarks.peers --model qwen3-1.7b:Q4_K_M` makes such a file when it is not there yet. Next to read: `peers.py`.
"""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from quire.weights.gguf_file import read_gguf
from quire.weights.sources import resolve_source
from quire.weights.weight_tensor import BLOCK_FORMATS

DIRECTORY = Path(tempfile.gettempdir()) / "models"
STD = 0.02
CHUNK_BYTES = 64 << 20
UNUSED_TOKEN = 5
TOKENIZER = "smollm2"


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3 model whose head is its embedding (config.json of Qwen/Qwen3-…)."""

    width: int
    num_layers: int
    num_heads: int
    mlp_width: int
    num_kv_heads: int = 8
    head_size: int = 128
    vocab_size: int = 151936

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes in torch's order."""
        queries, keys = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        yield "token_embd", (self.vocab_size, self.width)
        yield "output_norm", (self.width,)
        for layer in range(self.num_layers):
            for part, shape in {
                "attn_norm": (self.width,), "attn_q": (queries, self.width), "attn_q_norm": (self.head_size,),
                "attn_k": (keys, self.width), "attn_k_norm": (self.head_size,), "attn_v": (keys, self.width),
                "attn_output": (self.width, queries), "ffn_norm": (self.width,),
                "ffn_gate": (self.mlp_width, self.width), "ffn_up": (self.mlp_width, self.width),
                "ffn_down": (self.width, self.mlp_width),
            }.items():  # fmt: skip
                yield f"blk.{layer}.{part}", shape


SHAPES = {
    "qwen3-0.6b": Shape(1024, 28, 16, 3072),
    "qwen3-1.7b": Shape(2048, 28, 16, 6144),
    "qwen3-4b": Shape(2560, 36, 32, 9728),
}
FILE_TYPES = {
    "Q4_K_M": gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "IQ4_NL": gguf.LlamaFileType.MOSTLY_IQ4_NL,
    "IQ4_XS": gguf.LlamaFileType.MOSTLY_IQ4_XS,
}


def format_of(name: str, file_type: str, num_layers: int) -> str:
    """The format of a matrix. Source: `llama_tensor_get_type` of llama.cpp's src/llama-quant.cpp."""
    if file_type != "Q4_K_M":
        return file_type
    if name == "token_embd":
        return "Q6_K"
    eighth, layer = num_layers // 8, int(name.split(".")[1])
    more_bits = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
    return "Q6_K" if more_bits and name.endswith(("attn_v", "ffn_down")) else "Q4_K"


def random_blocks(stored: str, num_blocks: int, random: np.random.Generator) -> np.ndarray:
    """Return blocks of a GGUF format (layouts: ggml-common.h). Shapes: uint8 `[num_blocks, block bytes]`."""
    if stored == "BF16":
        values = random.standard_normal(num_blocks, dtype=np.float32) * np.float32(STD)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1, 2)
    blocks = np.frombuffer(random.bytes(num_blocks * BLOCK_FORMATS[stored].block_bytes), np.uint8).copy()
    blocks = blocks.reshape(num_blocks, -1)
    if stored == "Q8_0":
        blocks[:, :2] = _halves(STD / 73.9)
    elif stored.startswith("IQ4"):
        # The codebook has a standard deviation of 67.4, and random scales of XS one of 18.5.
        blocks[:, :2] = _halves(STD / 67.4 / (18.5 if stored == "IQ4_XS" else 1))
    elif stored == "Q6_K":
        # Scales of 64 to 127 with either sign; the 6-bit numbers have a standard deviation of 18.5.
        scales = blocks[:, 192:208].view(np.int8)
        scales[:] = np.where(scales < 0, scales & ~64, scales | 64)
        blocks[:, 208:210] = _halves(STD / 18.5 / 94)
    else:
        # Q4_K: minima of 7.5 scales, so that weights are about zero. Both factors are 32 to 63 of 6 bits, the same.
        factors = random.integers(32, 64, (num_blocks, 8), dtype=np.uint8)
        low, high = factors[:, :4], factors[:, 4:]
        blocks[:, 0:2], blocks[:, 2:4] = _halves(STD / 4.6 / 48), _halves(7.5 * STD / 4.6 / 48)
        blocks[:, 4:8] = blocks[:, 8:12] = low | (high >> 4 << 6)
        blocks[:, 12:16] = (high & 15) | (high << 4)
    return blocks


def _halves(value: float) -> np.ndarray:
    return np.array([value], dtype=np.float16).view(np.uint8)


def write_model(name: str, file_type: str, path: Path) -> None:
    """Write the model of `SHAPES[name]`; another process sees the file only when it is whole."""
    shape, random = SHAPES[name], np.random.default_rng(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    writer = gguf.GGUFWriter(unfinished, "qwen3")
    writer.add_name(f"{name} with random weights")
    writer.add_file_type(FILE_TYPES[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(40960)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.mlp_width)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    _add_tokenizer(writer, shape.vocab_size)
    formats = {
        part: "F32" if len(sizes) == 1 else format_of(part, file_type, shape.num_layers)
        for part, sizes in shape.tensors()
    }
    for part, sizes in shape.tensors():
        size = int(np.prod(sizes)) // BLOCK_FORMATS[formats[part]].block_len * BLOCK_FORMATS[formats[part]].block_bytes
        kind = gguf.GGMLQuantizationType[formats[part]]
        writer.add_tensor_info(f"{part}.weight", sizes, np.dtype(np.float32), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for part, sizes in shape.tensors():
        stored = BLOCK_FORMATS[formats[part]]
        if stored.name == "F32":
            writer.write_tensor_data(np.ones(sizes, np.float32))
        else:
            count = int(np.prod(sizes)) // stored.block_len
            blocks = random_blocks(stored.name, min(count, CHUNK_BYTES // stored.block_bytes), random)
            # A large matrix repeats its first 64 MB.
            writer.write_tensor_data(np.resize(blocks, (count, stored.block_bytes)))
    writer.close()
    unfinished.rename(path)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    found: dict[str, Any] = read_gguf(resolve_source(TOKENIZER).path).metadata
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    num_unused = vocab_size - len(tokens)
    writer.add_tokenizer_model(found["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(found["tokenizer.ggml.pre"])
    writer.add_token_list([*tokens, *(f"<|unused_{index}|>" for index in range(num_unused))])
    writer.add_token_types([*types, *([UNUSED_TOKEN] * num_unused)])
    writer.add_token_merges(found["tokenizer.ggml.merges"])
    writer.add_bos_token_id(found["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(found["tokenizer.ggml.eos_token_id"])
    writer.add_chat_template(found["tokenizer.chat_template"])
    writer.add_add_bos_token(False)


def generated(model: str) -> str:
    """Return the path of a generated model named `qwen3-1.7b:Q4_K_M`, made if need be; other names unchanged."""
    name, _, file_type = model.partition(":")
    if name not in SHAPES or file_type not in FILE_TYPES:
        return model
    path = DIRECTORY / f"{name}-{file_type.lower()}.gguf"
    if not path.exists():
        write_model(name, file_type, path)
    return str(path)
