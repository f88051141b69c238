"""Weights in the layout of the native kernels: packed once at load, 4- and 8-bit weights staying 4 and 8 bit.

What a stored format becomes (layouts: `native/plan/types.h`):

    Q4_0, Q4_1, Q8_0   the same values, in another order
    Q4_K, Q5_K, Q6_K   the same values, in another order, of at most 1.03 times the file's bytes
    MXFP4              8 bit: the same values, where a block's scale is 2^-24 to 2^15
    IQ4_NL, IQ4_XS     8 bit: the same values, of IQ4_XS with scales rounded to 11 bits
    all others         8 bit per 32, from the decoded values: within 0.45 % of the largest of the 32
    F32, F16, BF16     the compute dtype, or as `quantization` says: fp8 are 8 bit per 32 of values rounded to E4M3

GPTQ, AWQ and compressed-tensors are stored as Q4_0, Q4_1 or Q8_0 where these can hold them (`weights/quantized.py`).
Parts stacked into one matrix share one format: 8 bit where they differ. Next to read: `emit.py`.
"""

import functools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire._native import Weight, WeightFormat, pack_rows, packed_bytes
from quire.config import EngineConfig
from quire.runtime.huge_pages import allocate
from quire.runtime.placement import FLOATS, Placement
from quire.weights.weight_tensor import WeightTensor

BLOCK = 32
PACKED_DIRECTLY = {
    "Q4_0": WeightFormat.q4, "Q4_1": WeightFormat.q4m, "Q8_0": WeightFormat.q8, "Q4_K": WeightFormat.q4k,
    "Q5_K": WeightFormat.q5k, "Q6_K": WeightFormat.q6k, "MXFP4": WeightFormat.q8,
    "IQ4_NL": WeightFormat.q8, "IQ4_XS": WeightFormat.q8,
}  # fmt: skip
BY_DTYPE = {"float32": WeightFormat.f32, "float16": WeightFormat.f16, "bfloat16": WeightFormat.bf16}
BY_QUANTIZATION = {"int8": WeightFormat.q8, "int4": WeightFormat.q4m, "fp8": WeightFormat.q8}
ALIGNMENT = 64
PART_VALUES = 4 << 20
"""Weights that are packed at a time: decoded, where that must be, they are 16 MB."""


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """The format and the offset of a packed parameter [N, I]."""

    format: WeightFormat
    offset: int
    num_outputs: int
    num_inputs: int


def choose_formats(
    config: EngineConfig,
    parameters: Mapping[str, Any],
    partitions: Mapping[str, Any],
    placements: list[Placement],
) -> dict[str, WeightFormat]:
    """The packed format of each matrix, by its parameter's name. It is the same on every rank."""
    stored: dict[str, list[str]] = {name: ["F32"] for name in parameters}
    for placement in placements:
        stored[placement.parameter_name] = [] if placement.first_row == 0 else stored[placement.parameter_name]
        stored[placement.parameter_name].append(placement.tensor.format)
    formats = {}
    for name, parameter in parameters.items():
        if getattr(parameter, "keeps_dtype", False):
            formats[name] = BY_DTYPE[config.dtype]
        elif parameter.ndim == 2:
            shape = tuple(parameter.shape)
            whole_shape = partitions[name].whole_shape(shape) if name in partitions else shape
            formats[name] = choose_format(config, set(stored[name]), *whole_shape)
    return formats


def choose_format(config: EngineConfig, stored: set[str], num_outputs: int, num_inputs: int) -> WeightFormat:
    """Return the format of one parameter made of parts in these stored formats.

    Quantised weights stay as they are if the configuration keeps them; else all become the compute dtype.
    """
    quantization = config.options.quantization
    is_float = stored <= FLOATS
    if num_inputs % BLOCK or not config.keeps_stored_weights or (is_float and quantization is None):
        return BY_DTYPE[config.dtype]
    if quantization is not None and is_float:
        # `int4` leaves embeddings and heads at 8 bit.
        return WeightFormat.q8 if num_outputs == config.model.vocab_size else BY_QUANTIZATION[quantization]
    return PACKED_DIRECTLY.get(stored.pop(), WeightFormat.q8) if len(stored) == 1 else WeightFormat.q8


def rounded_placements(config: EngineConfig, weights: "PackedWeights") -> list[Placement]:
    """Return the placements of the weights; `quantization` fp8 rounds float matrices that are no tables or heads."""

    def is_rounded(item: Placement) -> bool:
        is_table = (item.whole or item.tensor).shape[0] == config.model.vocab_size
        is_packed = weights.formats.get(item.parameter_name) == BY_QUANTIZATION["fp8"]
        return is_packed and item.tensor.format in FLOATS and not is_table

    if config.options.quantization != "fp8":
        return weights.placements
    return [item.rounded() if is_rounded(item) else item for item in weights.placements]


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

    Attributes: `shapes` of all, and `formats` of the matrices, by name; `placements`: the tensors that are put here.
    """

    def __init__(
        self, parameters: Mapping[str, Any], formats: Mapping[str, WeightFormat], num_threads: int = 1
    ) -> None:
        """`parameters`: by name, anything with a shape. `formats`: per two-dimensional parameter its `WeightFormat`.

        `num_threads` pack.
        """
        self._num_threads = num_threads
        self._parameters = parameters
        self.placements: list[Placement] = []
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self.formats = {name: formats[name] for name, shape in self.shapes.items() if len(shape) != 1}
        self._matrices: dict[str, MatrixPlan] = {}
        self._vectors: dict[str, NDArray[np.float32]] = {}
        size = 0
        for name, shape in self.shapes.items():
            if len(shape) == 1:
                self._vectors[name] = np.zeros(shape, np.float32)
                continue
            num_outputs, num_inputs = shape
            self._matrices[name] = MatrixPlan(formats[name], size, num_outputs, num_inputs)
            size += packed_bytes(formats[name], num_outputs, num_inputs)
            size += -size % ALIGNMENT
        self._num_packed_bytes = size
        self.num_bytes = size + sum(vector.nbytes for vector in self._vectors.values())

    @functools.cached_property
    def _memory(self) -> NDArray[np.uint8]:
        return allocate(self._num_packed_bytes)

    def only(self, names: Collection[str]) -> "PackedWeights":
        """Return memory for these parameters alone, in the same formats, with their placements."""
        chosen = {name: parameter for name, parameter in self._parameters.items() if name in names}
        weights = PackedWeights(chosen, self.formats, self._num_threads)
        weights.placements = [item for item in self.placements if item.parameter_name in names]
        return weights

    def name_of(self, parameter: Any) -> str:
        """The name of a parameter, which is known by identity and may be on "meta"; a name is its own."""
        return parameter if isinstance(parameter, str) else self._names[id(parameter)]

    def format_of(self, parameter: Any) -> WeightFormat:
        """The format of a packed matrix."""
        return self._matrices[self.name_of(parameter)].format

    def weight(self, parameter: Any) -> Weight:
        """The `Weight` of a matrix."""
        plan = self._matrices[self.name_of(parameter)]
        return Weight(self._address(plan), plan.num_outputs, plan.num_inputs, plan.format)

    def vector_address(self, parameter: Any) -> int:
        """The address of the fp32 values of a vector."""
        return self._vectors[self.name_of(parameter)].ctypes.data

    def put(self, name: str, tensor: WeightTensor, first_row: int) -> None:
        """A stored tensor becomes rows `first_row` … of a parameter."""
        if name in self._vectors:
            self._vectors[name][first_row : first_row + tensor.shape[0]] = tensor.to_numpy()
            return
        plan = self._matrices[name]
        is_direct = (tensor.format in FLOATS and not tensor.offset) or PACKED_DIRECTLY.get(tensor.format) == plan.format
        num_rows, num_inputs = tensor.shape
        each = max(1, PART_VALUES // num_inputs)
        for first in range(0, num_rows, each):
            rows = tensor if num_rows <= each else tensor.part(slice(first, first + each), slice(None))
            if is_direct:
                self._pack(plan, tensor.format, np.ascontiguousarray(rows.raw), first_row + first)
            else:
                self.put_values(name, rows.to_numpy(), first_row + first)
            rows.release()

    def put_values(self, name: str, values: Any, first_row: int = 0) -> None:
        """fp32 values, an array or a tensor, become rows of a parameter, quantised if its format says so.

        Shapes: [rows, I] or [rows].
        """
        if name in self._vectors:
            self._vectors[name][first_row : first_row + len(values)] = values
        else:
            self._pack(self._matrices[name], "F32", np.ascontiguousarray(values, np.float32), first_row)

    def _pack(self, plan: MatrixPlan, stored: str, rows: NDArray[Any], first_row: int) -> None:
        pack_rows(
            stored, rows.ctypes.data, len(rows), plan.num_inputs, rows.strides[0], self._address(plan), first_row,
            plan.format, num_threads=self._num_threads,
        )  # fmt: skip

    def _address(self, plan: MatrixPlan) -> int:
        return self._memory.ctypes.data + plan.offset
