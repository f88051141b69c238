"""Quantised blocks beside the gguf package's: errors, floats, importance, bits on any instruction set."""

import gguf
import numpy as np
import pytest
from gguf import quants

from quire import _native
from quire.errors import ModelFileError
from quire.weights.weight_tensor import decode, quantize

RELATIVE_ERRORS = {
    "Q4_0": 0.094, "Q4_1": 0.075, "Q5_0": 0.047, "Q5_1": 0.036, "Q8_0": 0.0062,
    "Q2_K": 0.283, "Q3_K": 0.158, "Q4_K": 0.076, "Q5_K": 0.038, "Q6_K": 0.0198,
}  # fmt: skip
"""Root mean square, of normal weights; llama.cpp 0.25's quantisers have more in every format but Q8_0."""


def normal(num_rows: int = 64, num_columns: int = 512) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((num_rows, num_columns)).astype(np.float32)


def error(values: np.ndarray, format_name: str, importance: np.ndarray | None = None) -> np.ndarray:
    return decode(quantize(values, format_name, importance), format_name) - values


@pytest.mark.parametrize("format_name", RELATIVE_ERRORS)
def test_error_is_that_of_a_good_quantiser(format_name: str) -> None:
    values = normal()
    stored = quantize(values, format_name)
    kind = gguf.GGMLQuantizationType[format_name]
    found = quants.dequantize(stored, kind)
    assert np.array_equal(found, decode(stored, format_name))
    rms = float(np.sqrt(np.mean((found - values) ** 2)))
    assert rms < RELATIVE_ERRORS[format_name]
    if format_name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        theirs = quants.dequantize(quants.quantize(values, kind), kind)
        assert rms <= float(np.sqrt(np.mean((theirs - values) ** 2)))


@pytest.mark.parametrize("format_name", ["F32", "F16", "BF16"])
def test_floats_are_those_of_gguf(format_name: str) -> None:
    values = normal(3, 40)
    values[0, :4] = 0.0, -0.0, 1 + 2**-8, 1 + 2**-7 + 2**-8
    kind = gguf.GGMLQuantizationType[format_name]
    assert np.array_equal(quantize(values, format_name), quants.quantize(values, kind).view(np.uint8).reshape(3, -1))


@pytest.mark.parametrize("format_name", RELATIVE_ERRORS)
def test_bits_do_not_depend_on_instruction_set_or_threads(format_name: str) -> None:
    values, before = normal(7), _native.isa()
    expected = quantize(values, format_name, num_threads=3)
    try:
        for isa in filter(_native.isa_supported, ("scalar", "avx2", "avx512")):
            _native.set_isa(isa)
            assert np.array_equal(quantize(values, format_name), expected), isa
    finally:
        _native.set_isa(before)


@pytest.mark.parametrize("format_name", sorted(RELATIVE_ERRORS.keys() - {"Q8_0"}))
def test_importance_lowers_the_error_of_important_columns(format_name: str) -> None:
    values = normal()
    importance = np.where(np.arange(512) % 4 == 0, 100.0, 1.0).astype(np.float32)
    plain, weighted = (np.mean(error(values, format_name, given)[:, ::4] ** 2) for given in (None, importance))
    assert weighted < 0.9 * plain


@pytest.mark.parametrize("format_name", RELATIVE_ERRORS)
def test_extreme_rows(format_name: str) -> None:
    rows = np.zeros((5, 256), np.float32)
    rows[1], rows[2], rows[3, 7], rows[4] = 3.0, -3.0, 1000.0, 1e-30
    found = error(rows, format_name)
    assert np.array_equal(found[0], np.zeros(256))
    assert np.abs(found[1:3]).max() <= 0.02
    assert abs(found[3, 7]) <= 5.0
    assert np.abs(np.delete(found[3], 7)).max() <= 0.01
    assert np.abs(found[4]).max() <= 1e-29


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1e6])
def test_weights_that_no_scale_can_hold_are_refused(bad: float) -> None:
    values = normal(2)
    values[1, 5] = bad
    with pytest.raises(ModelFileError, match="a weight is"):
        quantize(values, "Q4_K")


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="no whole blocks of 256"):
        _native.quantize_rows("Q4_K", 0, 1, 288, 0)
    with pytest.raises(ValueError, match="IQ1_S"):
        _native.quantize_rows("IQ1_S", 0, 1, 256, 0)
