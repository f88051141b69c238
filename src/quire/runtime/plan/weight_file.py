"""`fill_weights`: packed weights from a file in the cache; the first start packs the checkpoint into it.

`DIR/<model>-<identity>.weights` has the bytes of `PackedWeights.memory`. The identity is that of the model's path, the
rank and the formats. The key in the header is a SHA-256 of everything that the bytes depend on; the instruction set
changes none. If the key differs, the source or Quire changed, and the file is made anew.
Next to read: `../shared_file.py` for the file, `packed_weights.py` for the bytes.
"""

import functools
import hashlib
import logging
import mmap
import platform
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire import __version__
from quire.byte_sizes import format_bytes
from quire.config import EngineConfig
from quire.errors import MemoryCapacityError
from quire.files import UnsafeFileError
from quire.runtime.huge_pages import on_huge_pages
from quire.runtime.loader import draft_files
from quire.runtime.plan.packed_weights import PackedWeights
from quire.runtime.shared_file import SUFFIX, Header, SharedFile, Unfinished, find_or_begin
from quire.weights.checkpoint import Checkpoint, SourceState, source_state
from quire.weights.model_cache import weight_directory
from quire.weights.model_files import Progress, ignore_progress

logger = logging.getLogger("quire.runtime")
LAYOUT_VERSION = 2
"""Raised with every change of the packed bytes of any tensor: `native/plan/types.h`, `native/weights/`, decoding."""
MIN_BYTES = 16 << 20
"""Smaller weights are packed in memory at each start, which takes about 10 ms."""


def fill_weights(
    config: EngineConfig, checkpoint: Checkpoint, weights: PackedWeights, progress: Progress | None, rank: int
) -> None:
    """Map the weights that an earlier start packed, or pack the tensors of the checkpoint into a new file.

    They are packed in memory where no file is kept: `weight_cache` is off, they are small, or the disk is full.
    Mutates: weights. Raises: as `PackedWeights.fill`.
    """
    report = progress or ignore_progress
    directory, name = weight_directory(config.options), checkpoint.files.name
    if directory is None or (weights.num_bytes < MIN_BYTES and not config.weights_on_disk):
        _fill(config, weights, progress, "weight_cache is off")
        return
    begun: NDArray[np.uint8] | Unfinished | None = None
    problem = ""
    checkpoint = replace(checkpoint, state=checkpoint.state + _state_of_head(config))
    try:
        place = place_of(directory, checkpoint, weights, rank)
        report("loading weights", 0, None)
        limit = config.options.weight_cache_bytes
        begun = find_or_begin(place, limit, report, fits_memory=not config.weights_on_disk)
    except OSError as error:
        named = "" if error.filename in (None, str(directory)) else f"{error.filename} "
        problem = f"{directory}: {named}{error.strerror or error}"
        level = logging.WARNING if isinstance(error, UnsafeFileError) else logging.INFO
        logger.log(level, "the packed weights of %s are not kept in %s", name, problem)
    if isinstance(begun, np.ndarray):
        weights.use(begun if config.weights_on_disk else on_huge_pages(begun))
        return
    if begun is None:
        _fill(config, weights, progress, problem)
        return
    try:
        weights.use(begun.memory)
        weights.fill(weights.placements, progress)
    except BaseException:
        begun.discard()
        raise
    if source_state(checkpoint.files) + _state_of_head(config) == checkpoint.state:
        begun.publish()
    else:
        begun.discard()
        logger.info("the packed weights of %s are not kept: its files changed while they were read", name)


def _state_of_head(config: EngineConfig) -> SourceState:
    """Return the state of the files of a head that is packed with the model."""
    return source_state(draft_files(config)) if config.speculative == "eagle" else ()


def _fill(config: EngineConfig, weights: PackedWeights, progress: Progress | None, problem: str) -> None:
    """Pack in memory. Raises: MemoryCapacityError if only a file can hold the weights."""
    if config.weights_on_disk:
        raise MemoryCapacityError(
            f"the weights are larger than memory, and a file of {format_bytes(weights.num_bytes)} cannot hold them "
            f"({problem}): name a directory with so much space with --weight-cache DIR"
        )
    weights.fill(weights.placements, progress)


def place_of(directory: Path, checkpoint: Checkpoint, weights: PackedWeights, rank: int) -> SharedFile:
    """Return the file for these weights of a checkpoint."""
    files = checkpoint.files
    source = str(files.path.absolute())
    packings = [
        (name, shape, [(count, part.name) for count, part in weights.packings[name].parts] if len(shape) > 1 else [])
        for name, shape in weights.shapes.items()
    ]
    sources = [
        (item.parameter_name, item.first_row, type(item.tensor).__name__, item.tensor) for item in weights.placements
    ]
    kinds = sorted({type(item.tensor).__name__ for item in weights.placements})
    identity = _digest(source, rank, packings, kinds)
    # Compilers may contract products and sums, which changes the last bits, for one kind of CPU and not another.
    versions = (LAYOUT_VERSION, __version__, platform.machine(), sys.byteorder)
    key = _digest(*versions, checkpoint.state, rank, packings, sources)
    stem = re.sub(r"[^\w.-]+", "_", files.path.name, flags=re.ASCII)[:80]
    header = Header(key, files.name, source, rank, weights.num_bytes, f"quire {__version__}")
    return SharedFile(directory / f"{stem}-{identity[:16]}{SUFFIX}", header)


def _digest(*values: Any) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(values, enc_hook=functools.partial(_describe, {}))).hexdigest()


def _describe(starts: dict[int, int], value: Any) -> Any:
    """Return what MessagePack can hold of a part of a tensor: of mapped bytes, their place in the file.

    Functions are left out: the files they read decide what they return. Mutates: starts, addresses of mappings.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, slice):
        return repr(value)
    if not isinstance(value, np.ndarray):
        return None
    owner: Any = value
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if not isinstance(owner, mmap.mmap):
        return hashlib.sha256(value.tobytes()).hexdigest(), value.shape, value.dtype.str
    if id(owner) not in starts:
        starts[id(owner)] = np.frombuffer(owner, np.uint8).ctypes.data
    offset = value.__array_interface__["data"][0] - starts[id(owner)]
    return offset, value.shape, value.strides, value.dtype.str
