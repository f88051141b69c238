"""`AdapterPool`: a worker's adapters in memory, and for each step the adapter of each row.

Requests bring an adapter's path and digest. A thread reads the adapters of requests that wait (`prepare`), and the
first request that starts takes its own over. Adapters without a running request leave, the least recently used first,
when others need their memory. The tables that native ops read (`native/ops/lora.h`) keep their addresses.
Next to read: `adapter_pack.py`, `kernels/lora.py`.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.adapter import Adapter
from quire.byte_sizes import format_bytes
from quire.config import EngineConfig
from quire.errors import CapacityError, ModelFileError, QuireError, UnsupportedModelError
from quire.kernels.lora import MAX_PARTS
from quire.layers.group import Group
from quire.lazy_torch import on_meta
from quire.runtime.adapter_layout import AdapterLayout
from quire.runtime.adapter_pack import LANES, PackedAdapter, pack_adapter
from quire.runtime.batch import RequestStates, StepLayout
from quire.runtime.loader import make_model
from quire.types import RequestResult, SchedulerOutput

logger = logging.getLogger("quire.runtime")
PART_WORDS, HEAD_WORDS = 5, 4
ENTRY_WORDS = HEAD_WORDS + MAX_PARTS * PART_WORDS
"""8-byte words of a `LoraEntry`, and of a `LoraPart` in it."""


@dataclass(slots=True)
class _Resident:
    """An adapter that requests can use."""

    slot: int
    packed: PackedAdapter


class AdapterPool:
    """The adapters of one worker. Not thread-safe."""

    def __init__(self, config: EngineConfig, group: Group) -> None:
        self._config = config
        with on_meta():
            model = make_model(config.model.hf_config, group, config.scheduler.max_model_len)
        self._layout = AdapterLayout(model)
        self._num_slots, max_tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
        self._max_bytes = config.options.lora_bytes
        self._residents: dict[str, _Resident] = {}  # by digest, the least recently used first
        self._reads: dict[str, Future[PackedAdapter]] = {}  # by digest
        self._reader = ThreadPoolExecutor(1, "quire-adapters")
        self._entries: dict[str, NDArray[np.int64]] = {}
        self._sites: dict[str, NDArray[np.int64]] = {}
        self._rows: NDArray[np.int32] = np.zeros(max_tokens, np.int32)
        self._slots: NDArray[np.int32] = np.zeros(self._num_slots, np.int32)
        self._starts: NDArray[np.int32] = np.zeros(self._num_slots + 1, np.int32)
        self._products: NDArray[np.float32] = np.zeros((max_tokens, 0), np.float32)
        self._step: NDArray[np.int64] = np.zeros(6, np.int64)

    def site(self, name: str) -> int:
        """Return the address of a linear layer's `LoraSite`, by the name of its weight."""
        if name not in self._sites:
            entries = self._entries[name] = np.zeros((self._num_slots, ENTRY_WORDS), np.int64)
            self._sites[name] = np.array([self._step.ctypes.data, entries.ctypes.data], np.int64)
        return self._sites[name].ctypes.data

    # --- Adapters are read beside the steps ------------------------------------------------------

    def prepare(self, wanted: Sequence[Adapter], wait_s: float = 0.0) -> set[str]:
        """Read those of these adapters that are not in memory; others that were read, and not used, are let go.

        `wait_s`: longest time to wait until one has been read. Returns: digests for which no step would wait.
        """
        missing = {adapter.digest: adapter for adapter in wanted if adapter.digest not in self._residents}
        for digest in self._reads.keys() - missing.keys():
            self._reads.pop(digest).cancel()
        for digest, adapter in missing.items():
            if digest not in self._reads:
                self._read(adapter)
        if wait_s and (running := [read for read in self._reads.values() if not read.done()]):
            wait(running, wait_s, FIRST_COMPLETED)
        return self._residents.keys() | {digest for digest, read in self._reads.items() if read.done()}

    def _read(self, adapter: Adapter) -> Future[PackedAdapter]:
        self._reads[adapter.digest] = self._reader.submit(
            pack_adapter, adapter, self._layout, self._config.model.hf_config, is_bf16=self._config.dtype != "float32"
        )
        return self._reads[adapter.digest]

    # --- Requests come and go -----------------------------------------------------------------

    def follow(self, output: SchedulerOutput, states: RequestStates) -> None:
        """Take up a step's new requests. Mutates: their states, with the error of an adapter that cannot be read."""
        self._states = states
        for new in output.new_requests:
            if (adapter := new.adapter) is None:
                continue
            try:
                self._hold(adapter)
                states[new.request_id].adapter = adapter
            except Exception as error:  # files that have changed may be wrong in any way
                told = error if isinstance(error, QuireError) else ModelFileError(f"{adapter.path}: {error}")
                states[new.request_id].adapter_error = told

    def refuse(self, output: SchedulerOutput, results: list[RequestResult]) -> list[RequestResult]:
        """Return a step's results, with errors for requests whose adapter could not be read."""
        errors = ((item.request_id, self._states[item.request_id].adapter_error) for item in output.scheduled)
        if not (wrong := {name: error for name, error in errors if error is not None}):
            return results
        found = [RequestResult(name, error=error.message, error_code=error.code) for name, error in wrong.items()]
        return [*(item for item in results if item.request_id not in wrong), *found]

    def _hold(self, adapter: Adapter) -> None:
        """Make an adapter usable, as the one used last; waits for its files if they are not read yet."""
        if (known := self._residents.pop(adapter.digest, None)) is not None:
            self._residents[adapter.digest] = known
            return
        reading = self._reads.get(adapter.digest) or self._read(adapter)
        try:
            packed = reading.result()
        finally:
            del self._reads[adapter.digest]
        # Layers of other pipeline stages have no site here; those of no linear layer in any plan are refused.
        entries = {name: entry for name, entry in packed.entries.items() if name in self._sites}
        if not entries and self._config.options.pipeline_parallel_size == 1:
            raise UnsupportedModelError(f"{adapter.path}: none of its modules is a linear layer of this model's plan")
        self._make_room(adapter, packed.num_bytes)
        taken = {resident.slot for resident in self._residents.values()}
        slot = next(slot for slot in range(self._num_slots) if slot not in taken)
        for name, entry in entries.items():
            self._entries[name][slot, : len(entry)] = entry
        self._residents[adapter.digest] = _Resident(slot, packed)
        self._grow(packed.num_products)
        logger.info("adapter '%s' is in memory: %s", adapter.name, format_bytes(packed.num_bytes))

    def _make_room(self, adapter: Adapter, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise CapacityError(
                f"adapter '{adapter.name}' takes {num_bytes} bytes, lora_bytes is {self._max_bytes}: --lora-bytes "
                f"{num_bytes} holds it"
            )
        in_use = {state.adapter.digest for state in self._states.by_id.values() if state.adapter is not None}
        idle = iter([digest for digest in self._residents if digest not in in_use])
        held = sum(resident.packed.num_bytes for resident in self._residents.values())
        while held + num_bytes > self._max_bytes or len(self._residents) >= self._num_slots:
            if (digest := next(idle, None)) is None:
                raise CapacityError(
                    f"the adapters of running requests take {held} of lora_bytes={self._max_bytes}: raise --lora-bytes "
                    f"to {held + num_bytes}, or try again later"
                )
            resident = self._residents.pop(digest)
            held -= resident.packed.num_bytes
            for entries in self._entries.values():
                entries[resident.slot] = 0

    def _grow(self, num_products: int) -> None:
        if num_products > self._products.shape[1]:
            width = -(-num_products // LANES) * LANES
            self._products = np.empty((len(self._rows), width), np.float32)

    # --- Steps --------------------------------------------------------------------------------

    def lay_out(self, layout: StepLayout) -> bool:
        """Write the adapter of each row for native ops. Returns: whether any row has one."""
        self._step[0] = 0
        if not any(state.adapter for _, state in layout.computed):
            return False
        slots: list[NDArray[np.int32]] = []
        for (_, state), start, count in zip(
            layout.computed, layout.starts.tolist(), layout.counts.tolist(), strict=True
        ):
            of_request = np.full(count, -1, np.int32)
            if (adapter := state.adapter) is not None:
                of_request[max(0, adapter.start - start) :] = self._residents[adapter.digest].slot
            slots.append(of_request)
        found = np.concatenate(slots)
        rows = np.argsort(found, kind="stable")[np.count_nonzero(found < 0) :]
        groups, starts = np.unique(found[rows], return_index=True)
        self._rows[: len(rows)], self._slots[: len(groups)] = rows, groups
        self._starts[: len(groups)], self._starts[len(groups)] = starts, len(rows)
        self._step[:] = (
            len(groups),
            self._starts.ctypes.data,
            self._slots.ctypes.data,
            self._rows.ctypes.data,
            self._products.ctypes.data,
            self._products.shape[1],
        )
        return len(rows) > 0
