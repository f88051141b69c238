"""`Links`: a rank's connections to the other ranks of a model, and the layout of the memory they share.

Stages divide the layers of a model, and the ranks of a stage divide each layer. Rank 0 is of the last stage, which
samples; the first stage follows it. Next to read: `ranks.py` for the steps, `parallel/rank_processes.py`.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.config import EngineConfig
from quire.errors import EngineDeadError

RANK_LOST = "a rank of the model is lost"
PAGE_BYTES = 4096


class Channel(Protocol):
    """One direction between the same ranks of two stages: rows arrive in the order in which they are sent."""

    def send(self, rows: NDArray[np.float32]) -> None:
        """Send rows [T, width]; may return before they are received. Raises: EngineDeadError if a rank is lost."""

    def receive(self, rows: NDArray[np.float32]) -> None:
        """Wait for rows [T, width]. Mutates: rows. Raises: EngineDeadError if a rank is lost."""


class MemoryChannel:
    """A channel in memory that both sides share."""

    def __init__(self, native: _native.Channel) -> None:
        self._native = native

    def send(self, rows: NDArray[np.float32]) -> None:
        """See `Channel`."""
        self._check(self._native.send(*_place(rows)))

    def receive(self, rows: NDArray[np.float32]) -> None:
        """See `Channel`."""
        self._check(self._native.receive(*_place(rows)))

    def _check(self, has_passed: bool) -> None:
        if not has_passed:
            raise EngineDeadError(RANK_LOST)


def _place(rows: NDArray[np.float32]) -> tuple[int, int, int, int]:
    return rows.ctypes.data, len(rows), 4 * rows.shape[1], rows.strides[0]


@dataclass(frozen=True, slots=True)
class Links:
    """A rank's stage and its connections.

    Fields:
        exchange: with the other ranks of the stage; None if there are none.
        before, after: from the stage before, and to the next; None at the ends.
    """

    stage: int = 0
    num_stages: int = 1
    exchange: _native.Exchange | None = None
    before: Channel | None = None
    after: Channel | None = None

    @property
    def is_last(self) -> bool:
        """True if the rank is of the stage that samples."""
        return self.stage == self.num_stages - 1


ONE_RANK = Links()
"""Those of the only rank of a model."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Layout of the memory that all ranks of a machine share. It begins as zeros, at the start of a page."""

    num_stages: int
    group_size: int
    num_threads: int

    @classmethod
    def of(cls, config: EngineConfig) -> "RankMemory":
        """Return the layout for a configuration."""
        options = config.options
        return cls(options.pipeline_parallel_size, options.tensor_parallel_size, config.threads_per_rank)

    @property
    def num_bytes(self) -> int:
        """Bytes in all; pages are committed when they are first used."""
        channels = (self.num_stages - 1) * self.group_size * _native.channel_bytes()
        return self.num_stages * self._exchange_bytes + channels

    def links(self, address: int, rank: int, num_spins: int) -> Links:
        """Return the links of a rank. `num_spins`: see `native/ranks/exchange.h`."""
        stage, place = stage_of(rank, self.num_stages, self.group_size)
        exchange = None
        if self.group_size > 1:
            exchange = _native.Exchange(
                address + stage * self._exchange_bytes, place, self.group_size, self.num_threads, num_spins
            )
        channels = self._channels(address, num_spins)[place :: self.group_size]
        before, after = (MemoryChannel(channels[at]) if 0 <= at < len(channels) else None for at in (stage - 1, stage))
        return Links(stage, self.num_stages, exchange, before, after)

    def give_up(self, address: int) -> None:
        """End all waiting, now and later, on every rank."""
        for channel in self._channels(address, 0):
            channel.give_up()
        for stage in range(self.num_stages if self.group_size > 1 else 0):
            _native.Exchange(address + stage * self._exchange_bytes, 0, self.group_size, self.num_threads, 0).give_up()

    @property
    def _exchange_bytes(self) -> int:
        num_bytes = _native.exchange_bytes(self.group_size, self.num_threads) if self.group_size > 1 else 0
        return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES

    def _channels(self, address: int, num_spins: int) -> list[_native.Channel]:
        """Return the channels of all ranks to the next stage, in the order of the stages."""
        first = address + self.num_stages * self._exchange_bytes
        count = (self.num_stages - 1) * self.group_size
        return [_native.Channel(first + index * _native.channel_bytes(), num_spins) for index in range(count)]


def stage_of(rank: int, num_stages: int, group_size: int) -> tuple[int, int]:
    """Return the stage of a rank, and its place among the ranks of the stage."""
    return (rank // group_size - 1) % num_stages, rank % group_size
