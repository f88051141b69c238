"""`RequestTable`: every unfinished request, the one place where it is, and the policies that order them.

Places: in the waiting queue; running; parked (preempted after sampling, while its next token is chosen outside); or,
for a sibling of an `n > 1` request, inside its leader until that is forked. Knows no blocks and no steps.
Next to read: `scheduler.py`.
"""

import itertools
from collections.abc import Callable, Sequence

from quire.config import SchedulerConfig
from quire.scheduler.request import FairQueue, Request, WaitingQueue
from quire.types import RequestStatus


def _arrival_order(request: Request, config: SchedulerConfig) -> tuple[float, ...]:
    """First come, first served."""
    return request.serial


def _priority_order(request: Request, config: SchedulerConfig) -> tuple[float, ...]:
    """Smaller `priority` first, equals by arrival."""
    return (request.spec.priority, request.arrival_time_s, *request.serial)


def _shortest_job_order(request: Request, config: SchedulerConfig) -> tuple[float, ...]:
    """Shorter prompts first; each second of waiting counts as `sjf_ageing_tokens_per_s` tokens less.

    Order at time t is by `prompt_len - ageing * (t - arrival)`. The term `ageing * t` is the same for all, so the
    key is `prompt_len + ageing * arrival`, which does not change with time. With ageing above 0 nothing starves:
    a request that arrives late enough sorts behind.
    """
    return (request.num_prompt_tokens + config.sjf_ageing_tokens_per_s * request.arrival_time_s, *request.serial)


SORT_KEYS: dict[str, Callable[[Request, SchedulerConfig], tuple[float, ...]]] = {
    "fcfs": _arrival_order,
    "priority": _priority_order,
    "sjf": _shortest_job_order,
    "fair": _arrival_order,  # of one client's requests; `FairQueue` orders the clients
}
"""Per policy the key of a request, smaller first. It never changes while the request lives, so a preempted request
returns to its old place. Keys are unique among live requests: they end with the serial numbers of arrival."""


LATEST_DEADLINE_S = 600.0
"""Seconds from its arrival in which a request counts as one that must end, if its own deadline is later or it has none.
So requests that arrive later and have deadlines cannot preempt it for ever."""


def _deadline_order(request: Request) -> tuple[float, ...]:
    """Earliest deadline first, equals by arrival."""
    latest_s = request.arrival_time_s + LATEST_DEADLINE_S
    deadline_s = request.spec.deadline_time_s
    deadline_s = latest_s if deadline_s is None else min(deadline_s, latest_s)
    return (deadline_s, request.arrival_time_s, *request.serial)


def is_idle(request: Request) -> bool:
    """Return True if the request has sampled and waits for its next token, which is chosen outside."""
    return (
        request.awaits_external_token
        and request.status is RequestStatus.RUNNING
        and not request.num_in_flight
        and request.num_computed_tokens == request.num_tokens
    )


class RequestTable:
    """Requests by id and by place. `usable_adapters`: digests of those that make no step wait."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.sort_key = SORT_KEYS[config.policy]
        self.by_id: dict[str, Request] = {}
        self.waiting = FairQueue() if config.policy == "fair" else WaitingQueue()
        self.running: list[Request] = []
        self.parked: list[Request] = []
        self.usable_adapters: set[str] = set()
        self._counter = itertools.count()

    def enter(self, request: Request) -> None:
        """Queue a new request; its siblings wait in it."""
        serial = next(self._counter)
        self.register(request, serial)
        for sibling in request.siblings:
            self.register(sibling, serial)
            sibling.leader = request
        self.waiting.push(request)

    def admit(self, request: Request, num_tokens: int) -> None:
        """Put a request among those that run, without its siblings; it has `num_tokens` tokens to compute."""
        self.running.append(request)
        if not request.num_preemptions:
            self.waiting.charge(request, num_tokens)

    def release_siblings(self, leader: Request) -> list[Request]:
        """Take the siblings out of their leader. The caller gives them a place."""
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            sibling.leader = None
        return siblings

    def leave(self, request: Request) -> list[Request]:
        """Take a request out for good, with the siblings that wait in it; returns the requests that left."""
        if request.leader is not None:
            request.leader.siblings.remove(request)
            request.leader = None
        elif request in self.parked:
            self.parked.remove(request)
        elif not self.waiting.remove(request):
            self.running.remove(request)
        leaving = [request, *self.release_siblings(request)]
        for item in leaving:
            self.waiting.depart(item)
            del self.by_id[item.request_id]
        return leaving

    def victim(self, among: Sequence[Request]) -> Request:
        """Return the request to preempt when blocks run out: the one of the latest deadline, or by priority the worst.

        Each request has a place in this order from its arrival on, and later arrivals get places behind it at the
        latest after `LATEST_DEADLINE_S`; the first in the order is never preempted, so every request finishes.
        """
        if self._config.policy == "priority":
            return max(among, key=lambda item: item.sort_key)
        return max(among, key=_deadline_order)

    def waiting_since_s(self) -> dict[str, float]:
        """Return the time of arrival of each request in the queue and of each parked one."""
        return {item.request_id: item.arrival_time_s for item in (*self.waiting, *self.parked)}

    def num_free_places(self) -> int:
        """Sequences that may still start; a leader keeps places for its siblings."""
        return self._config.max_num_seqs - sum(1 + len(request.siblings) for request in self.running)

    def lacks_adapter(self, request: Request) -> bool:
        """Return True if the request's adapter has not been read yet."""
        adapter = request.spec.adapter
        return adapter is not None and adapter.digest not in self.usable_adapters

    def register(self, request: Request, serial: int) -> None:
        """Take up a request that arrived in this order, a fork when its parent did. The caller gives it a place."""
        self.by_id[request.request_id] = request
        self.waiting.arrive(request)
        request.serial = (serial, next(self._counter))
        request.sort_key = self.sort_key(request, self._config)
