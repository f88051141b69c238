"""Packed weights, int8 rows and one-op plans for the tests of the native linear ops."""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.weights.weight_tensor import BLOCK_FORMATS, BlockFormat, packed_codebook

ALL_ISAS = ("scalar", "neon", "neon_i8mm", "avx2", "avx_vnni", "avx512", "avx512_bf16", "amx_emulated", "amx")
ISAS = [isa for isa in ALL_ISAS if _native.isa_supported(isa)]
EXACT_ISAS = [isa for isa in ISAS if not isa.startswith("amx")]
"""Those without tiles, which round in another order."""
FORMATS = _native.WeightFormat.__members__
ACT_BLOCK = np.dtype([("q", "i1", 32), ("scale", "f4"), ("scaled_sum", "f4"), ("sum", "i4"), ("first_sum", "i4")])
"""`ActBlock` of native/plan/types.h."""


STORED = {"q4": "Q4_0", "q4m": "Q4_1", "q5": "Q5_0", "q5m": "Q5_1", "q8": "Q8_0", "q4k": "Q4_K", "q5k": "Q5_K",
          "q6k": "Q6_K", "iq4nl": "IQ4_NL", "iq4xs": "IQ4_XS", "mxfp4": "MXFP4", "nvfp4": "NVFP4"}  # fmt: skip
"""Return values from which a quantised format is packed without loss."""
BLOCKS = {**BLOCK_FORMATS, "NVFP4": BlockFormat("NVFP4", 40, 32, 22)}
"""NVFP4, of these tests alone: the row's factor in fp32, two scales in E4M3, codes in the order of Q4_0."""
LONG_BLOCKS = {name for name, stored in STORED.items() if BLOCKS[stored].block_len == 256}
FLOATS_STORED = {"f32": "F32", "f16": "F16", "bf16": "BF16"}


def whole_blocks(format_name: str, num_inputs: int) -> int:
    """`num_inputs`, or more so that they are whole blocks of 256."""
    return -(-num_inputs // 256) * 256 if format_name in LONG_BLOCKS else num_inputs


def finite_rows(stored: str, num_rows: int, num_inputs: int, seed: int = 0) -> np.ndarray:
    """Random blocks with ordinary scales, as GGUF stores them. Shapes: uint8 `[rows, bytes]`."""
    block = BLOCKS[stored]
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (num_rows, num_inputs // block.block_len * block.block_bytes), dtype=np.uint8)
    if stored == "F32":
        return np.random.default_rng(seed).standard_normal((num_rows, num_inputs), dtype=np.float32).view(np.uint8)
    if block.block_len == 1:
        raw[:, 1::2] &= 0xBF  # no exponent of infinity
        return raw
    blocks = raw.reshape(-1, block.block_bytes)
    random = np.random.default_rng(seed)
    if stored == "MXFP4":
        blocks[:, 0] = random.integers(118, 126, len(blocks))
        return raw
    if stored == "NVFP4":
        rows = raw.reshape(num_rows, -1, 22)
        rows[..., :4] = random.uniform(1e-4, 1e-3, (num_rows, 1)).astype(np.float32).view(np.uint8)[:, None]
        rows[..., 4:6] &= 0x77  # no NaN
        return raw
    columns = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}.get(stored, (0,))
    for column, (low, high) in zip(columns, [(0.001, 0.1), (-0.1, 0.02)], strict=False):
        largest = 64 if block.block_len == 256 else 1  # of the factors with fewer bits
        scales = (random.uniform(low, high, len(blocks)) / largest).astype(np.float16)
        blocks[:, column : column + 2] = scales.view(np.uint8).reshape(-1, 2)
    return raw


def aligned(num_bytes: int, fill: int = 0xFF) -> np.ndarray:
    """`num_bytes` bytes that start at a multiple of 64; 0xFF makes NaN of every float."""
    memory = np.full(num_bytes + 64, fill, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes]


class Packed:
    """A packed `[outputs, inputs]` matrix, filled by `add_rows`; what was not packed is NaN."""

    def __init__(self, format_name: str, num_outputs: int, num_inputs: int, fill: int = 0xFF) -> None:
        self.format_name, self.num_outputs, self.num_inputs = format_name, num_outputs, num_inputs
        self.format = FORMATS[format_name]
        self.data = aligned(_native.packed_bytes(self.format, num_outputs, num_inputs), fill)
        self._next = 0

    def add_rows(
        self, stored: str, raw: np.ndarray, row_order: np.ndarray | None = None, num_threads: int = 1
    ) -> "Packed":
        """Shapes: raw `[rows, bytes]`, row_order int32."""
        if stored == "NVFP4":
            return self._add_nvfp4(raw if row_order is None else raw[row_order], num_threads)
        count = len(raw) if row_order is None else len(row_order)
        order = 0 if row_order is None else row_order.ctypes.data
        codebook = packed_codebook(stored)
        job = _native.PackedRows(
            stored, raw.ctypes.data, count, self.num_inputs, raw.strides[0], self.data.ctypes.data, self._next,
            self.format, order, 0 if codebook is None else codebook.ctypes.data,
        )  # fmt: skip
        _native.pack_rows([job], num_threads)
        self._next += count
        return self

    def _add_nvfp4(self, raw: np.ndarray, num_threads: int) -> "Packed":
        """Rows as codes, each with its factor: a job for each."""
        blocks = raw.reshape(len(raw), -1, 22)
        low, high = blocks[..., 6:] & 15, blocks[..., 6:] >> 4
        values = np.concatenate([low, high], -1).reshape(len(raw), -1)
        pairs, jobs = values[:, ::2] | values[:, 1::2] << 4, []
        scales = np.ascontiguousarray(blocks[..., 4:6]).reshape(len(raw), -1)
        for row, factor in enumerate(np.ascontiguousarray(blocks[:, 0, :4]).view(np.float32)[:, 0]):
            job = _native.PackedRows(
                "CODES", 0, 1, self.num_inputs, 0, self.data.ctypes.data, self._next + row, self.format
            )
            job.set_codes(_native.CodeLayout.across4, pairs.ctypes.data, pairs.strides[0], row, 0, is_direct=True)
            job.set_block_scales(_native.CodeLayout.across8, scales.ctypes.data, scales.strides[0], float(factor))
            jobs.append(job)
        _native.pack_rows(jobs, num_threads)
        self._next += len(raw)
        return self

    @property
    def weight(self) -> _native.Weight:
        return _native.Weight(self.data.ctypes.data, self.num_outputs, self.num_inputs, self.format)

    def decoded(self) -> np.ndarray:
        """Return the values that the embedding op reads back: fp32 `[outputs, inputs]`."""
        return embedded(self, np.arange(self.num_outputs))


class Stack:
    """Matrices of the same inputs in several formats, one below another."""

    def __init__(self, *parts: Packed) -> None:
        self.parts, self.num_inputs = parts, parts[0].num_inputs
        self.num_outputs = sum(part.num_outputs for part in parts)
        self.weight = None
        for part in reversed(parts):
            self.weight = _native.Weight(
                part.data.ctypes.data, part.num_outputs, part.num_inputs, part.format, self.weight
            )

    def decoded(self) -> np.ndarray:
        return embedded(self, np.arange(self.num_outputs))


def random_stack(*parts: tuple[str, int], num_inputs: int = 256) -> Stack:
    """Parts of these formats and numbers of outputs."""
    return Stack(*(random_weights(name, count, num_inputs, seed) for seed, (name, count) in enumerate(parts)))


def random_weights(format_name: str, num_outputs: int, num_inputs: int, seed: int = 0) -> Packed:
    stored = STORED[format_name]
    return Packed(format_name, num_outputs, num_inputs).add_rows(
        stored, finite_rows(stored, num_outputs, num_inputs, seed)
    )


def quantised(values: np.ndarray) -> np.ndarray:
    """int8 rows of fp32 `[T, I]`: `quantise_block` of native/ops/rows.h, of finite values. Shapes: `[T, I / 32]`."""
    blocks = values.reshape(len(values), values.shape[1] // 32, 32)
    highest = np.abs(blocks).max(2)
    inverse = np.divide(np.float32(127), highest, out=np.zeros_like(highest), where=highest > 0)
    acts = np.zeros(highest.shape, dtype=ACT_BLOCK)
    acts["q"] = np.rint(blocks * inverse[:, :, None])
    acts["scale"] = highest / np.float32(127)
    acts["sum"] = acts["q"].sum(2, dtype=np.int32)
    acts["first_sum"] = acts["q"][..., :16].sum(2, dtype=np.int32)
    acts["scaled_sum"] = acts["scale"] * acts["sum"].astype(np.float32)
    return acts


def random_acts(num_rows: int, num_inputs: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((num_rows, num_inputs), dtype=np.float32)
    values[:, 32:64] *= 100
    return quantised(values)


def dequantised(acts: np.ndarray) -> np.ndarray:
    """Shapes: `[T, I / 32]` blocks -> float64 `[T, I]`."""
    values = acts["q"].astype(np.float64) * acts["scale"].astype(np.float64)[:, :, None]
    return values.reshape(len(acts), -1)


def rows_of(array: np.ndarray) -> _native.Rows:
    """Shapes: fp32, uint16 (bf16) or `ACT_BLOCK` `[T, columns]`."""
    kind = {"f": _native.RowType.f32, "u": _native.RowType.bf16, "V": _native.RowType.q8}[array.dtype.kind]
    return _native.Rows(array.ctypes.data, array.strides[0], kind)


def empty_rows(kind: str, num_rows: int, width: int) -> np.ndarray:
    """Rows with a few columns more than needed, of 0xFF bytes: NaN."""
    dtype = {"f32": np.dtype(np.float32), "bf16": np.dtype(np.uint16), "q8": ACT_BLOCK}[kind]
    columns = (width // 32 if kind == "q8" else width) + 3
    return np.full(num_rows * columns * dtype.itemsize, 0xFF, dtype=np.uint8).view(dtype).reshape(num_rows, columns)


def embedded(packed: Packed | Stack, ids: np.ndarray, num_threads: int = 1) -> np.ndarray:
    out = np.full((len(ids), packed.num_inputs), np.nan, dtype=np.float32)
    plan = _native.Plan(num_threads, max(1, len(ids)), 1)
    plan.embed(packed.weight, _native.Rows(out.ctypes.data, out.strides[0], _native.RowType.f32))
    run(plan, ids)
    return out


def run(plan: _native.Plan, token_ids: np.ndarray, num_logit_rows: int = 0, start: int = 0) -> None:
    """Run one request with these tokens from position `start` on."""
    tokens = np.ascontiguousarray(np.concatenate([np.zeros(start), token_ids]), dtype=np.int32)
    row, starts, counts = np.zeros(1, np.int32), np.full(1, start, np.int32), np.full(1, len(token_ids), np.int32)
    logit_rows = np.arange(num_logit_rows, dtype=np.int32)
    plan.run(
        1, 1, num_logit_rows, row.ctypes.data, starts.ctypes.data, counts.ctypes.data, logit_rows.ctypes.data,
        tokens.ctypes.data, len(tokens), 0, 0, 0,
    )  # fmt: skip


def reduce_once(
    exchange: _native.Exchange, x: NDArray[np.float32], into: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    out = np.full_like(x, np.nan) if into is None else into.copy()
    plan = _native.Plan(exchange.num_threads, len(x), 1)
    plan.all_reduce(rows_of(x), rows_of(out), x.shape[1], exchange.address, add=into is not None)
    run(plan, np.zeros(len(x)))
    return out


def each_isa(action: Callable[[], np.ndarray], isas: list[str] | None = None) -> Iterator[np.ndarray]:
    before = _native.isa()
    try:
        for isa in ISAS if isas is None else isas:
            _native.set_isa(isa)
            yield action()
    finally:
        _native.set_isa(before)
