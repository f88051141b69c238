"""Who comes first: the order of the waiting queue, and who gives way when blocks run out. Knows no blocks.

A policy is a sort key, smaller first, that never changes while a request lives. So a preempted request returns to its
old place, ahead of everything that came after it. Next to read: `scheduler.py`.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import Protocol

from quire.config import SchedulerConfig
from quire.errors import ConfigError
from quire.types import Request

SortKey = tuple[float, ...]
"""Unique among live requests: it ends with the serial numbers of arrival."""


class Policy(Protocol):
    """Order of admission and choice of victim."""

    def key(self, request: Request, serial: tuple[int, int]) -> SortKey:
        """Smaller is admitted first. `serial`: order of arrival, then a number that makes forks unique."""
        ...

    def victim(self, running: Sequence[Request], keys: dict[str, SortKey]) -> Request:
        """Whom to preempt when a running request needs a block and none is free."""
        ...


class FirstComeFirstServed:
    """Arrival order; the last one to start gives way, so the first always finishes."""

    def key(self, request: Request, serial: tuple[int, int]) -> SortKey:
        """Order of arrival."""
        return serial

    def victim(self, running: Sequence[Request], keys: dict[str, SortKey]) -> Request:
        """The one admitted last."""
        return running[-1]


class PriorityFirst:
    """Smaller `priority` first, equals by arrival; the worst of the running gives way."""

    def key(self, request: Request, serial: tuple[int, int]) -> SortKey:
        """Priority, then arrival."""
        return (request.priority, request.arrival_time_s, *serial)

    def victim(self, running: Sequence[Request], keys: dict[str, SortKey]) -> Request:
        """The one that would be admitted last."""
        return max(running, key=lambda request: keys[request.request_id])


class ShortestJobFirst:
    """Shorter prompts first; each second of waiting counts as `ageing_tokens_per_s` tokens less.

    Order at time t is by `prompt_len - ageing * (t - arrival)`. The term `ageing * t` is the same for all, so the
    key is `prompt_len + ageing * arrival`, which does not change with time. With ageing above 0 nothing starves:
    whatever arrives late enough sorts behind.
    """

    def __init__(self, ageing_tokens_per_s: float) -> None:
        self._ageing_tokens_per_s = ageing_tokens_per_s

    def key(self, request: Request, serial: tuple[int, int]) -> SortKey:
        """Prompt length in tokens, aged."""
        return (request.num_prompt_tokens + self._ageing_tokens_per_s * request.arrival_time_s, *serial)

    def victim(self, running: Sequence[Request], keys: dict[str, SortKey]) -> Request:
        """The one admitted last."""
        return running[-1]


def make_policy(config: SchedulerConfig) -> Policy:
    """The policy named by `config.policy`. Raises: ConfigError."""
    if config.policy == "fcfs":
        return FirstComeFirstServed()
    if config.policy == "priority":
        return PriorityFirst()
    if config.policy == "sjf":
        return ShortestJobFirst(config.sjf_ageing_tokens_per_s)
    raise ConfigError(f"scheduling_policy={config.policy!r} is not one of fcfs, priority, sjf")


class WaitingQueue:
    """Requests by sort key. Removal from the middle (abort) is constant time: dead entries are skipped when met."""

    def __init__(self) -> None:
        self._heap: list[tuple[SortKey, Request]] = []
        self._waiting: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def push(self, request: Request, key: SortKey) -> None:
        """Add a request. Keys are unique, so requests are never compared."""
        self._waiting[request.request_id] = request
        heapq.heappush(self._heap, (key, request))

    def first(self) -> Request:
        """The request with the smallest key. The queue must not be empty."""
        while True:
            request = self._heap[0][1]
            if self._waiting.get(request.request_id) is request:
                return request
            heapq.heappop(self._heap)

    def pop(self) -> Request:
        """Remove and return the first."""
        request = self.first()
        heapq.heappop(self._heap)
        del self._waiting[request.request_id]
        return request

    def remove(self, request: Request) -> bool:
        """Take a request out, wherever it stands; whether it was there."""
        if self._waiting.get(request.request_id) is not request:
            return False
        del self._waiting[request.request_id]
        if len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = [entry for entry in self._heap if self._waiting.get(entry[1].request_id) is entry[1]]
            heapq.heapify(self._heap)
        return True
