"""Weights in the layout of the native kernels: packed once at load, weights of 4 to 8 bits staying so.

What a stored format becomes says the table under Numerics in `docs/architecture.md`; layouts: `native/plan/types.h`.
Formats that stay take the file's bytes, those of 256 weights per block and IQ4_NL at most 1.03 times as many.
Parts stacked into one matrix keep a format each (`Packing`) if all but the last have a multiple of 32 rows; otherwise
parts that differ become 8 bit. Next to read: `emit.py`.
"""

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire._native import CodeLayout, PackedRows, Weight, WeightFormat, pack_rows, packed_bytes
from quire.config import EngineConfig
from quire.kernels.instruction import Packing
from quire.runtime.huge_pages import allocate
from quire.weights.model_files import Progress, ignore_progress
from quire.weights.quantized import QuantizedTensor, RoundedTensor, StoredCodes
from quire.weights.weight_tensor import BLOCK_FORMATS, FLOATS, WeightTensor, packed_codebook

BLOCK = 32
PACKED_DIRECTLY = {
    "Q4_0": WeightFormat.q4, "Q4_1": WeightFormat.q4m, "Q5_0": WeightFormat.q5, "Q5_1": WeightFormat.q5m,
    "Q8_0": WeightFormat.q8, "Q4_K": WeightFormat.q4k, "Q5_K": WeightFormat.q5k, "Q6_K": WeightFormat.q6k,
    "IQ4_NL": WeightFormat.iq4nl, "IQ4_XS": WeightFormat.iq4xs, "MXFP4": WeightFormat.mxfp4,
    "NVFP4": WeightFormat.nvfp4,
}  # fmt: skip
BY_DTYPE = {"float32": WeightFormat.f32, "float16": WeightFormat.f16, "bfloat16": WeightFormat.bf16}
BY_QUANTIZATION = {"int8": WeightFormat.q8, "int4": WeightFormat.q4m, "fp8": WeightFormat.q8}
ALIGNMENT = 64
PART_VALUES = 8 << 20
"""Weights of a piece: decoded, where that must be, they are 32 MB. Each piece takes time of the interpreter."""
BATCH_BYTES = 32 << 20
"""Rows that one native call packs: decoded or read, they take memory beside the packed weights until it ends."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A stored tensor, or a part of one, becomes rows `first_row` … of a parameter: `loader.py` plans that."""

    tensor: WeightTensor
    parameter_name: str
    first_row: int


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The format and the offset of rows `rows` of a packed parameter with `num_inputs` columns."""

    format: WeightFormat
    offset: int
    rows: range
    num_inputs: int


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """Rows of a tensor to be packed, and the arrays whose memory `job` reads."""

    job: PackedRows
    arrays: tuple[NDArray[Any], ...]
    tensor: WeightTensor


def choose_packings(
    config: EngineConfig,
    parameters: Mapping[str, Any],
    partitions: Mapping[str, Any],
    placements: list[Placement],
) -> dict[str, Packing]:
    """The packing of each matrix, by its parameter's name. Formats are the same on every rank."""
    stacks: dict[str, list[Placement]] = {}
    for placement in placements:
        stacks.setdefault(placement.parameter_name, []).append(placement)
    packings = {}
    for name, parameter in parameters.items():
        if parameter.ndim != 2:
            continue
        shape = tuple(parameter.shape)
        if getattr(parameter, "keeps_dtype", False):
            packings[name] = Packing.whole(shape[0], BY_DTYPE[config.dtype])
            continue
        stack, whole_shape = stacks.get(name, []), partitions[name].whole_shape(shape) if name in partitions else shape
        formats = choose_formats(config, [item.tensor.format for item in stack] or ["F32"], *whole_shape)
        packings[name] = stacked(formats, [0, *(item.first_row for item in stack[1:]), shape[0]])
    return packings


def choose_formats(
    config: EngineConfig, stored: Sequence[str], num_outputs: int, num_inputs: int
) -> list[WeightFormat]:
    """Return the format of each part of a parameter; the parts are stored in these formats.

    Quantised weights stay as they are if the configuration keeps them; else all become the compute dtype.
    """
    quantization = config.options.quantization
    is_float = set(stored) <= set(FLOATS)
    if num_inputs % BLOCK or not config.keeps_stored_weights or (is_float and quantization is None):
        return [BY_DTYPE[config.dtype]] * len(stored)
    if quantization is not None and is_float:
        # `int4` leaves embeddings and heads at 8 bit.
        is_table = num_outputs == config.model.vocab_size
        return [WeightFormat.q8 if is_table else BY_QUANTIZATION[quantization]] * len(stored)
    return [PACKED_DIRECTLY.get(each, WeightFormat.q8) for each in stored]


def stacked(formats: Sequence[WeightFormat], bounds: Sequence[int]) -> Packing:
    """Return the packing of parts with these formats, part i being rows `bounds[i]` … `bounds[i + 1]` - 1."""
    counts = [end - first for first, end in itertools.pairwise(bounds)]
    parts: list[tuple[int, WeightFormat]] = []
    for count, part_format in zip(counts, formats, strict=True):
        above = parts.pop()[0] if parts and parts[-1][1] == part_format else 0
        parts.append((above + count, part_format))
    if any(count % BLOCK for count, _ in parts[:-1]):
        return Packing.whole(bounds[-1], WeightFormat.q8)
    return Packing(tuple(parts))


def kept_bytes(tensors: Iterable[WeightTensor]) -> int:
    """Bytes of stored weights that stay as they are: quantised ones in their packed format, floats as in the file."""
    total = 0
    for tensor in tensors:
        if tensor.format in FLOATS or len(tensor.shape) < 2:
            total += tensor.num_bytes
        else:
            *rows, num_inputs = tensor.shape
            total += packed_bytes(PACKED_DIRECTLY.get(tensor.format, WeightFormat.q8), math.prod(rows), num_inputs)
    return total


class PackedWeights:
    """All parameters of a model in one piece of memory.

    Attributes: `shapes` of all, and `packings` of the matrices, by name; `placements`: the tensors that are put here.
    """

    def __init__(
        self,
        parameters: Mapping[str, Any],
        packings: Mapping[str, Packing],
        num_threads: int = 1,
        placements: Sequence[Placement] = (),
    ) -> None:
        """`parameters`: by name, anything with a shape. `packings`: per two-dimensional parameter its `Packing`.

        `num_threads` pack.
        """
        self._num_threads = num_threads
        self._parameters = parameters
        self.placements = list(placements)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self.packings = {name: packings[name] for name, shape in self.shapes.items() if len(shape) != 1}
        self._matrices: dict[str, list[PartPlan]] = {}
        self._vectors: dict[str, int] = {}  # offsets
        self._weights: dict[str, Weight] = {}
        self.num_bytes = 0
        for name, shape in self.shapes.items():
            if len(shape) == 1:
                self._vectors[name] = self._reserve(4 * shape[0])
                continue
            num_inputs, first = shape[1], 0
            self._matrices[name] = []
            for count, part_format in packings[name].parts:
                offset = self._reserve(packed_bytes(part_format, count, num_inputs))
                self._matrices[name].append(PartPlan(part_format, offset, range(first, first + count), num_inputs))
                first += count

    def _reserve(self, num_bytes: int) -> int:
        offset = self.num_bytes
        self.num_bytes += num_bytes + -num_bytes % ALIGNMENT
        return offset

    @functools.cached_property
    def memory(self) -> NDArray[np.uint8]:
        """The bytes of all parameters: zeros at first, allocated where they are first used. Shapes: [num_bytes]."""
        return allocate(self.num_bytes)

    def use(self, memory: NDArray[np.uint8]) -> None:
        """Take `memory` for all parameters: zeros to be filled, or weights that were packed before.

        It must start at a multiple of 64 bytes. Weights and addresses that were given out before are no longer valid.
        Shapes: [num_bytes].
        """
        assert len(memory) == self.num_bytes
        assert memory.ctypes.data % ALIGNMENT == 0
        self._weights.clear()
        self.memory = memory

    def only(self, names: Collection[str]) -> "PackedWeights":
        """Return memory for these parameters alone, in the same formats, with their placements."""
        chosen = {name: parameter for name, parameter in self._parameters.items() if name in names}
        placements = [item for item in self.placements if item.parameter_name in names]
        return PackedWeights(chosen, self.packings, self._num_threads, placements)

    def name_of(self, parameter: Any) -> str:
        """The name of a parameter, which is known by identity and may be on "meta"; a name is its own."""
        return parameter if isinstance(parameter, str) else self._names[id(parameter)]

    def packing_of(self, parameter: Any) -> Packing:
        """The packing of a matrix."""
        return self.packings[self.name_of(parameter)]

    def weight(self, parameter: Any) -> Weight:
        """The `Weight` of a matrix. It is alive as long as this object."""
        name = self.name_of(parameter)
        if name not in self._weights:
            weight = None
            for part in reversed(self._matrices[name]):
                weight = Weight(self._address(part), len(part.rows), part.num_inputs, part.format, weight)
            assert weight is not None
            self._weights[name] = weight
        return self._weights[name]

    def vector_address(self, parameter: Any) -> int:
        """The address of the fp32 values of a vector."""
        return self.memory.ctypes.data + self._vectors[self.name_of(parameter)]

    def fill(self, placements: Sequence[Placement], progress: Progress | None = None) -> None:
        """Put each stored tensor at its parameter's first row, many in one native call.

        Between two calls this thread waits for the interpreter's lock, while another one makes the tokenizer: with a
        call for each matrix of a small model, for most of that time.
        """
        report = functools.partial(progress or ignore_progress, "loading weights")
        total, done, num_bytes = sum(item.tensor.num_bytes for item in placements), 0, 0
        batch: list[WeightPiece] = []
        read: list[int] = []  # bytes done with each tensor of the batch

        def flush() -> None:
            for one in read:
                report(one, total)
            pack_rows([piece.job for piece in batch], self._num_threads)
            for piece in batch:
                piece.tensor.release()
            read.clear()
            batch.clear()

        for placement in placements:
            for piece in self._pieces(placement):
                batch.append(piece)
                num_bytes += max(piece.tensor.num_bytes, sum(array.nbytes for array in piece.arrays))
                if num_bytes >= BATCH_BYTES:
                    flush()
                    num_bytes = 0
            done += placement.tensor.num_bytes
            read.append(done)
        flush()

    def _pieces(self, placement: Placement) -> Iterator[WeightPiece]:
        """Cut a matrix in pieces. A vector is put at once.

        Mutates: the vector.
        """
        name, tensor, first_row = placement.parameter_name, placement.tensor, placement.first_row
        if name in self._vectors:
            self._vector(name)[first_row : first_row + tensor.shape[0]] = tensor.to_numpy()
            return
        part = self._part(name, first_row)
        num_rows, num_inputs = tensor.shape
        each = max(1, PART_VALUES // num_inputs // BLOCK * BLOCK)
        for first in range(0, num_rows, each):
            stored = tensor if num_rows <= each else tensor.part(slice(first, first + each), slice(None))
            yield self._piece(part, stored, first_row + first)

    def _piece(self, part: PartPlan, tensor: WeightTensor, first_row: int) -> WeightPiece:
        """Return the job that packs a tensor: from its blocks or codes, or from values that NumPy decodes."""
        is_direct = PACKED_DIRECTLY.get(tensor.format) == part.format
        if isinstance(tensor, QuantizedTensor) and not tensor.offset:
            return self._coded(part, tensor, first_row, is_direct=is_direct)
        if is_direct and tensor.scales is not None:
            pairs, scales = tensor.pairs_and_scales()
            job = self._job(part, "CODES", pairs, first_row)
            job.set_codes(*StoredCodes(CodeLayout.across4, pairs).place, 0, 0, is_direct=True)
            job.set_block_scales(*StoredCodes(CodeLayout.across8, scales).place, 1.0)
            return WeightPiece(job, (pairs, scales), tensor)
        if isinstance(tensor, RoundedTensor):
            return self._rounded(part, tensor, first_row)
        is_stored = is_direct or (tensor.format in BLOCK_FORMATS and not tensor.offset)
        rows = np.ascontiguousarray(tensor.raw if is_stored else tensor.to_numpy())
        return WeightPiece(self._job(part, tensor.format if is_stored else "F32", rows, first_row), (rows,), tensor)

    def _rounded(self, part: PartPlan, tensor: RoundedTensor, first_row: int) -> WeightPiece:
        """Return the job that rounds floats to E4M3 and packs them."""
        source = tensor.source
        is_stored = source.format in FLOATS and not source.offset
        rows = np.ascontiguousarray(source.raw if is_stored else source.to_numpy().view(np.uint8))
        left, item_bytes = tensor.columns.start, rows.shape[1] // source.shape[1]
        job = self._job(part, source.format if is_stored else "F32", rows[:, left * item_bytes :], first_row)
        job.whole_inputs, job.first_input = source.shape[1], left
        return WeightPiece(job, (rows,), tensor)

    def _coded(self, part: PartPlan, tensor: QuantizedTensor, first_row: int, *, is_direct: bool) -> WeightPiece:
        """Return the job that packs codes from the file: as the part's own, or from the values that they stand for."""
        quantized, (top, left), arrays = tensor.quantized, tensor.corner, list[NDArray[Any]]()
        order = np.arange(tensor.shape[0]) if tensor.row_order is None else tensor.row_order
        arrays.append(order.astype(np.int32))
        order_address = 0 if tensor.row_order is None else arrays[0].ctypes.data
        job = self._job(part, "CODES", arrays[0][:, None], first_row, order_address)
        flipped = 0x80 if is_direct and quantized.is_signed else 0
        job.set_codes(*quantized.codes.place, top, left, is_direct=is_direct, flipped=flipped)
        if is_direct and tensor.format == "NVFP4":
            of_blocks, factor = tensor.block_scales
            job.set_block_scales(*of_blocks.place, factor)
        else:
            table, scales, zeros, groups = parts = tensor.in_groups(in_halves=is_direct)
            arrays += parts
            job.set_groups(
                table.ctypes.data, scales.ctypes.data, zeros.ctypes.data, groups.ctypes.data, scales.shape[1]
            )
        return WeightPiece(job, tuple(arrays), tensor)

    def put_values(self, name: str, values: Any, first_row: int = 0) -> None:
        """fp32 values, an array or a tensor, become rows of one part of a parameter, quantised if its format says so.

        Shapes: [rows, I] or [rows].
        """
        if name in self._vectors:
            self._vector(name)[first_row : first_row + len(values)] = values
        else:
            rows = np.ascontiguousarray(values, np.float32)
            pack_rows([self._job(self._part(name, first_row), "F32", rows, first_row)], self._num_threads)

    def _vector(self, name: str) -> NDArray[np.float32]:
        offset = self._vectors[name]
        return self.memory[offset : offset + 4 * self.shapes[name][0]].view(np.float32)

    def _part(self, name: str, row: int) -> PartPlan:
        return next(part for part in self._matrices[name] if row in part.rows)

    def _job(self, part: PartPlan, stored: str, rows: NDArray[Any], first_row: int, order: int = 0) -> PackedRows:
        assert first_row + len(rows) <= part.rows.stop
        codebook = packed_codebook(stored)
        return PackedRows(
            stored,
            rows.ctypes.data,
            len(rows),
            part.num_inputs,
            rows.strides[0],
            self._address(part),
            first_row - part.rows.start,
            part.format,
            order,
            0 if codebook is None else codebook.ctypes.data,
        )

    def _address(self, part: PartPlan) -> int:
        return self.memory.ctypes.data + part.offset
