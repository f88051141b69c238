"""One named weight of a checkpoint, decoded only when asked for. Must not know where names come from.

Next to read: `checkpoint.py`, which hands these out.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from quire.errors import UnsupportedModelError
from quire.weights.block_formats import BLOCK_FORMATS

if TYPE_CHECKING:
    import torch


class WeightTensor(Protocol):
    """What the loader sees of a weight."""

    @property
    def name(self) -> str:
        """The Hugging Face name, as `model.layers.0.mlp.up_proj.weight`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """In torch order."""

    @property
    def format(self) -> str:
        """How it is stored: "F32", "BF16", "Q4_1", …"""

    @property
    def num_bytes(self) -> int:
        """As stored."""

    @property
    def raw(self) -> np.ndarray:
        """The stored rows in the order of `shape`. Shapes: uint8 `[rows, row_bytes]`; a vector is one row."""

    def to_torch(self, dtype: "torch.dtype") -> "torch.Tensor":
        """Decode to fp32, then round to `dtype`. Copy before writing: memory may be shared with the file's mapping."""


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A `WeightTensor` in a mapped file.

    `row_order[i]` is the stored position of row i (of element i in a vector); None when they are stored in order.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    stored: np.ndarray
    """Shapes: uint8 `[rows, row_bytes]`."""
    row_order: np.ndarray | None = None

    @property
    def num_bytes(self) -> int:
        """As stored."""
        return self.stored.size

    @property
    def raw(self) -> np.ndarray:
        """The rows in the order of `shape`: a view of the file, or a copy when they are stored in another order."""
        if self.row_order is None:
            return self.stored
        if len(self.shape) == 1:
            elements = self.stored.reshape(self.shape[0], -1)
            return np.take(elements, self.row_order, axis=0).reshape(1, -1)
        return np.take(self.stored, self.row_order, axis=0)

    def to_torch(self, dtype: "torch.dtype") -> "torch.Tensor":
        """Decode to fp32, then round to `dtype`.

        Raises: UnsupportedModelError for a format that no supported model has as weights.
        """
        if self.format not in BLOCK_FORMATS:
            raise UnsupportedModelError(
                f"weight '{self.name}' is stored as {self.format}; supported are {', '.join(BLOCK_FORMATS)}"
            )
        from quire.weights.dequantize import dequantize

        return dequantize(self.raw, self.format, dtype).view(self.shape)
