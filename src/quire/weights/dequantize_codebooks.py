"""Decoders of GGUF's IQ and TQ formats, whose codes are indices into codebooks, or ternary digits.

The bits of the gguf package's `quants.dequantize`. Block layouts: ggml-common.h of ggml. N is the number of blocks,
byte ranges are within one block. Next to read: `codebooks.py`, `dequantize.py`.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from quire.weights.codebooks import IQ4_VALUES, codebook

_PARITIES = np.arange(128, dtype=np.uint8) | ((np.bitwise_count(np.arange(128, dtype=np.uint8)) & 1) << 7)
"""Signs of eight values: seven stored bits, and an eighth that makes the number of minus signs even."""
_SIGNS = 1 - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.float32)
"""Of the bits of a byte, -1 where one is set. fp32 `[256, 8]`."""
_IQ4 = np.array(IQ4_VALUES, np.float32)
_IQ1_SHIFT = np.float32(0.125)


def halves(two_bytes: np.ndarray) -> np.ndarray:
    """uint8 `[N, 2 n]` holding float16 -> fp32 `[N, n]`."""
    return np.ascontiguousarray(two_bytes).view("<f2").astype(np.float32)


def _words(stored: np.ndarray, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(stored).view(dtype)


def _fields(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The lowest `count` fields of each word. Shapes: integers `[N, n]` -> `[N, n * count]`."""
    shifts = (np.arange(count) * bits).astype(words.dtype)
    fields: np.ndarray = (words[..., None] >> shifts) & words.dtype.type((1 << bits) - 1)
    return fields.reshape(len(words), -1)


def _fill(out: np.ndarray, scales: np.ndarray, values: np.ndarray, signs: np.ndarray | None = None) -> None:
    """`values` and `signs` of `[N, 256]` in some shape, times a scale per group `[N, groups]`. Mutates: out."""
    groups = out.reshape(*scales.shape, -1)
    np.multiply(values.reshape(groups.shape), scales[..., None], out=groups)
    if signs is not None:
        groups *= signs.reshape(groups.shape)


def _decode_words(blocks: np.ndarray, out: np.ndarray, *, name: str) -> None:
    """IQ2_XXS, IQ3_XXS: 0:2 d, indices; per 32 weights a word with four times 7 signs, then 4 bits of scale.

    IQ2 has four indices before each word, IQ3 all indices before the words. w = d (s + 1/2) / 4 or / 2 · entry.
    """
    d = halves(blocks[:, :2])
    if name == "IQ2_XXS":
        parts = blocks[:, 2:].reshape(-1, 8, 8)
        indices, words, share = parts[..., :4].reshape(-1, 32), _words(parts[..., 4:], "<u4")[..., 0], 0.25
    else:
        indices, words, share = blocks[:, 2:66], _words(blocks[:, 66:], "<u4"), 0.5
    scales = d * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(share)
    signs = _SIGNS[_PARITIES[_fields(words, 7, 4)]]
    _fill(out, scales, codebook(name)[indices], signs)


def _decode_iq2_xs(blocks: np.ndarray, out: np.ndarray) -> None:
    """0:2 d, 2:66 words of a 9-bit index and 7 signs, 66:74 scales of each 16 weights. w = d (s + 1/2) / 4 · entry."""
    words = _words(blocks[:, 2:66], "<u2")
    scales = halves(blocks[:, :2]) * (np.float32(0.5) + _fields(blocks[:, 66:], 4, 2)) * np.float32(0.25)
    _fill(out, scales, codebook("IQ2_XS")[words & 511], _SIGNS[_PARITIES[words >> 9]])


def _decode_iq2_s(blocks: np.ndarray, out: np.ndarray) -> None:
    """0:2 d, 2:34 low 8 bits of indices, 34:66 signs, 66:74 upper 2 bits, 74:82 scales of each 16 weights."""
    indices = blocks[:, 2:34].astype(np.uint16) | (_fields(blocks[:, 66:74], 2, 4).astype(np.uint16) << 8)
    scales = halves(blocks[:, :2]) * (np.float32(0.5) + _fields(blocks[:, 74:], 4, 2)) * np.float32(0.25)
    _fill(out, scales, codebook("IQ2_S")[indices], _SIGNS[blocks[:, 34:66]])


def _decode_iq3_s(blocks: np.ndarray, out: np.ndarray) -> None:
    """0:2 d, 2:66 low 8 bits of indices, 66:74 ninth bits, 74:106 signs, 106: scales per 32. w = d (2 s + 1) entry."""
    indices = blocks[:, 2:66].astype(np.uint16) | (_fields(blocks[:, 66:74], 1, 8).astype(np.uint16) << 8)
    scales = halves(blocks[:, :2]) * (1 + 2 * _fields(blocks[:, 106:], 4, 2))
    _fill(out, scales, codebook("IQ3_S")[indices], _SIGNS[blocks[:, 74:106]])


def _decode_iq1_s(blocks: np.ndarray, out: np.ndarray) -> None:
    """0:2 d, 2:34 low 8 bits of indices, words of four times 3 upper bits, 3 bits s and the sign of the shift."""
    words = _words(blocks[:, 34:], "<u2")
    indices = blocks[:, 2:34].astype(np.uint16) | (_fields(words, 3, 4) << 8)
    shifts = np.where(words & 0x8000, -_IQ1_SHIFT, _IQ1_SHIFT)
    entries = codebook("IQ1_S")[indices].reshape(-1, 8, 32) + shifts[..., None]
    _fill(out, halves(blocks[:, :2]) * (2 * ((words >> 12) & 7) + 1), entries)


def _decode_iq1_m(blocks: np.ndarray, out: np.ndarray) -> None:
    """0:32 low 8 bits of indices, 32:48 nibbles of 3 upper bits and the sign of the shift, 48:56 four words.

    A word has four scales of 3 bits, each of 16 weights, and 4 bits of d, the lowest first.
    """
    words = _words(blocks[:, 48:], "<u2")
    d = ((words >> 12) << np.array([0, 4, 8, 12], np.uint16)).sum(1, dtype=np.uint16).view("<f2").astype(np.float32)
    upper = _fields(blocks[:, 32:48], 4, 2)
    indices = blocks[:, :32].astype(np.uint16) | ((upper & 7).astype(np.uint16) << 8)
    entries = codebook("IQ1_S")[indices] + np.where(upper & 8, -_IQ1_SHIFT, _IQ1_SHIFT)[..., None]
    _fill(out, d[:, None] * (2 * _fields(words, 3, 4) + 1), entries)


def _decode_iq4_nl(blocks: np.ndarray, out: np.ndarray) -> None:
    """0:2 d, 2:18 lo, hi. w = d · value of the code."""
    np.multiply(_IQ4[blocks[:, 2:] & 15], halves(blocks[:, :2]), out=out[:, :16])
    np.multiply(_IQ4[blocks[:, 2:] >> 4], halves(blocks[:, :2]), out=out[:, 16:])


def _decode_iq4_xs(blocks: np.ndarray, out: np.ndarray) -> None:
    """0:2 d, 2:4 upper 2 and 4:8 lower 4 bits of eight scales, per 32 weights 16 of lo, hi. w = d (s - 32) value."""
    upper = _fields(_words(blocks[:, 2:4], "<u2"), 2, 8).astype(np.uint8)
    scales = (_fields(blocks[:, 4:8], 4, 2) | (upper << 4)).astype(np.int8) - np.int8(32)
    codes = blocks[:, 8:].reshape(-1, 8, 16)
    values = np.stack([_IQ4[codes & 15], _IQ4[codes >> 4]], axis=2)
    _fill(out, halves(blocks[:, :2]) * scales.astype(np.float32), values)


def _decode_tq1_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """Ternary digits, five in a byte of 0:32 and of 32:48, four in one of 48:52; 52:54 d. w = d (digit - 1).

    Digit i of a byte b is 3 (b 3^i mod 256) / 256, rounded down.
    """
    position = 0
    for first, last, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        for power in range(count):
            shifted = (blocks[:, first:last] * np.uint8(3**power)).astype(np.uint16)
            out[:, position : position + last - first] = ((shifted * 3) >> 8).astype(np.float32) - 1
            position += last - first
    out *= halves(blocks[:, 52:])


def _decode_tq2_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """0:64 two bits of each weight, 64:66 d. w = d (q - 1)."""
    parts = out.reshape(-1, 2, 4, 32)
    for index in range(4):
        parts[:, :, index] = (blocks[:, :64].reshape(-1, 2, 32) >> (2 * index)) & 3
    out -= 1
    out *= halves(blocks[:, 64:])


CODEBOOK_DECODERS: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "IQ2_XXS": partial(_decode_words, name="IQ2_XXS"),
    "IQ2_XS": _decode_iq2_xs,
    "IQ2_S": _decode_iq2_s,
    "IQ3_XXS": partial(_decode_words, name="IQ3_XXS"),
    "IQ3_S": _decode_iq3_s,
    "IQ1_S": _decode_iq1_s,
    "IQ1_M": _decode_iq1_m,
    "IQ4_NL": _decode_iq4_nl,
    "IQ4_XS": _decode_iq4_xs,
    "TQ1_0": _decode_tq1_0,
    "TQ2_0": _decode_tq2_0,
}
"""By format: `decode(blocks, out)`, uint8 `[N, block_bytes]` -> fp32 `[N, block_len]`. Mutates: out."""
