"""Decode stored weights: GGUF's quantised blocks, and plain floats, to NumPy arrays and torch tensors.

Native code decodes blocks in some threads of Python's, to the bits of the `gguf` package's `quants.dequantize`: fp32
throughout, products and sums rounded separately. Layouts of blocks: `native/weights/decode.h`. Must not know files or
models. Next to read: `weight_tensor.py`.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._native import decode_blocks
from quire.linux import allowed_cpus
from quire.weights.block_formats import BLOCK_FORMATS
from quire.weights.codebooks import packed_codebook

if TYPE_CHECKING:
    import torch

WEIGHTS_PER_THREAD = 1 << 20
"""Fewer are decoded sooner than a thread starts."""
WEIGHTS_PER_SHARE = 1 << 24
DOUBLED_FLOATS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the values of the 4-bit floats of MXFP4 and NVFP4: a sign, two exponent bits, one fraction bit (OCP MX)."""
_PLAIN_TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


def dequantize(raw: np.ndarray, format_name: str, dtype: "torch.dtype") -> "torch.Tensor":
    """Decode rows of blocks to fp32, then round to the nearest even value of `dtype`.

    Shapes: raw uint8 `[rows, row_bytes]` -> `[rows, columns]`. The result shares memory with `raw` when the stored
    format is `dtype` itself.
    """
    import torch

    if format_name in _PLAIN_TYPES:
        plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[format_name]
        # torch's kernels expect a pointer aligned to the element; a safetensors header may have any length.
        aligned = raw if raw.ctypes.data % plain.itemsize == 0 else raw.copy()
        return torch.from_numpy(aligned).view(plain).to(dtype)
    if dtype == torch.float32:
        return torch.from_numpy(decode(raw, format_name))
    block_format = BLOCK_FORMATS[format_name]
    num_columns = raw.shape[1] // block_format.block_bytes * block_format.block_len
    out = torch.empty(len(raw), num_columns, dtype=dtype)
    # Some rows at a time, which bounds the fp32 values beside the result.
    num_rows = max(1, WEIGHTS_PER_SHARE // num_columns)
    for first in range(0, len(raw), num_rows):
        out[first : first + num_rows] = torch.from_numpy(decode(raw[first : first + num_rows], format_name))
    return out


def decode(raw: np.ndarray, format_name: str) -> np.ndarray:
    """Decode rows of blocks. Shapes: raw uint8 `[rows, row_bytes]` -> fp32 `[rows, columns]`.

    The result shares memory with `raw` when the stored format is F32.
    """
    if format_name in _PLAIN_TYPES:
        plain = _PLAIN_TYPES[format_name]
        values: np.ndarray = (raw if raw.ctypes.data % plain.itemsize == 0 else raw.copy()).view(plain)
        if format_name == "BF16":
            values = np.left_shift(values, 16, dtype=np.uint32).view(np.float32)
        return values.astype(np.float32, copy=False)
    block_format, codebook = BLOCK_FORMATS[format_name], packed_codebook(format_name)
    blocks = np.ascontiguousarray(raw).reshape(-1, block_format.block_bytes)
    out = np.empty((len(blocks), block_format.block_len), np.float32)
    entries = 0 if codebook is None else codebook.ctypes.data

    def decode_some(first: int, last: int) -> None:
        part = out[first:last]
        decode_blocks(format_name, blocks[first:last].ctypes.data, part.size, entries, part.ctypes.data)

    num_threads = max(1, min(len(allowed_cpus()), out.size // WEIGHTS_PER_THREAD))
    bounds = [len(blocks) * index // num_threads for index in range(num_threads + 1)]
    if num_threads == 1:
        decode_some(*bounds)
    else:
        with ThreadPoolExecutor(num_threads, "quire-dequantize") as pool:
            for _ in pool.map(decode_some, bounds, bounds[1:]):
                pass
    return out.reshape(len(raw), -1)
