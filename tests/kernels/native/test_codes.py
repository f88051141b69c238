"""Codes of every layout are those that the formats' definitions give, value by value."""

import numpy as np
import pytest

from quire._native import CodeLayout
from quire.weights.quantized import StoredCodes

ROWS, COLUMNS = 24, 384
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of each half of a word, lowest bits first (AutoAWQ, `gemm`)."""


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def halves(octets: np.ndarray) -> np.ndarray:
    """Shapes: uint8 `[..., n]` -> `[..., 2 n]`, the lower half first."""
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(*octets.shape[:-1], -1)


def down(octets: np.ndarray, bits: int) -> np.ndarray:
    """Shapes: `[words, 4 N]` -> `[N, codes]`."""
    words = octets.view("<u4").T
    parts = [words >> shift & (1 << bits) - 1 for shift in range(0, 32, bits)]
    return np.stack(parts, axis=-1).reshape(len(words), -1).astype(np.uint8)


def awq(octets: np.ndarray) -> np.ndarray:
    """Shapes: `[columns, rows / 2]` -> `[rows, columns]`."""
    words = octets.view("<u4")
    codes = np.empty((8 * words.shape[1], len(words)), np.uint8)
    for index, column in enumerate(AWQ_ORDER):
        codes[column::8] = (words >> 4 * index & 15).T
    return codes


def nvfp4(octets: np.ndarray) -> np.ndarray:
    groups = octets.reshape(ROWS, -1, 36)[:, :, 4:].reshape(ROWS, -1, 8)
    return np.concatenate([groups & 15, groups >> 4], axis=-1).reshape(ROWS, -1)


def scales(octets: np.ndarray) -> np.ndarray:
    found = octets.reshape(ROWS, -1, 36)[:, :, :4].reshape(ROWS, -1) & 0x7F
    return np.where(found == 0x7F, 0, found)


CASES = {
    "across4": (random(ROWS, COLUMNS // 2), halves),
    "across8": (random(ROWS, COLUMNS), lambda octets: octets),
    "down4": (random(COLUMNS // 8, 4 * ROWS), lambda octets: down(octets, 4)),
    "down8": (random(COLUMNS // 4, 4 * ROWS), lambda octets: down(octets, 8)),
    "awq": (random(COLUMNS, ROWS // 2), awq),
    "nvfp4": (random(ROWS, COLUMNS // 64 * 36), nvfp4),
    "nvfp4_scales": (random(ROWS, COLUMNS * 4 * 9), scales),
}


@pytest.mark.parametrize("layout", CASES)
def test_codes_are_those_of_the_definition(layout: str) -> None:
    octets, define = CASES[layout]
    expected, codes = define(octets), StoredCodes(CodeLayout[layout], octets)
    order = np.random.default_rng(1).permutation(ROWS)[:17]
    for first, last in ((0, COLUMNS), (64, 320), (128, 160)):
        assert np.array_equal(codes.read(order, first, last), expected[order, first:last])


def test_rows_may_have_bytes_between_them() -> None:
    octets = random(ROWS, COLUMNS)
    codes = StoredCodes(CodeLayout.across4, octets[:, : COLUMNS // 2])
    assert np.array_equal(codes.read(np.arange(ROWS), 0, COLUMNS), halves(octets[:, : COLUMNS // 2]))
