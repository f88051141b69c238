"""A named weight of a checkpoint, which is decoded when the loader asks for it; the number formats of stored weights,
and their values as fp32 and back. It must not know files or models.

Formats have GGUF's names; safetensors' F32, F16 and BF16 are the same. Native code decodes blocks in some threads of
Python's, to the bits of the `gguf` package's `quants.dequantize`: fp32 throughout, products and sums rounded
separately. Layouts of blocks: `native/weights/decode.h`, `native/weights/quantize.h`. Next to read: `checkpoint.py`,
which makes the tensors.
"""

import base64
import functools
import json
import mmap
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quire._native import decode_blocks, quantize_rows
from quire.errors import ModelFileError, UnsupportedModelError
from quire.linux import allowed_cpus
from quire.weight_map import Offset, Rows, Taps, Transpose, Unstack, View

if TYPE_CHECKING:
    import torch

# --- Formats: the weights and the bytes of a block ------------------------------------------------


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


# --- Tensors --------------------------------------------------------------------------------------

_TORCH_NAMES = {"F32": "torch.float32", "F16": "torch.float16", "BF16": "torch.bfloat16"}
_WHOLE = {2: np.uint16, 4: np.uint32}
MXFP4_NIBBLES = 16
"""Bytes of a block of MXFP4 without its scale."""


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """A weight in a mapped file. Views of it read nothing.

    Fields:
        name: the Hugging Face name, as `model.layers.0.mlp.up_proj.weight`.
        shape: in torch's order.
        format: of the stored values: "F32", "BF16", "Q4_1", …
        stored: uint8 `[rows, row_bytes]`, or blocks `[rows, blocks, block_bytes]`; a vector is one row.
        row_order: stored position of each row (of each element of a vector); None when they are stored in order.
        column_order: stored position of each block of a row; None when they are stored in order.
        offset: added to each value when it is decoded.
        scales: of MXFP4, where they are stored apart: uint8 `[rows, blocks]`, exponents. `stored` then has the nibbles
            of neighbours in one byte.
        is_across: blocks have values of a column.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    stored: np.ndarray
    row_order: np.ndarray | None = None
    column_order: np.ndarray | None = None
    offset: float = 0.0
    scales: np.ndarray | None = None
    is_across: bool = False

    @property
    def num_bytes(self) -> int:
        """As stored."""
        size = self.stored.size + (0 if self.scales is None else self.scales.size)
        for axis, order in enumerate((self.row_order, self.column_order)):
            size = size if order is None else size * len(order) // self._blocks().shape[axis]
        return size

    @property
    def raw(self) -> np.ndarray:
        """The rows in the order of `shape`: a view of the file, or a copy when they are stored in another order.

        Shapes: uint8 `[rows, row_bytes]`; a vector is one row.
        """
        is_in_order = self.row_order is None and self.column_order is None
        if is_in_order and self.scales is None and self.stored.ndim == 2:
            return self.stored
        if self.scales is not None:
            return join_mxfp4(*self.pairs_and_scales())
        blocks = self._in_order(self._blocks())
        if (whole := _WHOLE.get(blocks.shape[2])) is not None:  # not byte by byte
            blocks = np.ascontiguousarray(blocks.view(whole)).view(np.uint8)
        return blocks.reshape(1 if len(self.shape) == 1 else len(blocks), -1)

    def _blocks(self) -> np.ndarray:
        """Shapes: uint8 `[rows, blocks, block_bytes]`; a vector's blocks are rows."""
        if self.stored.ndim == 3:
            return self.stored
        block_bytes = self._block_format().block_bytes if self.scales is None else MXFP4_NIBBLES
        if len(self.shape) == 1:
            return self.stored.reshape(-1, 1, block_bytes)
        return self.stored.reshape(len(self.stored), -1, block_bytes)

    def _in_order(self, blocks: np.ndarray) -> np.ndarray:
        if self.is_across and self.format not in FLOATS:
            raise UnsupportedModelError(f"weight '{self.name}' is stored as {self.format}, which cannot be transposed")
        blocks = blocks if self.row_order is None else np.take(blocks, self.row_order, axis=0)
        return blocks if self.column_order is None else np.take(blocks, self.column_order, axis=1)

    def viewed(self, views: Iterable[View]) -> "WeightTensor":
        """Return what the views, one after the other, make of the tensor; nothing is read.

        Raises: ModelFileError for views of another shape; UnsupportedModelError.
        """
        tensor = self
        for view in views:
            tensor = tensor._viewed(view)
        return tensor

    def _viewed(self, view: View) -> "WeightTensor":
        match view:
            case Rows(order) if len(order) == self.shape[0]:
                return self.with_rows(order)
            case Transpose(floats_only):
                is_matrix = len(self.shape) == 2 and not (floats_only and self.format not in FLOATS)
                return self.transposed() if is_matrix else self
            case Offset(value):
                return replace(self, offset=self.offset + value)
            case Taps():
                return self.taps_first() if len(self.shape) > 1 else self
            case Unstack(index, count) if len(self.shape) > 1 and count == self.shape[0]:
                return self.matrix(index)
        expected = f"{view.count} matrices" if isinstance(view, Unstack) else f"{len(view.order)} rows"
        raise ModelFileError(
            f"the checkpoint has {self.name} {list(self.shape)}, but the model's configuration makes {expected}: "
            "configuration and weights do not belong together"
        )

    def pairs_and_scales(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of MXFP4 with scales apart, in the order of `shape`, and their scales.

        Shapes: uint8 `[rows, I / 2]`, uint8 `[rows, I / 32]`.
        """
        assert self.scales is not None
        pairs, scales = self._in_order(self._blocks()), self._in_order(self.scales)
        return np.ascontiguousarray(pairs.reshape(len(pairs), -1)), np.ascontiguousarray(scales)

    def part(self, rows: slice, columns: slice) -> "WeightTensor":
        """Some rows and columns of a matrix, or elements `rows` of a vector; no matrix is read.

        Columns must be whole blocks of the format. Raises: UnsupportedModelError for formats that `to_torch` refuses.
        """
        block_len, blocks, scales = self._block_format().block_len, self._blocks(), self.scales
        row_order, column_order = self.row_order, self.column_order
        shape: tuple[int, ...] = (len(range(*rows.indices(self.shape[0]))),)
        if row_order is not None:
            row_order = row_order[rows]
        else:
            blocks, scales = blocks[rows], None if scales is None else scales[rows]
        if len(self.shape) > 1:
            first, last, _ = columns.indices(self.shape[1])
            chosen, shape = slice(first // block_len, last // block_len), (*shape, last - first)
            if column_order is not None:
                column_order = column_order[chosen]
            else:
                blocks, scales = blocks[:, chosen], None if scales is None else scales[:, chosen]
        return replace(self, shape=shape, stored=blocks, row_order=row_order, column_order=column_order, scales=scales)

    def matrix(self, index: int) -> "WeightTensor":
        """A matrix of a stack `[matrices, rows, columns]`, or a vector of a matrix; nothing is read."""
        num_rows = len(self.stored) // self.shape[0]
        rows = slice(index * num_rows, (index + 1) * num_rows)
        scales = None if self.scales is None else self.scales[rows]
        return replace(self, shape=self.shape[1:], stored=self.stored[rows], scales=scales)

    def unstacked(self) -> Iterator["WeightTensor"]:
        """The matrices of a stack `[matrices, rows, columns]`, or the vectors of a matrix; nothing is read."""
        return map(self.matrix, range(self.shape[0]))

    def transposed(self) -> "WeightTensor":
        """The matrix with inputs as rows; nothing is read. One of blocks of several values is only transposed back."""
        return replace(
            self,
            shape=self.shape[::-1],
            stored=self._blocks().swapaxes(0, 1),
            row_order=self.column_order,
            column_order=self.row_order,
            is_across=not self.is_across,
        )

    def taps_first(self) -> "WeightTensor":
        """The filters `[channels, 1, taps]` of a convolution as a vector, all channels' first taps first."""
        num_channels, num_taps = self.shape[0], self.shape[-1]
        stored = np.arange(num_channels * num_taps).reshape(num_channels, num_taps)
        order = (stored if self.row_order is None else stored[self.row_order]).T.reshape(-1)
        return replace(self, shape=(len(order),), stored=self.stored.reshape(1, -1), row_order=order)

    def with_rows(self, row_order: np.ndarray) -> "WeightTensor":
        """These rows, or elements of a vector, in this order; nothing is read."""
        order = row_order if self.row_order is None else self.row_order[row_order]
        return replace(self, shape=(len(order), *self.shape[1:]), row_order=order)

    def to_torch(self, dtype: "torch.dtype") -> "torch.Tensor":
        """Decode to fp32, then round to `dtype`. Copy before writing: memory may be shared with the file's mapping.

        Raises: UnsupportedModelError for a format that no supported model has as weights.
        """
        import torch

        if _TORCH_NAMES.get(self.format) != str(dtype) or self.offset:
            return torch.from_numpy(self.to_numpy()).to(dtype)
        raw = self.raw
        # torch's kernels expect a pointer aligned to the element; a safetensors header may have any length.
        aligned = raw if raw.ctypes.data % dtype.itemsize == 0 else raw.copy()
        return torch.from_numpy(aligned).view(dtype).view(self.shape)

    def to_numpy(self) -> np.ndarray:
        """Decode to fp32. Copy before writing. Raises: as `to_torch`."""
        self._block_format()

        values = decode(self.raw, self.format).reshape(self.shape)
        return values + np.float32(self.offset) if self.offset else values

    def release(self) -> None:
        """Unmap the pages of the file until they are read again: they count as this process's memory."""
        owner: object = self.stored
        while isinstance(owner, np.ndarray | memoryview):
            owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
        if isinstance(owner, mmap.mmap):
            low, high = np.lib.array_utils.byte_bounds(self.stored)
            start = np.frombuffer(owner, dtype=np.uint8).ctypes.data
            first = (low - start) // mmap.PAGESIZE * mmap.PAGESIZE
            owner.madvise(mmap.MADV_DONTNEED, first, high - start - first)

    def _block_format(self) -> BlockFormat:
        if self.format not in BLOCK_FORMATS:
            raise UnsupportedModelError(
                f"weight '{self.name}' is stored as {self.format}; supported are {', '.join(BLOCK_FORMATS)}"
            )
        return BLOCK_FORMATS[self.format]


def join_mxfp4(pairs: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Blocks as GGUF stores them: a scale, then 16 bytes of which byte i has inputs i and i + 16.

    Shapes: pairs uint8 `[rows, blocks * 16]`, byte i of a block having inputs 2 i and 2 i + 1; scales `[rows, blocks]`
    -> `[rows, blocks * 17]`.
    """
    blocks = pairs.reshape(*scales.shape, 16)
    values = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    nibbles = values[..., :16] | (values[..., 16:] << 4)
    return np.concatenate([scales[..., None], nibbles], axis=-1).reshape(len(pairs), -1)


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of values in bf16: nearest, ties to even; a NaN stays one. `values` must be contiguous."""
    bits = values.view(np.uint32)
    rounded = bits >> 16  # in place from here on: each further array of this size costs as much as the rounding
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    found = rounded.astype(np.uint16)
    found[np.isnan(values)] = 0x7FC0
    return found


# --- Decoding: blocks and plain floats to fp32 ----------------------------------------------------

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


# --- Codebooks of the IQ formats: each entry is 4 or 8 values of a block --------------------------


@functools.cache
def _codebooks() -> dict[str, Any]:
    """Return facts of the formats, from ggml-common.h of ggml.

    Per format the values of an entry, the values that indices stand for, and the entries as indices, packed lowest bits
    first and written in base 85.
    """
    found: dict[str, Any] = json.loads(Path(__file__).with_name("codebooks.json").read_text(encoding="ascii"))
    return found


@functools.cache
def packed_codebook(format_name: str) -> np.ndarray | None:
    """Return the entries as int8 codes of their values (`native/weights/decode.cpp`); None for other formats.

    Shapes: `[entries, 4 or 8]`.
    """
    table = (
        _codebooks().get("IQ1_S" if format_name == "IQ1_M" else format_name) if format_name.startswith("IQ") else None
    )
    if table is None:
        return None
    packed = np.frombuffer(base64.b85decode("".join(table["indices"])), np.uint8)
    bits = (len(table["values"]) - 1).bit_length()
    indices = np.unpackbits(packed, bitorder="little").reshape(-1, bits) @ (1 << np.arange(bits))
    codes = np.array([4, 0, 6] if format_name.startswith("IQ1") else range(0, 16, 2), np.int8)
    return codes[indices.reshape(-1, table["width"])]


# --- Encoding: fp32 to blocks and plain floats ----------------------------------------------------

PLAIN = {"F32": np.float32, "F16": np.float16}
LARGEST_SCALE = 65504.0


def quantize(
    values: np.ndarray, format_name: str, importance: np.ndarray | None = None, *, num_threads: int = 1
) -> np.ndarray:
    """Encode fp32 rows, `importance` weighting the squared errors of each column.

    Shapes: values `[rows, columns]`, importance `[columns]` -> uint8 `[rows, row_bytes]`.
    Raises: ModelFileError for NaN, infinity or values too large for a scale in fp16.
    """
    values = np.ascontiguousarray(values, np.float32)
    largest = float(np.abs(values).max(initial=0.0))
    if not largest <= LARGEST_SCALE and format_name not in ("F32", "BF16"):
        raise ModelFileError(f"a weight is {largest}, more than the {LARGEST_SCALE} that {format_name} can hold")
    if format_name in PLAIN:
        return values.astype(PLAIN[format_name]).view(np.uint8).reshape(len(values), -1)
    if format_name == "BF16":
        return to_bf16(values).view(np.uint8).reshape(len(values), -1)
    out = np.empty((len(values), row_bytes(BLOCK_FORMATS[format_name], values.shape[1])), np.uint8)
    num_rows, num_columns = values.shape
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    quantize_rows(
        format_name,
        values.ctypes.data,
        num_rows,
        num_columns,
        out.ctypes.data,
        0 if weights is None else weights.ctypes.data,
        num_threads,
    )
    return out
