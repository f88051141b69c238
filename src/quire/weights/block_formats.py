"""Number formats of stored weights: the weights and the bytes of a block.

Formats have GGUF's names; safetensors' F32, F16 and BF16 are the same. Must not import torch: readers of file headers
need only these sizes. Next to read: `dequantize.py`, which decodes the blocks.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A block of `block_len` consecutive weights of one row takes `block_bytes` bytes."""

    name: str
    gguf_id: int
    block_len: int
    block_bytes: int


_FORMATS = (
    BlockFormat("F32", 0, 1, 4),
    BlockFormat("F16", 1, 1, 2),
    BlockFormat("Q4_0", 2, 32, 18),
    BlockFormat("Q4_1", 3, 32, 20),
    BlockFormat("Q5_0", 6, 32, 22),
    BlockFormat("Q5_1", 7, 32, 24),
    BlockFormat("Q8_0", 8, 32, 34),
    BlockFormat("Q2_K", 10, 256, 84),
    BlockFormat("Q3_K", 11, 256, 110),
    BlockFormat("Q4_K", 12, 256, 144),
    BlockFormat("Q5_K", 13, 256, 176),
    BlockFormat("Q6_K", 14, 256, 210),
    BlockFormat("IQ2_XXS", 16, 256, 66),
    BlockFormat("IQ2_XS", 17, 256, 74),
    BlockFormat("IQ3_XXS", 18, 256, 98),
    BlockFormat("IQ1_S", 19, 256, 50),
    BlockFormat("IQ4_NL", 20, 32, 18),
    BlockFormat("IQ3_S", 21, 256, 110),
    BlockFormat("IQ2_S", 22, 256, 82),
    BlockFormat("IQ4_XS", 23, 256, 136),
    BlockFormat("IQ1_M", 29, 256, 56),
    BlockFormat("BF16", 30, 1, 2),
    BlockFormat("TQ1_0", 34, 256, 54),
    BlockFormat("TQ2_0", 35, 256, 66),
    BlockFormat("MXFP4", 39, 32, 17),
)
BLOCK_FORMATS = {item.name: item for item in _FORMATS}
NVFP4 = BlockFormat("NVFP4", 40, 64, 36)
"""Blocks of GGUF alone: with the scale of the whole matrix, which is another tensor, they are a `QuantizedTensor`."""
FLOATS = ("F16", "BF16", "F32")
"""Formats of single values."""
GGUF_FORMATS = {item.gguf_id: item for item in (*_FORMATS, NVFP4)}

UNSUPPORTED_GGUF_FORMATS = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 41: "Q1_0",
}  # fmt: skip
"""Valid in GGUF, not decoded here. Q8_1 and Q8_K hold activations, never weights."""


def row_bytes(block_format: BlockFormat, num_columns: int) -> int:
    """Bytes of a row of `num_columns` weights, which must be whole blocks."""
    return num_columns // block_format.block_len * block_format.block_bytes
