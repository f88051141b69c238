"""`AdapterPool`: a worker's adapters in memory, and for each step the adapter of each row.

Requests bring an adapter's path and digest; the pool reads it when the first request with it starts. Adapters without a
running request leave, the least recently used first, when others need their memory. The tables that native ops read
(`native/ops/lora.h`) keep their addresses. Next to read: `kernels/lora.py`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.adapter import Adapter
from quire.byte_sizes import format_bytes
from quire.config import EngineConfig
from quire.errors import CapacityError, ModelFileError, QuireError, UnsupportedModelError
from quire.kernels.lora import MAX_PARTS
from quire.layers.group import Group
from quire.lazy_torch import on_meta
from quire.runtime.adapter_layout import PlacedLayer, place_adapter
from quire.runtime.batch import RequestStates, StepLayout
from quire.runtime.loader import make_model
from quire.types import RequestResult, SchedulerOutput
from quire.weights.adapter_files import read_adapter
from quire.weights.weight_tensor import to_bf16

logger = logging.getLogger("quire.runtime")
TILE = LANES = 16
PART_WORDS, HEAD_WORDS = 5, 4
ENTRY_WORDS = HEAD_WORDS + MAX_PARTS * PART_WORDS
"""8-byte words of a `LoraEntry`, and of a `LoraPart` in it."""


@dataclass(slots=True)
class _Resident:
    """An adapter in memory. `num_products`: the most rows of A of a layer."""

    slot: int
    matrices: list[NDArray[Any]]
    num_bytes: int
    num_products: int


class AdapterPool:
    """The adapters of one worker. Not thread-safe.

    Attributes: `errors`: by request id why its adapter could not be read; the request ends with it.
    """

    def __init__(self, config: EngineConfig, group: Group) -> None:
        self._config = config
        with on_meta():
            self._model = make_model(config.model.hf_config, group, config.scheduler.max_model_len)
        self._num_slots, max_tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
        self._is_bf16 = config.dtype != "float32"
        self._max_bytes = config.options.lora_bytes
        self._residents: dict[str, _Resident] = {}  # by digest, the least recently used first
        self._users: dict[str, tuple[str, int]] = {}  # digest and first position, by request
        self.errors: dict[str, QuireError] = {}
        self._entries: dict[str, NDArray[np.int64]] = {}
        self._sites: dict[str, NDArray[np.int64]] = {}
        self._rows: NDArray[np.int32] = np.zeros(max_tokens, np.int32)
        self._slots: NDArray[np.int32] = np.full(max_tokens, -1, np.int32)
        self._products: NDArray[np.float32] = np.zeros((max_tokens, 0), np.float32)
        self._step: NDArray[np.int64] = np.zeros(5, np.int64)

    def site(self, name: str) -> int:
        """Return the address of a linear layer's `LoraSite`, by the name of its weight."""
        if name not in self._sites:
            entries = self._entries[name] = np.zeros((self._num_slots, ENTRY_WORDS), np.int64)
            self._sites[name] = np.array([self._step.ctypes.data, entries.ctypes.data], np.int64)
        return self._sites[name].ctypes.data

    # --- Requests come and go -----------------------------------------------------------------

    def follow(self, output: SchedulerOutput, states: RequestStates) -> None:
        """Take up a step's new requests, and let go of those that the runner no longer knows."""
        new_ids = {new.request_id for new in output.new_requests}  # an id may come again
        for held in (self._users, self.errors):
            for name in [name for name in held if name in new_ids or name not in states.by_id]:
                del held[name]
        for new in output.new_requests:
            if (adapter := new.adapter) is None:
                continue
            try:
                self._hold(adapter)
                self._users[new.request_id] = adapter.digest, adapter.start
            except (QuireError, OSError) as error:
                told = error if isinstance(error, QuireError) else ModelFileError(f"{adapter.path}: {error}")
                self.errors[new.request_id] = told

    def refuse(self, output: SchedulerOutput, results: Sequence[RequestResult]) -> list[RequestResult]:
        """Return a step's results, with errors for requests whose adapter could not be read."""
        wrong = [item.request_id for item in output.scheduled if item.request_id in self.errors]
        found = [RequestResult(name, error=self.errors[name].message, error_code=self.errors[name].code)
                 for name in wrong]  # fmt: skip
        return [*(item for item in results if item.request_id not in wrong), *found]

    def _hold(self, adapter: Adapter) -> None:
        """Bring an adapter into memory, as the one used last."""
        if (known := self._residents.pop(adapter.digest, None)) is not None:
            self._residents[adapter.digest] = known
            return
        files = read_adapter(Path(adapter.path), self._config.model.hf_config)
        if files.digest != adapter.digest:
            raise ModelFileError(f"{adapter.path} has changed since adapter '{adapter.name}' was loaded: load it again")
        layers = place_adapter(self._model, files)
        # Layers of other pipeline stages have no site here; those of no linear layer in any plan are refused.
        layers = {name: layer for name, layer in layers.items() if name in self._sites}
        if not layers and self._config.options.pipeline_parallel_size == 1:
            raise UnsupportedModelError(f"{adapter.path}: none of its modules is a linear layer of this model's plan")
        packed = {name: self._packed(layer) for name, layer in layers.items()}
        num_bytes = sum(matrix.nbytes for _, matrices in packed.values() for matrix in matrices)
        self._make_room(adapter, num_bytes)
        taken = {resident.slot for resident in self._residents.values()}
        slot = next(slot for slot in range(self._num_slots) if slot not in taken)
        for name, (entry, _) in packed.items():
            self._entries[name][slot, : len(entry)] = entry
        num_products = max((entry[1] for entry, _ in packed.values()), default=0)
        held = [matrix for _, matrices in packed.values() for matrix in matrices]
        self._residents[adapter.digest] = _Resident(slot, held, num_bytes, num_products)
        self._grow(num_products)
        logger.info("adapter '%s' is in memory: %s", adapter.name, format_bytes(num_bytes))

    def _make_room(self, adapter: Adapter, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise CapacityError(
                f"adapter '{adapter.name}' takes {num_bytes} bytes, lora_bytes is {self._max_bytes}: --lora-bytes "
                f"{num_bytes} holds it"
            )
        in_use = {digest for digest, _ in self._users.values()}
        idle = iter([digest for digest in self._residents if digest not in in_use])
        held = sum(resident.num_bytes for resident in self._residents.values())
        while held + num_bytes > self._max_bytes or len(self._residents) >= self._num_slots:
            if (digest := next(idle, None)) is None:
                raise CapacityError(
                    f"the adapters of running requests take {held} of lora_bytes={self._max_bytes}: raise --lora-bytes "
                    f"to {held + num_bytes}, or try again later"
                )
            resident = self._residents.pop(digest)
            held -= resident.num_bytes
            for entries in self._entries.values():
                entries[resident.slot] = 0

    def _grow(self, num_products: int) -> None:
        if num_products > self._products.shape[1]:
            width = -(-num_products // LANES) * LANES
            self._products = np.empty((len(self._rows), width), np.float32)

    def _packed(self, layer: PlacedLayer) -> tuple[list[int], list[NDArray[Any]]]:
        """Return a `LoraEntry` and the matrices that it points to."""
        pairs = list(dict.fromkeys(part.pair for part in layer.parts))
        firsts = dict(zip(pairs, np.cumsum([0, *(pair.rank for pair in pairs)]).tolist(), strict=False))
        stacked = np.concatenate([pair.a.to_numpy().reshape(pair.a.shape)[:, layer.columns] for pair in pairs])
        a = self._stored(np.pad(stacked, ((0, 0), (0, -stacked.shape[1] % LANES))))
        entry, matrices = [a.ctypes.data, len(stacked), len(layer.parts), int(self._is_bf16)], [a]
        for part in layer.parts:
            rows = part.b()
            first_tile, end_tile = part.first_row // TILE, -(-(part.first_row + len(rows)) // TILE)
            padded = np.zeros(((end_tile - first_tile) * TILE, rows.shape[1]), np.float32)
            start = part.first_row - first_tile * TILE
            padded[start : start + len(rows)] = rows
            b = self._stored(padded.reshape(-1, TILE, rows.shape[1]).transpose(0, 2, 1))
            entry += [first_tile, end_tile, b.ctypes.data, firsts[part.pair], rows.shape[1]]
            matrices.append(b)
        return entry, matrices

    def _stored(self, values: NDArray[np.float32]) -> NDArray[Any]:
        """Return the values in the type that kernels read: bf16, rounded to nearest, or fp32."""
        values = np.ascontiguousarray(values, np.float32)
        return to_bf16(values) if self._is_bf16 else values

    # --- Steps --------------------------------------------------------------------------------

    def lay_out(self, layout: StepLayout) -> bool:
        """Write the adapter of each row for native ops. Returns: whether any row has one."""
        self._step[0] = 0
        if not self._users:
            return False
        slots: list[NDArray[np.int32]] = []
        for (item, _), start, count in zip(
            layout.computed, layout.starts.tolist(), layout.counts.tolist(), strict=True
        ):
            digest, first = self._users.get(item.request_id, ("", 0))
            of_request = np.full(count, -1, np.int32)
            if digest:
                of_request[max(0, first - start) :] = self._residents[digest].slot
            slots.append(of_request)
        found = np.concatenate(slots)
        rows = np.argsort(found, kind="stable")[np.count_nonzero(found < 0) :]
        self._slots[: len(found)], self._rows[: len(rows)] = found, rows
        self._step[:] = (
            len(rows), self._rows.ctypes.data, self._slots.ctypes.data, self._products.ctypes.data,
            self._products.shape[1],
        )  # fmt: skip
        return len(rows) > 0
