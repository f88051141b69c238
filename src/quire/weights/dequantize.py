"""Decode stored weights: GGUF's quantised blocks, and plain floats, to NumPy arrays and torch tensors.

The same bits as the `gguf` package's `quants.dequantize`, about four times as fast: each decoder is a few whole-array
operations on pieces that stay in the cache. fp32 throughout, products and sums rounded separately.
Block layouts: ggml's `ggml-common.h`. Must not know files or models. Next to read: `weight_tensor.py`.

NumPy decodes, in threads of ours, because torch would use OpenMP: with 16,000 small operations its spinning barriers
made loading SmolLM2 take 28 s instead of 0.5 s on a machine whose cores were busy with other processes.

In the docstrings below N is the number of blocks; byte ranges are within one block; "lo, hi" are nibbles.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.linux import allowed_cpus
from quire.weights.block_formats import BLOCK_FORMATS
from quire.weights.dequantize_codebooks import CODEBOOK_DECODERS, halves

if TYPE_CHECKING:
    import torch

Decoder = Callable[[np.ndarray, np.ndarray], None]
"""`decode(blocks, out)`: uint8 `[N, block_bytes]` -> fp32 `[N, block_len]`. Mutates: out."""

WEIGHTS_PER_PIECE = 1 << 18
"""fp32 temporaries of 1 MB. Smaller ones cost calls: 1.6 times the time at 1 << 14."""
PIECES_PER_THREAD = 4
"""Fewer are decoded sooner than a thread starts."""
WEIGHTS_PER_SHARE = 1 << 24
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
    block_format = BLOCK_FORMATS[format_name]
    blocks = raw.reshape(-1, block_format.block_bytes)
    out = np.empty((blocks.shape[0], block_format.block_len), np.float32)
    num_pieces = -(-out.size // WEIGHTS_PER_PIECE)
    num_threads = min(len(allowed_cpus()), num_pieces // PIECES_PER_THREAD)
    if num_threads < 2:
        _decode_pieces(format_name, blocks, out)
    else:
        bounds = [len(blocks) * index // num_threads for index in range(num_threads + 1)]
        with ThreadPoolExecutor(num_threads, "quire-dequantize") as pool:
            parts = [(blocks[start:end], out[start:end]) for start, end in pairwise(bounds)]
            for _ in pool.map(lambda part: _decode_pieces(format_name, *part), parts):
                pass
    return out.reshape(raw.shape[0], -1)


def _decode_pieces(format_name: str, blocks: np.ndarray, out: np.ndarray) -> None:
    """Shapes: blocks uint8 `[N, block_bytes]`, out fp32 `[N, block_len]`. Mutates: out."""
    blocks_per_piece = WEIGHTS_PER_PIECE // out.shape[1]
    # Blocks of a damaged file may hold infinite scales; their weights become NaN, as they do elsewhere.
    with np.errstate(all="ignore"):
        for first in range(0, len(blocks), blocks_per_piece):
            piece = slice(first, first + blocks_per_piece)
            _DECODERS[format_name](blocks[piece], out[piece])


def _fill_nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    """uint8 `[..., n]` -> `[..., 2, n]`: lo first, then hi. Mutates: out."""
    np.bitwise_and(packed, 15, out=out[..., 0, :])
    np.right_shift(packed, 4, out=out[..., 1, :])


def _fill_crumbs(packed: np.ndarray, out: np.ndarray) -> None:
    """uint8 `[..., n]`, four 2-bit values a byte -> `[..., 4, n]`, lowest bits first. Mutates: out."""
    for index in range(4):
        np.bitwise_and(packed >> (2 * index), 3, out=out[..., index, :])


def _add_bits(packed: np.ndarray, out: np.ndarray, worth: int) -> None:
    """uint8 `[N, n]`: where bit i of a byte is set, add `worth` to `out[:, i]`, `[N, 8, n]`. Mutates: out."""
    for index in range(8):
        out[:, index] += ((packed >> index) & 1) * np.uint8(worth)


def _decode_32(blocks: np.ndarray, out: np.ndarray, *, has_minimum: bool, has_fifth_bits: bool) -> None:
    """Q4_0, Q4_1, Q5_0, Q5_1: 0:2 scale d, minimum m in 2:4 of _1, fifth bits in the next 4 of Q5, then 16 of lo, hi.

    w = d q + m, or without a minimum d (q - half of the range of q).
    """
    start = 4 if has_minimum else 2
    scale_min = halves(blocks[:, :start])
    _fill_nibbles(blocks[:, -16:], out.reshape(-1, 2, 16))
    if has_fifth_bits:
        out += np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << 4
    if not has_minimum:
        out -= 16 if has_fifth_bits else 8
    out *= scale_min[:, :1]
    if has_minimum:
        out += scale_min[:, 1:]


def _decode_q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """0:2 scale d, 2:34 int8. w = d q."""
    np.multiply(blocks[:, 2:].view(np.int8), halves(blocks[:, :2]), out=out)


def _decode_q2_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """0:16 scale (lo) and minimum (hi) of each 16 weights, 16:80 crumbs, 80:82 d, 82:84 dmin. w = d s q - dmin m."""
    super_scales = halves(blocks[:, 80:])
    scales = super_scales[:, :1] * (blocks[:, :16] & 15)
    minimums = super_scales[:, 1:] * (blocks[:, :16] >> 4)
    _fill_crumbs(blocks[:, 16:80].reshape(-1, 2, 32), out.reshape(-1, 2, 4, 32))
    groups = out.reshape(-1, 16, 16)
    groups *= scales[:, :, None]
    groups -= minimums[:, :, None]


def _decode_q3_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """0:32 third bits, 32:96 crumbs, 96:108 scales of each 16 weights, 108:110 d. w = d (s - 32) (q - 4).

    A scale has its low 4 bits in 96:104 (lo of all eight bytes, then hi) and its high 2 bits as crumbs in 104:108.
    """
    low_bits = np.empty((len(blocks), 2, 8), dtype=np.uint8)
    high_bits = np.empty((len(blocks), 4, 4), dtype=np.uint8)
    _fill_nibbles(blocks[:, 96:104], low_bits)
    _fill_crumbs(blocks[:, 104:108], high_bits)
    scales = (low_bits.reshape(-1, 16) | (high_bits.reshape(-1, 16) << 4)).astype(np.float32)
    scales -= 32
    scales *= halves(blocks[:, 108:])
    _fill_crumbs(blocks[:, 32:96].reshape(-1, 2, 32), out.reshape(-1, 2, 4, 32))
    _add_bits(blocks[:, :32], out.reshape(-1, 8, 32), worth=4)
    out -= 4
    groups = out.reshape(-1, 16, 16)
    groups *= scales[:, :, None]


def _scales_and_minimums(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of Q4_K and Q5_K: fp32 `[N, 8, 1]` each, one per 32 weights, multiplied by d (0:2) and dmin (2:4).

    4:16 holds them in 6 bits: the first four of each in 4:8 and 8:12; the last four have their low bits as lo
    (scales) and hi (minimums) of 12:16 and their high bits on top of the first four.
    """
    first_scales, first_minimums, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first_scales & 63, (last & 15) | ((first_scales >> 2) & 48)], axis=1)
    minimums = np.concatenate([first_minimums & 63, (last >> 4) | ((first_minimums >> 2) & 48)], axis=1)
    super_scales = halves(blocks[:, :4])
    return (super_scales[:, :1] * scales)[:, :, None], (super_scales[:, 1:] * minimums)[:, :, None]


def _decode_q45_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """0:16 scales and minimums, fifth bits in 16:48 of Q5_K, then 128 of lo, hi. w = d s q - dmin m."""
    scales, minimums = _scales_and_minimums(blocks)
    _fill_nibbles(blocks[:, -128:].reshape(-1, 4, 32), out.reshape(-1, 4, 2, 32))
    groups = out.reshape(-1, 8, 32)
    if blocks.shape[1] == BLOCK_FORMATS["Q5_K"].block_bytes:
        _add_bits(blocks[:, 16:48], groups, worth=16)
    groups *= scales
    groups -= minimums


def _decode_q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """0:128 lo, hi, 128:192 crumbs on top, 192:208 int8 scales of each 16 weights, 208:210 d. w = d s (q - 32)."""
    _fill_nibbles(blocks[:, :128].reshape(-1, 2, 64), out.reshape(-1, 2, 2, 64))
    top_bits = np.empty((len(blocks), 2, 4, 32), dtype=np.uint8)
    _fill_crumbs(blocks[:, 128:192].reshape(-1, 2, 32), top_bits)
    out += top_bits.reshape(-1, 256) << 4
    out -= 32
    groups = out.reshape(-1, 16, 16)
    groups *= (halves(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8))[:, :, None]


def _decode_mxfp4(blocks: np.ndarray, out: np.ndarray) -> None:
    """Scale exponent u8 at 0, nibbles at 1-16: lo are inputs 0-15, hi 16-31; value = 2^(exponent - 128) * doubled."""
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    np.multiply(DOUBLED_FLOATS[blocks[:, 1:] & 15], scales, out=out[:, :16])
    np.multiply(DOUBLED_FLOATS[blocks[:, 1:] >> 4], scales, out=out[:, 16:])


DOUBLED_FLOATS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the values of the 4-bit floats of MXFP4 and NVFP4: a sign, two exponent bits, one fraction bit (OCP MX)."""
_DECODERS: dict[str, Decoder] = {
    "Q4_0": partial(_decode_32, has_minimum=False, has_fifth_bits=False),
    "Q4_1": partial(_decode_32, has_minimum=True, has_fifth_bits=False),
    "Q5_0": partial(_decode_32, has_minimum=False, has_fifth_bits=True),
    "Q5_1": partial(_decode_32, has_minimum=True, has_fifth_bits=True),
    "Q8_0": _decode_q8_0,
    "Q2_K": _decode_q2_k,
    "Q3_K": _decode_q3_k,
    "Q4_K": _decode_q45_k,
    "Q5_K": _decode_q45_k,
    "Q6_K": _decode_q6_k,
    "MXFP4": _decode_mxfp4,
    **CODEBOOK_DECODERS,
}
