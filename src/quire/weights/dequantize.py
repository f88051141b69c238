"""`decode`: stored weights, GGUF's quantised blocks and plain floats, to fp32.

Native code decodes blocks in some threads of Python's, to the bits of the `gguf` package's `quants.dequantize`: fp32
throughout, products and sums rounded separately. Layouts of blocks: `native/weights/decode.h`. Must not know files or
models. Next to read: `weight_tensor.py`.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from quire._native import decode_blocks
from quire.linux import allowed_cpus
from quire.weights.block_formats import BLOCK_FORMATS
from quire.weights.codebooks import packed_codebook

WEIGHTS_PER_THREAD = 1 << 20
"""Fewer are decoded sooner than a thread starts."""
DOUBLED_FLOATS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the values of the 4-bit floats of MXFP4 and NVFP4: a sign, two exponent bits, one fraction bit (OCP MX)."""
_PLAIN_TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


def decode(raw: np.ndarray, format_name: str) -> np.ndarray:
    """Decode rows of blocks. Shapes: raw uint8 `[rows, row_bytes]` -> fp32 `[rows, columns]`.

    The result shares memory with `raw` when the stored format is F32.
    """
    if format_name in _PLAIN_TYPES:
        plain = _PLAIN_TYPES[format_name]
        values: np.ndarray = (raw if raw.ctypes.data % plain.itemsize == 0 else raw.copy()).view(plain)
        if format_name == "BF16":
            values = np.left_shift(values, 16, dtype=np.uint32).view(np.float32)
        if format_name == "F16":  # NumPy takes ten times as long
            values, halves = np.empty(values.shape, np.float32), np.ascontiguousarray(raw)
            decode_blocks("F16", halves.ctypes.data, values.size, 0, values.ctypes.data)
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
