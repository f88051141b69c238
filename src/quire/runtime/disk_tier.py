"""`DiskTier`: reads and writes KV blocks of one engine in threads, beside its steps.

A failure never reaches a request: a block that cannot be written is dropped, one that cannot be read is computed again,
and the log says so once. Next to read: `block_files.py` for the format, `cache_engine.py` for the caller.
"""

import contextlib
import errno
import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ALL_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire import __version__, _native
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.files import file_state
from quire.models.registry import ModelRegistry
from quire.runtime.block_files import BlockFileError, BlockFiles
from quire.runtime.code_digest import code_digest
from quire.weights.checkpoint import Checkpoint

logger = logging.getLogger("quire.runtime")
NUM_READERS = 2
MAX_QUEUED_BYTES = 256 << 20
"""Blocks that wait to be written; when the disk is slower than that, further ones are dropped."""
CLOSE_S = 3.0
"""Longest time to write the last blocks at the end."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SAMPLE_BYTES = 4096
Key = tuple[int, bytes]
INDIFFERENT = frozenset((
    "model", "model_impl", "tokenizer", "revision", "hf_overrides", "chat_template", "trust_remote_code", "load_format",
    "device", "seed", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization",
    "kv_cache_memory_bytes", "num_blocks_override", "enable_prefix_caching", "enable_chunked_prefill",
    "max_num_partial_prefills", "max_long_partial_prefills", "long_prefill_token_threshold", "performance_mode",
    "multi_step_decode", "batch_invariant", "data_parallel_size", "data_parallel_rank",
    "scheduling_policy", "sjf_ageing_tokens_per_s", "max_num_waiting", "max_logprobs", "max_num_events",
    "kv_disk", "kv_disk_bytes", "weight_cache", "weight_cache_bytes", "preemption_mode", "swap_space",
))  # fmt: skip
"""Options that change no value of a block, or are in its key as what they led to."""


class DiskTier:
    """Writes blocks behind the steps, and reads blocks into pages of the KV pool. Called by one thread."""

    def __init__(self, files: BlockFiles) -> None:
        self._files = files
        self._readers = ThreadPoolExecutor(NUM_READERS, "quire-kv-read")
        self._writer = ThreadPoolExecutor(1, "quire-kv-write")
        self._reads: dict[Future[bool], int] = {}
        self._queued: dict[Key, NDArray[np.uint8]] = {}
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._num_queued_bytes = self._num_bytes_read = self._num_bytes_written = 0
        self._is_quiet = False
        self._notes: set[str] = set()

    def keys(self) -> set[Key]:
        """Return cache group and digest of each stored block."""
        return self._files.keys()

    def write(self, group_index: int, digests: Iterable[bytes], values: Any, deadline_s: float | None = None) -> None:
        """Write blocks in the background. With a deadline (monotonic clock) wait for the queue rather than drop.

        Shapes: values [blocks, bytes], the caller's copy. Dtypes: uint8.
        """
        blocks = values if isinstance(values, np.ndarray) else values.cpu().numpy()
        for age_ns, (digest, block) in enumerate(zip(digests, blocks, strict=True)):
            with self._lock:
                while deadline_s is not None and self._num_queued_bytes > MAX_QUEUED_BYTES and not self._is_quiet:
                    if not self._room.wait(max(0.0, deadline_s - time.monotonic())):
                        break
                if self._is_quiet:
                    return
                if self._num_queued_bytes > MAX_QUEUED_BYTES:
                    self._note("the disk is slower than blocks leave the KV cache: some are not kept")
                    return
                self._num_queued_bytes += len(block)
                self._queued[group_index, digest] = block
            age = 0 if deadline_s is None else age_ns * 1000  # at the end the start of a prefix comes first
            try:
                self._writer.submit(self._write, group_index, digest, block, age)
            except RuntimeError:  # the interpreter ends, and its thread pools before
                self._write(group_index, digest, block, age)

    def _write(self, group_index: int, digest: bytes, block: NDArray[np.uint8], age_ns: int) -> None:
        try:
            if not self._is_quiet:
                self._files.write(group_index, digest, block.data, age_ns=age_ns)
                self._count(num_written=len(block))
        except OSError as error:
            self._is_quiet = True
            advice = "free some space" if error.errno in _FULL else "see its state"
            self._note(f"KV blocks are no longer written ({error.strerror or error}): {advice}")
        finally:
            with self._lock:
                self._queued.pop((group_index, digest), None)
                self._num_queued_bytes -= len(block)
                self._room.notify_all()

    def read(self, group_index: int, digests: Iterable[bytes], block_ids: Iterable[int], pages: Any) -> None:
        """Read blocks in the background into rows `block_ids` of `pages`.

        Shapes: pages [N, bytes]: an array, or a tensor of another device. Dtypes: uint8.
        """
        for age, (digest, block_id) in enumerate(zip(digests, block_ids, strict=True)):
            self._reads[self._readers.submit(self._read, group_index, digest, pages[block_id], age * 1000)] = block_id

    def _read(self, group_index: int, digest: bytes, page: Any, age_ns: int) -> bool:
        target = page if isinstance(page, np.ndarray) else np.empty(len(page), np.uint8)
        try:
            with self._lock:
                queued = self._queued.get((group_index, digest))
            if queued is not None:
                target[:] = queued
            else:
                self._files.read(group_index, digest, target.data, age_ns=age_ns)
        except FileNotFoundError:
            return False  # it was dropped, or was the one used longest ago
        except (OSError, BlockFileError) as error:
            page[:] = 0  # steps may read what they mask, which must be numbers
            reason = error.strerror if isinstance(error, OSError) else error
            path = self._files.path(group_index, digest)
            self._note(
                f"{path.name} {reason}: its tokens are computed again; `quire cache verify` finds all such files"
            )
            return False
        if target is not page:
            import torch

            page.copy_(torch.from_numpy(target))
        self._count(num_read=len(target))
        return True

    def take_read(self, wait_s: float) -> tuple[list[int], list[int]]:
        """Return the blocks that reads have filled, and those that they could not; waits up to `wait_s` for all."""
        if wait_s and self._reads:
            wait(self._reads, wait_s, ALL_COMPLETED)
        ended = [future for future in self._reads if future.done()]
        found: tuple[list[int], list[int]] = [], []
        for future in ended:
            found[not future.result()].append(self._reads.pop(future))
        return found

    def take_counts(self) -> tuple[int, int]:
        """Return bytes read and written since the last call."""
        with self._lock:
            counts = self._num_bytes_read, self._num_bytes_written
            self._num_bytes_read = self._num_bytes_written = 0
        return counts

    def _count(self, num_read: int = 0, num_written: int = 0) -> None:
        with self._lock:
            self._num_bytes_read += num_read
            self._num_bytes_written += num_written

    def cancel_reads(self) -> None:
        """Forget all reads; returns when none writes into the pool any more."""
        for future in self._reads:
            future.cancel()
        wait([future for future in self._reads if not future.cancelled()])
        self._reads.clear()

    def close(self, deadline_s: float) -> None:
        """End the threads, with what is written by then (monotonic clock)."""
        self.cancel_reads()
        self._readers.shutdown(wait=False)
        with self._lock:
            while self._queued and self._room.wait(max(0.0, deadline_s - time.monotonic())):
                pass
        self._is_quiet = True
        self._writer.shutdown(wait=True)

    def _note(self, message: str) -> None:
        if message.partition(" ")[2] not in self._notes:
            self._notes.add(message.partition(" ")[2])
            logger.warning("kv-disk %s: %s", self._files.root, message)


def open_disk_tier(config: EngineConfig, checkpoint: Checkpoint, rank: int = 0) -> DiskTier | None:
    """Return the tier of a rank that the options name, None if they name none.

    Raises: ConfigError if its directory cannot be used, or the model's code is not Quire's own.
    """
    options = config.options
    if options.kv_disk is None:
        return None
    if not ModelRegistry.is_built_in(config.model.hf_config):
        raise ConfigError(
            "--kv-disk needs a model whose code is Quire's own: other code may change between two runs unnoticed; leave"
            " --kv-disk out"
        )
    description = {
        "model": options.model,
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_dtype,
        "block_size": config.scheduler.block_size,
        "made_by": f"quire {__version__}",
    }
    key, max_bytes = fingerprint(config, checkpoint, rank), config.scheduler.max_disk_bytes
    return DiskTier(BlockFiles(options.kv_disk, key, description, max_bytes, rank, config.num_ranks))


def fingerprint(config: EngineConfig, checkpoint: Checkpoint, rank: int = 0) -> bytes:
    """Return a SHA-256 of everything that a block's bytes on a rank depend on beside its tokens.

    Weights are known by size, times and inode of their files, and by the first and middle bytes of each tensor.
    """
    options = {
        name: value
        for name, value in config.options.__dict__.items()
        if name not in INDIFFERENT
        and not name.startswith("data_parallel")  # engines of one server have the same blocks
    }
    scheduler = config.scheduler
    parts = [
        code_digest(),
        rank,
        _versions(config.uses_plan),
        _native.isa(),
        os.environ.get("QUIRE_KERNELS"),
        config.model.hf_config,
        options,
        config.device,
        config.dtype,
        config.kv_dtype,
        config.keeps_stored_weights,
        config.uses_plan,
        config.tile_rows,
        scheduler.block_size,
        [[group.layer_indices, group.spec] for group in scheduler.kv_cache_groups],
    ]
    digest = hashlib.sha256(msgspec.json.encode(parts, order="sorted", enc_hook=str))
    place = checkpoint.files.path
    for path in sorted(place.glob("*.safetensors")) if place.is_dir() else [place]:
        digest.update(repr(file_state(path)[1:]).encode())
    for name, tensor in checkpoint.tensors.items():
        values = tensor.stored.reshape(-1)
        middle = len(values) // 2
        digest.update(f"{name} {tensor.shape} {tensor.format}".encode())
        digest.update(values[:_SAMPLE_BYTES].tobytes() + values[middle : middle + _SAMPLE_BYTES].tobytes())
    return digest.digest()


def _versions(uses_plan: bool) -> list[str]:
    """Return the versions of the libraries that compute a model op by op; none for a plan."""
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in () if uses_plan else ("torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(version(name))
    return found
