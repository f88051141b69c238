"""A named weight of a checkpoint, which is decoded when the loader asks for it. It must not know models.

Next to read: `checkpoint.py`, which makes them.
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from quire.errors import UnsupportedModelError
from quire.weights.block_formats import BLOCK_FORMATS, BlockFormat, row_bytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """A weight in a mapped file.

    Fields:
        name: the Hugging Face name, as `model.layers.0.mlp.up_proj.weight`.
        shape: in torch's order.
        format: of the stored values: "F32", "BF16", "Q4_1", …
        stored: uint8 `[rows, row_bytes]`; a vector is one row.
        row_order: stored position of each row (of each element of a vector); None when they are stored in order.
        is_transposed: the matrix is stored with inputs as rows.
        offset: added to each value when it is decoded.
        scales: of MXFP4, where they are stored apart: uint8 `[rows, blocks]`, exponents. `stored` then has the nibbles
            of neighbours in one byte.
        column_order: stored position of each of as many equal parts of a matrix's columns, whole blocks of
            `stored_format`; None when they are stored in order.
        stored_format: of `stored`, where parts are no whole blocks of it and `raw` encodes them in `format`.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    stored: np.ndarray
    row_order: np.ndarray | None = None
    is_transposed: bool = False
    offset: float = 0.0
    scales: np.ndarray | None = None
    column_order: np.ndarray | None = None
    stored_format: str | None = None

    @property
    def num_bytes(self) -> int:
        """As stored."""
        size = self.stored.size + (0 if self.scales is None else self.scales.size)
        has_all_rows = self.row_order is None or len(self.shape) == 1
        return size if has_all_rows else self.shape[0] * size // len(self.stored)

    @property
    def raw(self) -> np.ndarray:
        """The rows in the order of `shape`: a view of the file, or a copy when they are stored in another order.

        Shapes: uint8 `[rows, row_bytes]`; a vector is one row.
        """
        if self.column_order is not None:
            return self._columns_in_order()
        if self.scales is not None:
            return join_mxfp4(*self.pairs_and_scales())
        if self.is_transposed:
            values = self.stored.reshape(self.shape[1], -1, self._block_format().block_bytes).swapaxes(0, 1)
            values = values if self.row_order is None else values[self.row_order]
            return values.reshape(self.shape[0], -1)
        if self.row_order is None:
            return self.stored
        if len(self.shape) == 1:
            elements = self.stored.reshape(-1, self._block_format().block_bytes)
            return np.take(elements, self.row_order, axis=0).reshape(1, -1)
        return np.take(self.stored, self.row_order, axis=0)

    def pairs_and_scales(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of MXFP4 with scales apart, in the order of `shape`, and their scales.

        Shapes: uint8 `[rows, I / 2]`, uint8 `[rows, I / 32]`.
        """
        assert self.scales is not None
        if self.row_order is None:
            return np.ascontiguousarray(self.stored), np.ascontiguousarray(self.scales)
        return np.take(self.stored, self.row_order, axis=0), np.take(self.scales, self.row_order, axis=0)

    def part(self, rows: slice, columns: slice) -> "WeightTensor":
        """Some rows and columns of a matrix, or elements `rows` of a vector; no matrix is read.

        Columns must be whole blocks of the format. Raises: UnsupportedModelError for formats that `to_torch` refuses.
        """
        block = self._block_format()
        if self.column_order is not None and columns == slice(None):
            return replace(
                self, shape=(len(range(*rows.indices(self.shape[0]))), self.shape[1]), stored=self.stored[rows]
            )
        is_mixed = self.is_transposed and self.row_order is not None
        if self.scales is not None:
            first, last, _ = columns.indices(self.shape[1])
            stored, scales = self.stored[:, first // 2 : last // 2], self.scales[:, first // 32 : last // 32]
            order = np.arange(len(stored)) if self.row_order is None else self.row_order
            chosen = replace(self, shape=(len(order[rows]), last - first), stored=stored, scales=scales)
            if self.row_order is None:
                return replace(chosen, stored=stored[rows], scales=scales[rows])
            return replace(chosen, row_order=order[rows])
        if self.column_order is not None or is_mixed:
            whole = WeightTensor(self.name, self.shape, self.format, self.raw, offset=self.offset)
            return whole.part(rows, columns)
        if len(self.shape) == 1:
            elements = self.raw.reshape(-1, block.block_bytes)[rows]
            shape = (len(elements) * block.block_len,)
            return replace(self, shape=shape, stored=elements.reshape(1, -1), row_order=None)
        if self.is_transposed:
            top, bottom, _ = rows.indices(self.shape[0])
            stored = self.stored[columns, row_bytes(block, top) : row_bytes(block, bottom)]
            return replace(self, shape=(bottom - top, len(stored)), stored=stored)
        first, last, _ = columns.indices(self.shape[1])
        stored = self.stored[:, row_bytes(block, first) : row_bytes(block, last)]
        num_rows = len(range(*rows.indices(self.shape[0])))
        if self.row_order is None:
            return replace(self, shape=(num_rows, last - first), stored=stored[rows])
        return replace(self, shape=(num_rows, last - first), stored=stored, row_order=self.row_order[rows])

    def unstacked(self) -> Iterator["WeightTensor"]:
        """The matrices of a stack `[matrices, rows, columns]`, or the vectors of a matrix; nothing is read."""
        count, *shape = self.shape
        num_rows = len(self.stored) // count
        for index in range(count):
            rows = slice(index * num_rows, (index + 1) * num_rows)
            scales = None if self.scales is None else self.scales[rows]
            yield replace(self, shape=tuple(shape), stored=self.stored[rows], scales=scales)

    def transposed(self) -> "WeightTensor":
        """The matrix that is stored with inputs as rows; nothing is read.

        Raises: UnsupportedModelError for blocks of several values.
        """
        if self.format not in ("F32", "F16", "BF16"):
            raise UnsupportedModelError(f"weight '{self.name}' is stored as {self.format}, which cannot be transposed")
        return replace(self, shape=self.shape[::-1], is_transposed=True)

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

    def plus(self, offset: float) -> "WeightTensor":
        """The same values plus a constant; nothing is read."""
        return replace(self, offset=self.offset + offset)

    def to_torch(self, dtype: "torch.dtype") -> "torch.Tensor":
        """Decode to fp32, then round to `dtype`. Copy before writing: memory may be shared with the file's mapping.

        Raises: UnsupportedModelError for a format that no supported model has as weights.
        """
        self._block_format()
        import torch

        from quire.weights.dequantize import dequantize

        if self.offset:
            values = dequantize(self.raw, self.format, torch.float32) + self.offset
            return values.to(dtype).view(self.shape)
        return dequantize(self.raw, self.format, dtype).view(self.shape)

    def to_numpy(self) -> np.ndarray:
        """Decode to fp32. Copy before writing. Raises: as `to_torch`."""
        self._block_format()
        from quire.weights.dequantize import decode

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

    def _columns_in_order(self) -> np.ndarray:
        """Shapes: uint8 `[rows, row_bytes]`."""
        assert self.column_order is not None
        num_rows, num_parts = len(self.stored), len(self.column_order)
        if self.stored_format is None:
            return self.stored.reshape(num_rows, num_parts, -1)[:, self.column_order].reshape(num_rows, -1)
        from quire.weights.dequantize import decode
        from quire.weights.quantize import quantize

        values = decode(self.stored, self.stored_format).reshape(num_rows, num_parts, -1)
        return quantize(values[:, self.column_order].reshape(num_rows, -1), self.format)

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
