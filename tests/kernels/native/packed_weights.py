"""Packed weights, int8 rows and one-op plans for the tests of the native linear ops."""

from collections.abc import Callable, Iterator

import numpy as np

from quire import _native

ISAS = [isa for isa in ("scalar", "avx2", "avx512", "avx512_bf16") if _native.isa_supported(isa)]
FORMATS = {name: getattr(_native.WeightFormat, name) for name in ("f32", "f16", "bf16", "q4", "q4m", "q8")}
ACT_BLOCK = np.dtype([("q", "i1", 32), ("scale", "f4"), ("scaled_sum", "f4"), ("sum", "i4"), ("unused", "i4")])
"""`ActBlock` of native/plan/types.h."""


def aligned(num_bytes: int, fill: int = 0xFF) -> np.ndarray:
    """`num_bytes` bytes that start at a multiple of 64; 0xFF makes NaN of every float."""
    memory = np.full(num_bytes + 64, fill, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes]


class Packed:
    """A packed `[outputs, inputs]` matrix, filled by `add_rows`; what was not packed is NaN."""

    def __init__(self, format_name: str, num_outputs: int, num_inputs: int) -> None:
        self.format_name, self.num_outputs, self.num_inputs = format_name, num_outputs, num_inputs
        self.format = FORMATS[format_name]
        self.data = aligned(_native.packed_bytes(self.format, num_outputs, num_inputs))
        self._next = 0

    def add_rows(self, stored: str, raw: np.ndarray, row_order: np.ndarray | None = None) -> "Packed":
        """Shapes: raw `[rows, bytes]`, row_order int32."""
        count = len(raw) if row_order is None else len(row_order)
        order = 0 if row_order is None else row_order.ctypes.data
        _native.pack_rows(
            stored, raw.ctypes.data, count, self.num_inputs, raw.strides[0], self.data.ctypes.data, self._next,
            self.format, order,
        )  # fmt: skip
        self._next += count
        return self

    @property
    def weight(self) -> _native.Weight:
        return _native.Weight(self.data.ctypes.data, self.num_outputs, self.num_inputs, self.format)

    def decoded(self) -> np.ndarray:
        """What the embedding op reads back: fp32 `[outputs, inputs]`."""
        return embedded(self, np.arange(self.num_outputs))


def embedded(packed: Packed, ids: np.ndarray, num_threads: int = 1) -> np.ndarray:
    out = np.full((len(ids), packed.num_inputs), np.nan, dtype=np.float32)
    plan = _native.Plan(num_threads, max(1, len(ids)), 1)
    plan.embed(packed.weight, _native.Rows(out.ctypes.data, out.strides[0], _native.RowType.f32))
    run(plan, ids)
    return out


def run(plan: _native.Plan, token_ids: np.ndarray, num_logit_rows: int = 0, start: int = 0) -> None:
    """One request with these tokens from position `start` on."""
    tokens = np.ascontiguousarray(np.concatenate([np.zeros(start), token_ids]), dtype=np.int32)
    row, starts, counts = np.zeros(1, np.int32), np.full(1, start, np.int32), np.full(1, len(token_ids), np.int32)
    logit_rows = np.arange(num_logit_rows, dtype=np.int32)
    plan.run(
        1, 1, num_logit_rows, row.ctypes.data, starts.ctypes.data, counts.ctypes.data, logit_rows.ctypes.data,
        tokens.ctypes.data, len(tokens), 0, 0, 0,
    )  # fmt: skip


def each_isa(action: Callable[[], np.ndarray], isas: list[str] | None = None) -> Iterator[np.ndarray]:
    before = _native.isa()
    try:
        for isa in ISAS if isas is None else isas:
            _native.set_isa(isa)
            yield action()
    finally:
        _native.set_isa(before)
