"""`QuantizedTensor`: a weight that a Hugging Face directory stores as codes, scales and zero points.

value[n, k] = (code[n, k] - zero[n, group of k]) * scale[n, group of k], in fp32. Must not know names of files or
configurations: `quantized_names.py` makes these tensors. `runtime/plan/packed_weights.py` packs 4 bits with a zero of 8
as Q4_0, with other zeros as Q4_1 (minimum -zero * scale in fp16, within 1/136 of a step), 8 bits with a zero of 128 as
Q8_0, NVFP4 as it is; FP8, act-order, other zeros and groups that are not whole blocks of 32 as 8 bit per 32, from the
decoded values.

Blocks of integers have scales in fp16: those of F16 files are the same, F32's are rounded to 11 bits. FP8 becomes 8 bit
per 32 and not BF16: of normal weights the error (root mean square) with FP8's own grows from 2.65 to 2.70 %, in half
the bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from quire._native import CodeLayout, unpack_codes
from quire.errors import ModelFileError, UnsupportedModelError
from quire.weights.weight_tensor import DOUBLED_FLOATS, WeightTensor

BLOCK, NVFP4_GROUP, NVFP4_BYTES_PER_VALUE = 32, 16, 9 / 16
WEIGHTS_PER_PIECE = 1 << 16
"""Temporaries stay in the cache."""
E4M3_LARGEST, E4M3_ONE = 448, 0x38
"""The largest value, and the code of 1."""
HALF_OVERFLOW = np.float32(65520)
"""The smallest number that rounds to no finite fp16."""

Rows = Callable[[int, int], np.ndarray]
"""Zeros of rows `first` to `last`."""


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """Codes of a matrix in a mapped file: `layout` says how rows of words or blocks, uint8 [R, bytes], hold them."""

    layout: CodeLayout
    stored: np.ndarray

    @property
    def place(self) -> tuple[CodeLayout, int, int]:
        """The layout, the address, and the bytes from a stored row to the next, as native code takes them."""
        return self.layout, self.stored.ctypes.data, self.stored.strides[0]

    def read(self, rows: np.ndarray, first: int, last: int) -> np.ndarray:
        """Return codes of these rows and of columns `first` to `last`. Shapes: `[R]` -> uint8 `[R, last - first]`."""
        rows = np.ascontiguousarray(rows, np.int64)
        out = np.empty((len(rows), last - first), np.uint8)
        unpack_codes(*self.place, rows.ctypes.data, len(rows), first, last - first, out.ctypes.data)
        return out


@dataclass(frozen=True, slots=True)
class Quantized:
    """Values of a matrix [N, I] in groups of columns, as stored.

    Fields:
        codes: [N, I].
        table: the fp32 values of codes; None: codes are integers, int8 ones if `is_signed`.
        scales: any float format [N or fewer, G], as stored or transposed; `rows_per_scale` rows share one.
        zeros: rows `first` to `last` -> [rows, G], or the one zero of all.
        groups: the group of each column, int64 [I].
        expected_zero: what every zero must be, where the file says so; `zeros` is then read only to check it.
        bytes_per_value: as stored, with scales and zeros.
    """

    codes: StoredCodes
    scales: WeightTensor
    zeros: Rows | float
    groups: np.ndarray
    bytes_per_value: float
    rows_per_scale: int = 1
    expected_zero: int | None = None
    table: np.ndarray | None = None
    is_signed: bool = False

    def scales_zeros(self, name: str, first: int, last: int) -> tuple[np.ndarray, np.ndarray | np.float32]:
        """fp32 [rows, G] each, or the zero of all. Raises: ModelFileError for zeros that are not the expected."""
        if self.rows_per_scale == 1:
            scales = self.scales.part(slice(first, last), slice(None)).to_numpy()
        else:
            scales = self.scales.to_numpy()[np.arange(first, last) // self.rows_per_scale]
        if not callable(self.zeros):
            return scales, np.float32(self.zeros)
        zeros = self.zeros(first, last)
        if self.expected_zero is None:
            return scales, zeros.astype(np.float32)
        if (zeros != self.expected_zero).any():
            raise ModelFileError(
                f"'{name}' has zero points beside {self.expected_zero}, but quantization_config has sym=true; set it "
                "to false"
            )
        return scales, np.float32(self.expected_zero)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensor(WeightTensor):
    """A matrix, or rows and columns of one, of which `stored` are the codes in the file, of all rows and columns.

    `corner`: the first row and column. `row_order` counts from the first row.
    """

    quantized: Quantized
    corner: tuple[int, int] = (0, 0)

    @property
    def num_bytes(self) -> int:
        """As stored."""
        return round(self.shape[0] * self.shape[1] * self.quantized.bytes_per_value)

    def part(self, rows: slice, columns: slice) -> "QuantizedTensor":
        """Some rows and columns; nothing is read."""
        top, bottom, _ = rows.indices(self.shape[0])
        left, right, _ = columns.indices(self.shape[1])
        corner = (self.corner[0] + (top if self.row_order is None else 0), self.corner[1] + left)
        order = None if self.row_order is None else self.row_order[top:bottom]
        return replace(self, shape=(bottom - top, right - left), corner=corner, row_order=order)

    def transposed(self) -> WeightTensor:
        """Raises: UnsupportedModelError."""
        raise UnsupportedModelError(f"'{self.name}' is quantised with inputs as rows; use the original model")

    def matrix(self, index: int) -> WeightTensor:
        """Raises: UnsupportedModelError."""
        raise UnsupportedModelError(f"'{self.name}' is quantised as a whole stack of matrices; use the original model")

    def in_groups(self, *, in_halves: bool = False) -> tuple[np.ndarray, ...]:
        """Return the values of codes 0 to 255, scales, zeros, and the group of each column.

        Shapes: fp32 `[256]`, fp32 `[rows, G]`, fp32 `[rows, G]`, int32 `[I]`.
        Raises: UnsupportedModelError for scales beyond fp16 if they become halves, `in_halves`.
        """
        table, rows, left = self.quantized.table, self._rows(), self.corner[1]
        if table is None:
            codes = np.arange(256, dtype=np.uint8)
            table = (codes.view(np.int8) if self.quantized.is_signed else codes).astype(np.float32)
        first, last = int(rows.min()), int(rows.max()) + 1
        scales, zeros = self.quantized.scales_zeros(self.name, first, last)
        zeros = np.broadcast_to(zeros, scales.shape)
        if self.row_order is not None:
            scales, zeros = scales[rows - first], zeros[rows - first]
        if in_halves and not self._are_halves(scales, zeros):
            raise UnsupportedModelError(f"'{self.name}' has scales that fp16 cannot hold; use the original model")
        groups = self.quantized.groups[left : left + self.shape[1]].astype(np.int32)
        return table, np.ascontiguousarray(scales), np.ascontiguousarray(zeros), groups

    def _are_halves(self, scales: np.ndarray, zeros: np.ndarray) -> bool:
        """Tell whether scales, and of Q4_1 the minima too, are finite in fp16. Shapes: `[rows, G]` each."""
        has_minima = self.format == "Q4_1"
        # The extremes mostly suffice: a product for each group took longer than packing it.
        factor = max(zeros.max(), -zeros.min(), np.float32(1)) if has_minima else np.float32(1)
        if max(scales.max(), -scales.min()) * factor < HALF_OVERFLOW:
            return True
        factors = np.maximum(np.abs(zeros), 1) if has_minima else factor
        return bool((np.abs(scales) * factors < HALF_OVERFLOW).all())

    @property
    def block_scales(self) -> tuple[StoredCodes, float]:
        """The scales of NVFP4's blocks in E4M3, and half of the matrix's factor: codes stand for doubled floats."""
        scales = self.quantized.scales
        assert isinstance(scales, QuantizedTensor)
        assert scales.quantized.table is not None
        return scales.quantized.codes, float(scales.quantized.table[E4M3_ONE] / 2)

    def to_numpy(self) -> np.ndarray:
        """Decode to fp32."""
        return self._values() + np.float32(self.offset) if self.offset else self._values()

    def _values(self) -> np.ndarray:
        table, scales, zeros, groups = self.in_groups()
        left = self.corner[1]
        codes = self.quantized.codes.read(self._rows(), left, left + self.shape[1])
        out = np.empty(codes.shape, np.float32)
        num_rows = max(1, WEIGHTS_PER_PIECE // codes.shape[1])
        for first in range(0, len(codes), num_rows):
            piece = slice(first, first + num_rows)
            np.subtract(table[codes[piece]], zeros[piece][:, groups], out=out[piece])
            out[piece] *= scales[piece][:, groups]
        return out

    def _rows(self) -> np.ndarray:
        """Rows of the file."""
        return self.corner[0] + (np.arange(self.shape[0]) if self.row_order is None else self.row_order)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedTensor(WeightTensor):
    """Columns of a float matrix whose values are rounded to E4M3 times a scale of their row: max |row| / 448.

    `source`: the same rows with all columns.
    """

    source: WeightTensor
    columns: slice

    @classmethod
    def of(cls, source: WeightTensor) -> "RoundedTensor":
        """The whole matrix; nothing is read."""
        return cls(source.name, source.shape, "FP8", source.stored, source=source, columns=slice(0, source.shape[1]))

    def part(self, rows: slice, columns: slice) -> "RoundedTensor":
        """Some rows and columns; nothing is read."""
        source = self.source.part(rows, slice(None))
        left, right, _ = columns.indices(self.shape[1])
        kept = slice(self.columns.start + left, self.columns.start + right)
        return replace(self, shape=(source.shape[0], right - left), stored=source.stored, source=source, columns=kept)

    def to_numpy(self) -> np.ndarray:
        """Decode to fp32, and round."""
        values = self.source.to_numpy()
        scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(E4M3_LARGEST)
        with np.errstate(invalid="ignore"):  # a row with a NaN or an infinity becomes NaN
            rounded: np.ndarray = round_to_e4m3(values / np.where(scales == 0, 1, scales)) * scales
        return rounded[:, self.columns]

    def release(self) -> None:
        """Unmap the pages of the file until they are read again."""
        self.source.release()


def nvfp4(
    name: str, shape: tuple[int, int], codes: StoredCodes, scales: StoredCodes, factor: np.float32
) -> QuantizedTensor:
    """A matrix of 4-bit floats, with a scale for each 16 columns in E4M3 times the factor of all.

    Shapes: codes [N, I]; scales [N, I / 16].
    """
    num_groups = shape[1] // NVFP4_GROUP
    one = WeightTensor(name, (1, 1), "F32", np.ones((1, 1), np.float32).view(np.uint8))
    scaling = Quantized(scales, one, 0.0, np.zeros(num_groups, np.int64), 1.0, shape[0], table=e4m3_values() * factor)
    of_groups = QuantizedTensor(name, (shape[0], num_groups), "FP8", scales.stored, quantized=scaling)
    quantized = Quantized(
        codes, of_groups, 0.0, np.arange(shape[1]) // NVFP4_GROUP, NVFP4_BYTES_PER_VALUE, table=DOUBLED_FLOATS / 2
    )
    return QuantizedTensor(name, shape, "NVFP4", codes.stored, quantized=quantized)


def e4m3_values() -> np.ndarray:
    """The 256 values of E4M3: bias 7, no infinities, NaN where all other bits are set (OCP FP8 1.0). fp32 [256]."""
    codes = np.arange(256)
    exponents, fractions = (codes >> 3) & 15, (codes & 7) / 8
    sizes = np.where(exponents == 0, fractions * 2.0**-6, (1 + fractions) * 2.0 ** (exponents - 7.0))
    values = np.where(codes & 127 == 127, np.nan, sizes) * np.where(codes < 128, 1, -1)
    return values.astype(np.float32)


def round_to_e4m3(values: np.ndarray) -> np.ndarray:
    """fp32 values of at most 448 to the nearest of E4M3, ties to even; NaN stays."""
    bits = values.view(np.uint32)
    # Three bits of the fraction stay. Below 2^-6 values are multiples of 2^-9, as fp32 is around 1.5 * 2^14.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & np.uint32(0xFFF00000)).view(np.float32)
    small = values + np.float32(24576) - np.float32(24576)
    return np.where(np.abs(values) < 2.0**-6, small, normal)


def e5m2_values() -> np.ndarray:
    """The 256 values of E5M2, the upper byte of float16. fp32 [256]."""
    return (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)
