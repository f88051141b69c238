"""Decode stored weights: GGUF's quantised blocks, and plain floats, to torch tensors.

The same bits as the `gguf` package's `quants.dequantize`, about seven times as fast: each decoder is a few whole-array
operations on blocks, run on pieces that stay in the cache. fp32 throughout, products and sums rounded separately.
Block layouts: ggml's `ggml-common.h`. Must not know files or models. Next to read: `weight_tensor.py`.

In the docstrings below N is the number of blocks; byte ranges are within one block; "lo, hi" are nibbles.
"""

from collections.abc import Callable

import numpy as np
import torch

from quire.weights.block_formats import BLOCK_FORMATS

Decoder = Callable[[torch.Tensor, torch.Tensor], None]
"""`decode(blocks, out)`: uint8 `[N, block_bytes]` -> fp32 `[N, block_len]`. Mutates: out."""

WEIGHTS_PER_PIECE = 1 << 20
"""fp32 temporaries of 4 MB. SmolLM2 to bf16 on 2 cores: 0.09 s; 0.20 s with 1 << 16, 0.13 s in one piece."""
_PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dequantize(raw: np.ndarray, format_name: str, dtype: torch.dtype) -> torch.Tensor:
    """Decode rows of blocks to fp32, then round to the nearest even value of `dtype`.

    Shapes: raw uint8 `[rows, row_bytes]` -> `[rows, columns]`. The result shares memory with `raw` when the stored
    format is `dtype` itself.
    """
    if format_name in _PLAIN_DTYPES:
        plain = _PLAIN_DTYPES[format_name]
        # torch's kernels expect a pointer aligned to the element; a safetensors header may have any length.
        aligned = raw if raw.ctypes.data % plain.itemsize == 0 else raw.copy()
        return torch.from_numpy(aligned).view(plain).to(dtype)
    block_format, decode = BLOCK_FORMATS[format_name], _DECODERS[format_name]
    blocks = torch.from_numpy(raw).view(-1, block_format.block_bytes)
    out = torch.empty(blocks.shape[0], block_format.block_len, dtype=dtype)
    blocks_per_piece = WEIGHTS_PER_PIECE // block_format.block_len
    piece = torch.empty(min(blocks_per_piece, blocks.shape[0]), block_format.block_len)
    for start in range(0, blocks.shape[0], blocks_per_piece):
        part = blocks[start : start + blocks_per_piece]
        decoded = piece[: part.shape[0]]
        decode(part, decoded)
        out[start : start + blocks_per_piece] = decoded
    return out.view(raw.shape[0], -1)


def _halves(two_bytes: torch.Tensor) -> torch.Tensor:
    """uint8 `[N, 2 n]` holding float16 -> fp32 `[N, n]`."""
    return two_bytes.contiguous().view(torch.float16).float()


def _fill_nibbles(packed: torch.Tensor, out: torch.Tensor) -> None:
    """uint8 `[..., n]` -> `[..., 2, n]`: lo first, then hi. Mutates: out."""
    out[..., 0, :] = packed & 15
    out[..., 1, :] = packed >> 4


def _fill_crumbs(packed: torch.Tensor, out: torch.Tensor) -> None:
    """uint8 `[..., n]`, four 2-bit values a byte -> `[..., 4, n]`, lowest bits first. Mutates: out."""
    for index in range(4):
        out[..., index, :] = (packed >> (2 * index)) & 3


def _decode_q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """0:2 scale d, 2:18 lo, hi. w = d (q - 8)."""
    _fill_nibbles(blocks[:, 2:], out.view(-1, 2, 16))
    out.sub_(8).mul_(_halves(blocks[:, :2]))


def _decode_q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """0:2 scale d, 2:4 minimum m, 4:20 lo, hi. w = d q + m."""
    scale_min = _halves(blocks[:, :4])
    _fill_nibbles(blocks[:, 4:], out.view(-1, 2, 16))
    out.mul_(scale_min[:, :1]).add_(scale_min[:, 1:])


def _fill_five_bits(high_bits: torch.Tensor, packed: torch.Tensor, out: torch.Tensor) -> None:
    """uint8 `[N, 4]`, a bit per weight, and `[N, 16]` lo, hi -> `[N, 32]`. Mutates: out."""
    _fill_nibbles(packed, out.view(-1, 2, 16))
    bits = (high_bits.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    out.add_((bits << 4).view(-1, 32))


def _decode_q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """0:2 scale d, 2:6 fifth bits, 6:22 lo, hi. w = d (q - 16)."""
    _fill_five_bits(blocks[:, 2:6], blocks[:, 6:], out)
    out.sub_(16).mul_(_halves(blocks[:, :2]))


def _decode_q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """0:2 scale d, 2:4 minimum m, 4:8 fifth bits, 8:24 lo, hi. w = d q + m."""
    scale_min = _halves(blocks[:, :4])
    _fill_five_bits(blocks[:, 4:8], blocks[:, 8:], out)
    out.mul_(scale_min[:, :1]).add_(scale_min[:, 1:])


def _decode_q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """0:2 scale d, 2:34 int8. w = d q."""
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_halves(blocks[:, :2]))


def _decode_q2_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """0:16 scale (lo) and minimum (hi) of each 16 weights, 16:80 crumbs, 80:82 d, 82:84 dmin. w = d s q - dmin m."""
    super_scales = _halves(blocks[:, 80:])
    scales = super_scales[:, :1] * (blocks[:, :16] & 15)
    minimums = super_scales[:, 1:] * (blocks[:, :16] >> 4)
    _fill_crumbs(blocks[:, 16:80].view(-1, 2, 32), out.view(-1, 2, 4, 32))
    out.view(-1, 16, 16).mul_(scales.unsqueeze(-1)).sub_(minimums.unsqueeze(-1))


def _decode_q3_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """0:32 third bits, 32:96 crumbs, 96:108 scales of each 16 weights, 108:110 d. w = d (s - 32) (q - 4).

    A scale has its low 4 bits in 96:104 (lo of all eight bytes, then hi) and its high 2 bits as crumbs in 104:108.
    """
    scales = torch.empty(blocks.shape[0], 16, dtype=torch.uint8)
    _fill_crumbs(blocks[:, 104:108], scales.view(-1, 4, 4))
    low_bits = torch.empty_like(scales)
    _fill_nibbles(blocks[:, 96:104], low_bits.view(-1, 2, 8))
    scales = (scales << 4) | low_bits
    block_scales = _halves(blocks[:, 108:]) * (scales.float() - 32)
    groups = out.view(-1, 2, 4, 32)
    _fill_crumbs(blocks[:, 32:96].view(-1, 2, 32), groups)
    for index in range(8):
        third_bit = (blocks[:, :32] >> index) & 1
        groups[:, index // 4, index % 4].add_(third_bit << 2)
    out.sub_(4).view(-1, 16, 16).mul_(block_scales.unsqueeze(-1))


def _scales_and_minimums(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of Q4_K and Q5_K: fp32 `[N, 8, 1]` each, one per 32 weights, multiplied by d (0:2) and dmin (2:4).

    4:16 holds them in 6 bits: the first four of each in 4:8 and 8:12; the last four have their low bits as lo
    (scales) and hi (minimums) of 12:16 and their high bits on top of the first four.
    """
    first_scales, first_minimums, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first_scales & 63, (last & 15) | ((first_scales >> 2) & 48)], dim=1)
    minimums = torch.cat([first_minimums & 63, (last >> 4) | ((first_minimums >> 2) & 48)], dim=1)
    super_scales = _halves(blocks[:, :4])
    return (super_scales[:, :1] * scales).unsqueeze(-1), (super_scales[:, 1:] * minimums).unsqueeze(-1)


def _decode_q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """0:16 scales and minimums, 16:144 lo, hi. w = d s q - dmin m."""
    scales, minimums = _scales_and_minimums(blocks)
    _fill_nibbles(blocks[:, 16:].view(-1, 4, 32), out.view(-1, 4, 2, 32))
    out.view(-1, 8, 32).mul_(scales).sub_(minimums)


def _decode_q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """0:16 scales and minimums, 16:48 fifth bits, 48:176 lo, hi. w = d s q - dmin m."""
    scales, minimums = _scales_and_minimums(blocks)
    _fill_nibbles(blocks[:, 48:].view(-1, 4, 32), out.view(-1, 4, 2, 32))
    groups = out.view(-1, 8, 32)
    for index in range(8):
        fifth_bit = (blocks[:, 16:48] >> index) & 1
        groups[:, index].add_(fifth_bit << 4)
    groups.mul_(scales).sub_(minimums)


def _decode_q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """0:128 lo, hi, 128:192 crumbs on top, 192:208 int8 scales of each 16 weights, 208:210 d. w = d s (q - 32)."""
    _fill_nibbles(blocks[:, :128].view(-1, 2, 64), out.view(-1, 2, 2, 64))
    top_bits = torch.empty(blocks.shape[0], 2, 4, 32, dtype=torch.uint8)
    _fill_crumbs(blocks[:, 128:192].view(-1, 2, 32), top_bits)
    scales = _halves(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8)
    out.add_((top_bits << 4).view(-1, 256)).sub_(32)
    out.view(-1, 16, 16).mul_(scales.unsqueeze(-1))


_DECODERS: dict[str, Decoder] = {
    "Q4_0": _decode_q4_0,
    "Q4_1": _decode_q4_1,
    "Q5_0": _decode_q5_0,
    "Q5_1": _decode_q5_1,
    "Q8_0": _decode_q8_0,
    "Q2_K": _decode_q2_k,
    "Q3_K": _decode_q3_k,
    "Q4_K": _decode_q4_k,
    "Q5_K": _decode_q5_k,
    "Q6_K": _decode_q6_k,
}
