"""`PackedAdapter`: an adapter's matrices in the layout of native ops, for one rank.

Reading and packing share nothing with a running step, so that they may be done in a thread beside it.
Next to read: `adapter_pool.py`.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.adapter import Adapter
from quire.errors import ModelFileError
from quire.runtime.adapter_layout import AdapterLayout, LayerPart, PlacedLayer
from quire.weights.adapter_files import LowRankPair, read_adapter
from quire.weights.weight_tensor import to_bf16

TILE = LANES = 16
LINE_BYTES = 64


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """All matrices in one piece of memory, layer by layer, and per layer the words of its `LoraEntry`.

    One piece: memory that is read once per step is fetched twice as fast from large pages.
    `num_products`: the most rows of A of a layer.
    """

    memory: NDArray[Any]
    entries: Mapping[str, list[int]]
    num_products: int

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return self.memory.nbytes


def pack_adapter(
    adapter: Adapter, layout: AdapterLayout, hf_config: Mapping[str, Any], *, is_bf16: bool
) -> PackedAdapter:
    """Read an adapter's files and pack its matrices for the model of `layout`.

    Raises: ModelFileError, also if the files have changed since the adapter was checked; UnsupportedModelError.
    """
    files = read_adapter(Path(adapter.path), hf_config)
    with ThreadPoolExecutor(1) as beside:
        digest = beside.submit(files.digest)
        packed = _pack(layout.place(files), np.dtype(np.uint16 if is_bf16 else np.float32))
    if digest.result() != adapter.digest:
        raise ModelFileError(f"{adapter.path} has changed since adapter '{adapter.name}' was loaded: load it again")
    return packed


def _pack(layers: Mapping[str, PlacedLayer], dtype: np.dtype[Any]) -> PackedAdapter:
    num_bytes = sum(-(-size * dtype.itemsize // LINE_BYTES) for layer in layers.values() for size in _sizes(layer))
    memory = np.empty(num_bytes * LINE_BYTES + LINE_BYTES, np.uint8)
    memory = memory[-memory.ctypes.data % LINE_BYTES :][: num_bytes * LINE_BYTES]
    entries, used, most = {}, 0, 0
    for name, layer in layers.items():
        matrices = []
        for size in _sizes(layer):
            matrices.append(memory[used : used + size * dtype.itemsize].view(dtype))
            used += -(-size * dtype.itemsize // LINE_BYTES) * LINE_BYTES
        entries[name] = _fill(layer, matrices)
        most = max(most, entries[name][1])
    return PackedAdapter(memory, entries, most)


def _pairs(layer: PlacedLayer) -> dict[LowRankPair, int]:
    """Return the pairs of a layer, each with its first row of A."""
    firsts: dict[LowRankPair, int] = {}
    top = 0
    for part in layer.parts:
        if part.pair not in firsts:
            firsts[part.pair] = top
            top += part.pair.rank
    return firsts


def _tiles(part: LayerPart) -> tuple[int, int]:
    return part.first_row // TILE, -(-(part.first_row + len(part.stored)) // TILE)


def _num_columns(layer: PlacedLayer) -> int:
    return len(range(layer.parts[0].pair.a.shape[1])[layer.columns])


def _sizes(layer: PlacedLayer) -> Iterator[int]:
    """Yield the values of A, then those of each part's B."""
    yield sum(pair.rank for pair in _pairs(layer)) * -(-_num_columns(layer) // LANES) * LANES
    for part in layer.parts:
        first_tile, end_tile = _tiles(part)
        yield (end_tile - first_tile) * TILE * part.pair.rank


def _fill(layer: PlacedLayer, matrices: list[NDArray[Any]]) -> list[int]:
    """Write a layer's matrices. Returns: the words of its `LoraEntry`. Mutates: matrices."""
    (stacked, *others), width, firsts = matrices, _num_columns(layer), _pairs(layer)
    a = stacked.reshape(-1, -(-width // LANES) * LANES)
    a[:, width:] = 0
    for pair, first in firsts.items():
        a[first : first + pair.rank, :width] = _stored(pair.a.to_numpy().reshape(pair.a.shape)[:, layer.columns], a)
    entry = [stacked.ctypes.data, len(a), len(layer.parts), int(stacked.dtype == np.uint16)]
    for part, packed in zip(layer.parts, others, strict=True):
        rank, (first_tile, end_tile) = part.pair.rank, _tiles(part)
        rows, start = _stored(part.b(), packed), part.first_row - first_tile * TILE
        if len(rows) < (end_tile - first_tile) * TILE:
            padded = np.zeros(((end_tile - first_tile) * TILE, rank), packed.dtype)
            padded[start : start + len(rows)] = rows
            rows = padded
        packed.reshape(-1, rank, TILE)[:] = rows.reshape(-1, TILE, rank).transpose(0, 2, 1)
        entry += [first_tile, end_tile, packed.ctypes.data, firsts[part.pair], rank]
    return entry


def _stored(values: NDArray[np.float32], like: NDArray[Any]) -> NDArray[Any]:
    """Return the values in the type that kernels read: bf16, rounded to nearest, or fp32."""
    return to_bf16(np.ascontiguousarray(values)) if like.dtype == np.uint16 else values
