"""`Links`: a rank's connections to the other ranks of a model; `RankMemory`: the memory that they share.

Stages divide the layers of a model, and the ranks of a stage divide each layer. Rank 0 is of the last stage, which
samples; the first stage follows it. Next to read: `ranks.py` for the steps, `parallel/rank_processes.py`.
"""

import contextlib
import datetime
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.config import EngineConfig
from quire.errors import EngineDeadError
from quire.layers.group import Group
from quire.linux import allowed_cpus, keep_to_cpus, memory_file, path_of_descriptor
from quire.runtime.hardware import cpus_of_ranks

RANK_LOST = "a rank of the model is lost"
TIMEOUT = datetime.timedelta(minutes=5)
"""Longest wait of torch.distributed for a rank to join, and for the values of a step."""
PAGE_BYTES = 4096
NUM_SPINS = 400
"""Looks at another rank's progress before the core is offered to others: about 20 µs."""


def spins_of(num_threads: int) -> int:
    """Return the looks of each of the `num_threads` threads of all ranks: 0 if there are fewer CPUs."""
    return 0 if num_threads > len(allowed_cpus()) else NUM_SPINS


@contextlib.contextmanager
def lost_rank() -> Iterator[None]:
    """Turn the errors that torch.distributed raises into EngineDeadError."""
    try:
        yield
    except RuntimeError as error:
        raise EngineDeadError(f"{RANK_LOST}: {error}") from error


class Channel(Protocol):
    """Direction of rows between the same ranks of two stages: rows arrive in the order in which they are sent."""

    def send(self, rows: NDArray[np.float32]) -> None:
        """Send rows [T, width]; may return before they are received. Raises: EngineDeadError if a rank is lost."""

    def receive(self, rows: NDArray[np.float32]) -> None:
        """Wait for rows [T, width]. Mutates: rows. Raises: EngineDeadError if a rank is lost."""


class MemoryChannel:
    """A channel in memory that both sides share."""

    def __init__(self, native: _native.Channel) -> None:
        self._native = native

    def send(self, rows: NDArray[Any]) -> None:
        """See `Channel`."""
        self._check(self._native.send(*_place(rows)))

    def receive(self, rows: NDArray[Any]) -> None:
        """See `Channel`."""
        self._check(self._native.receive(*_place(rows)))

    def _check(self, has_passed: bool) -> None:
        if not has_passed:
            raise EngineDeadError(RANK_LOST)


class MessageChannel:
    """A channel of messages in memory that both sides share: the length of each, then its bytes."""

    def __init__(self, native: _native.Channel) -> None:
        self._rows = MemoryChannel(native)

    def send(self, message: bytes) -> None:
        """Send a message; waits only while 8 MB are unread. Raises: EngineDeadError if a rank is lost."""
        for values in (np.array([len(message)], np.int64), np.frombuffer(message, np.uint8)):
            self._rows.send(values.view(np.uint8)[None])

    def receive(self) -> bytes:
        """Wait for a message. Raises: EngineDeadError if a rank is lost."""
        length = np.empty(1, np.int64)
        self._rows.receive(length.view(np.uint8)[None])
        message = np.empty(length[0], np.uint8)
        self._rows.receive(message[None])
        return message.tobytes()


def _place(rows: NDArray[Any]) -> tuple[int, int, int, int]:
    return rows.ctypes.data, len(rows), rows.itemsize * rows.shape[1], rows.strides[0]


class TensorGroup(Group, Protocol):
    """A `Group` of ranks that run a model op by op: they agree on tokens, too. See `torch_group.py`."""

    def broadcast(self, values: NDArray[np.int32]) -> None:
        """Overwrite values with those of rank 0. Raises: EngineDeadError if a rank is lost."""

    def likeliest(self, head: Callable[[], Any]) -> list[int | None] | None:
        """Return the likeliest token of each row, for which `head` computes the logits by `all_gather`.

        A row is None without a largest finite logit; all is None if the model does not split its head.
        """

    def give_up(self) -> None:
        """End all waiting of this rank for others."""


@dataclass(frozen=True, slots=True)
class Links:
    """A rank's stage and its connections.

    Fields:
        exchange: of a plan with those of the other ranks of the stage; None if there are none.
        group: of a model that runs op by op with the other ranks; None if there are none.
        before, after: from the stage before, and to the next; None at the ends.
    """

    stage: int = 0
    num_stages: int = 1
    exchange: _native.Exchange | None = None
    before: Channel | None = None
    after: Channel | None = None
    group: TensorGroup | None = None

    @property
    def place(self) -> int | None:
        """The rank's number among those that share its layers; None if it is the only one."""
        peers = self.exchange or self.group
        return None if peers is None else peers.rank

    def broadcast(self, values: NDArray[np.int32]) -> None:
        """Overwrite values with those of the first rank of the stage. Raises: EngineDeadError if a rank is lost."""
        if self.group is not None:
            self.group.broadcast(values)
        elif self.exchange is None or not self.exchange.broadcast(values.ctypes.data, len(values)):
            raise EngineDeadError(RANK_LOST)

    @property
    def rank(self) -> int:
        """The number of the rank among all: the inverse of `stage_of`."""
        size, place = (1, 0) if self.exchange is None else (self.exchange.num_ranks, self.exchange.rank)
        return (self.stage + 1) % self.num_stages * size + place

    @property
    def is_last(self) -> bool:
        """True if the rank is of the stage that samples."""
        return self.stage == self.num_stages - 1


ONE_RANK = Links()
"""Those of the only rank of a model."""


class RankMemory:
    """Memory that the ranks of `num_stages` stages share on one machine: an exchange per stage, then the channels.

    Attributes: `fd`: its file descriptor, open as long as this object lives; `path`: where other processes may open it.
    """

    def __init__(self, num_stages: int, group_size: int, num_threads: int, fd: int | None = None) -> None:
        """Map the memory of `fd`, or make some: pages are committed when they are first used, and begin as zeros."""
        self._num_stages, self._group_size, self._num_threads = num_stages, group_size, num_threads
        exchange_bytes = _native.exchange_bytes(group_size, num_threads) if group_size > 1 else 0
        self._exchange_bytes = -(-exchange_bytes // PAGE_BYTES) * PAGE_BYTES
        self._num_links, self._num_ranks = (num_stages - 1) * group_size, num_stages * group_size
        num_channels = self._num_links + self._num_ranks - 1
        num_bytes = num_stages * self._exchange_bytes + num_channels * _native.channel_bytes()
        self.fd = memory_file("quire-ranks") if fd is None else fd
        self.path = path_of_descriptor(self.fd)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, num_bytes)
        self._mapped = np.frombuffer(mmap.mmap(self.fd, num_bytes), np.uint8)
        self._address = self._mapped.ctypes.data

    @classmethod
    def of(cls, config: EngineConfig, fd: int | None = None, *, num_stages: int | None = None) -> "RankMemory":
        """Return the memory for the stages of a configuration, or for `num_stages` of them."""
        options = config.options
        num_stages = num_stages or options.pipeline_parallel_size
        return cls(num_stages, options.tensor_parallel_size, config.threads_per_rank, fd)

    def links(self, rank: int, num_spins: int) -> Links:
        """Return the links of a rank, which need this object. `num_spins`: see `native/ranks/exchange.h`."""
        stage, place = stage_of(rank, self._num_stages, self._group_size)
        exchange = self._exchange(stage, place, num_spins) if self._group_size > 1 else None
        channels = self._channels(num_spins)[place : self._num_links : self._group_size]
        before, after = (MemoryChannel(channels[at]) if 0 <= at < len(channels) else None for at in (stage - 1, stage))
        return Links(stage, self._num_stages, exchange, before, after)

    def messages(self, num_spins: int) -> list[MessageChannel]:
        """Return the channels from rank 0 to ranks 1 … N - 1, which need this object."""
        return [MessageChannel(channel) for channel in self._channels(num_spins)[self._num_links :]]

    def give_up(self) -> None:
        """End all waiting, now and later, on every rank."""
        for channel in self._channels(0):
            channel.give_up()
        for stage in range(self._num_stages if self._group_size > 1 else 0):
            self._exchange(stage, 0, 0).give_up()

    def _exchange(self, stage: int, place: int, num_spins: int) -> _native.Exchange:
        address = self._address + stage * self._exchange_bytes
        return _native.Exchange(address, place, self._group_size, self._num_threads, num_spins)

    def _channels(self, num_spins: int) -> list[_native.Channel]:
        """Return the channels of all ranks to the next stage, in the order of the stages, then those of messages."""
        first = self._address + self._num_stages * self._exchange_bytes
        return [
            _native.Channel(first + index * _native.channel_bytes(), num_spins)
            for index in range(self._num_links + self._num_ranks - 1)
        ]


def stage_of(rank: int, num_stages: int, group_size: int) -> tuple[int, int]:
    """Return the stage of a rank, and its place among the ranks of the stage."""
    return (rank // group_size - 1) % num_stages, rank % group_size


def measure_all_reduce(num_ranks: int, num_rows: int = 1, width: int = 1024, num_sums: int = 200) -> float:
    """Return the microseconds of a sum of rows over ranks that are threads here, each on its own cores."""
    memory, cpus = RankMemory(1, num_ranks, 1), cpus_of_ranks(num_ranks)

    def run(rank: int) -> float:
        if cpus[rank]:
            keep_to_cpus(cpus[rank])  # of this thread
        exchange = memory.links(rank, NUM_SPINS).exchange
        assert exchange is not None
        x, out = np.ones((num_rows, width), np.float32), np.empty((num_rows, width), np.float32)
        sides = [_native.Rows(values.ctypes.data, 4 * width, _native.RowType.f32) for values in (x, out)]
        plan, zeros, count = _native.Plan(1, num_rows, 1), np.zeros(num_rows, np.int32), np.array([num_rows], np.int32)
        for _ in range(num_sums):
            plan.all_reduce(*sides, width, exchange.address)
        none = zeros.ctypes.data
        step = (none, none, count.ctypes.data, 0, none, num_rows, 0, 0, 0)
        times = []
        for _ in range(5):
            started = time.perf_counter()
            plan.run(1, 1, 0, *step)
            times.append(time.perf_counter() - started)
        return min(times) / num_sums * 1e6

    with ThreadPoolExecutor(num_ranks) as pool:
        return max(pool.map(run, range(num_ranks)))
