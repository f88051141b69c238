"""The event log: the one record of what the engine did. Metrics, traces and views read it, so they agree.

A ring buffer of small tuples: appending is one `deque.append` of a tuple, so that a step with 32 requests
spends well under 1 % of its time here. Written by scheduler and engine.
Next to read: `scheduler/scheduler.py`, which writes most of it.
"""

import enum
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

LOGGER = logging.getLogger("quire.engine")
SCHEDULER_LOGGER = logging.getLogger("quire.scheduler")


class EventKind(enum.Enum):
    """Kinds of events. The fields of each kind's `data` are listed beside it."""

    ARRIVE = "arrive"  # num_prompt_tokens: the request entered the queue
    ADMIT = "admit"  # num_prompt_tokens, num_cached_tokens, arrival_s (time of arrival)
    SCHEDULE = "schedule"  # step_id, num_tokens, num_requests, num_waiting
    ALLOCATE = "allocate"  # block_ids
    SHARE = "share"  # block_ids (prefix hit or fork)
    COPY = "copy"  # source_id, target_id
    CACHE = "cache"  # block_ids that became findable by their prefix
    EVICT = "evict"  # block_ids that no longer are
    OFFLOAD = "offload"  # block_ids whose content is copied to a tier: "host" or "disk"
    FETCH = "fetch"  # block_ids held for a waiting request: cached ones, and those that other tiers fill
    RELEASE = "release"  # block_ids of these that are held no longer
    FETCHED = "fetched"  # num_disk_tokens, num_host_tokens: the blocks of a request came, or did not
    DISK = "disk"  # num_bytes_read, num_bytes_written since the last such event
    PREEMPT = "preempt"  # num_computed_tokens
    # step_id, num_tokens, num_requests, num_iterations, has_prompts, duration_s, schedule_s, execute_s, output_s,
    # num_drafts, num_accepted, drafts (tokens verified and right of each draft)
    STEP = "step"
    LOST = "lost"  # step_id, num_requests, error (its type): the executor raised
    OPS = "ops"  # step_id, ops (OpTime of each instruction that ran): with QUIRE_TRACE=1 or events
    FINISH = "finish"  # reason, num_output_tokens


OF_ENGINE = frozenset({EventKind.STEP, EventKind.OPS, EventKind.LOST})
"""Kinds that the engine writes; all others are the scheduler's."""


@dataclass(frozen=True, slots=True)
class OpTime:
    """An instruction of a plan in one step: its name with shapes and types, and its work in `arithmetic`.

    `expert_loads`: of the routing of one layer the number of tokens of each expert. `layer`: None outside of layers.
    """

    name: str
    microseconds: float
    flops: int
    num_bytes: int
    arithmetic: str
    expert_loads: tuple[int, ...] = ()
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """An event: seconds of `time.monotonic()`, the request it is about ("" for none), and its data."""

    time_s: float
    kind: EventKind
    request_id: str
    data: dict[str, Any]


class EventLog:
    """Bounded log; the oldest events fall out. `num_recorded` counts them too."""

    def __init__(self, max_events: int = 65536, clock: Callable[[], float] = time.monotonic) -> None:
        self._events: deque[tuple[float, EventKind, str, dict[str, Any]]] = deque(maxlen=max_events)
        self._clock = clock
        self._is_logged = LOGGER.isEnabledFor(logging.DEBUG)
        self.num_recorded = 0

    def record(self, kind: EventKind, request_id: str = "", *, time_s: float | None = None, **data: Any) -> None:
        """Append one event with the current time, or that which its maker has read."""
        self._events.append((self._clock() if time_s is None else time_s, kind, request_id, data))
        self.num_recorded += 1
        if self._is_logged:
            values = [
                f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
                for name, value in data.items()
                if name != "ops"
            ]
            logger = LOGGER if kind in OF_ENGINE else SCHEDULER_LOGGER
            logger.debug("%s", " ".join([kind.value, *([request_id] if request_id else []), *values]))

    def since(self, num_seen: int) -> list[Event]:
        """Return the events after the first `num_seen`, oldest first, without what has fallen out since.

        For the thread that records: another's count may be one event behind.
        """
        newest = list(islice(reversed(self._events), self.num_recorded - num_seen))
        return [Event(*item) for item in reversed(newest)]

    def forget(self) -> None:
        """Drop all events, where every reader has read them."""
        self._events.clear()

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        for time_s, kind, request_id, data in list(self._events):
            yield Event(time_s, kind, request_id, data)

    def of(self, kind: EventKind) -> list[Event]:
        """All events of one kind, oldest first."""
        return [event for event in self if event.kind is kind]
