"""`RequestTable`: every unfinished request, and the one place where it is. Knows no blocks and no steps.

Places: in the waiting queue; running; parked (preempted after sampling, while its next token is chosen outside); or,
for a sibling of an `n > 1` request, inside its leader until that is forked. Next to read: `scheduler.py`.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from quire.errors import EngineError
from quire.scheduler.policy import Policy, SortKey, WaitingQueue
from quire.types import Request, RequestStatus


def is_idle(request: Request) -> bool:
    """Whether the request has sampled and waits for the token to be chosen outside."""
    return (
        request.awaits_external_token
        and request.status is RequestStatus.RUNNING
        and request.num_computed_tokens == request.num_tokens
    )


class RequestTable:
    """Requests by id and by place, and their order by policy."""

    def __init__(self, policy: Policy, max_num_seqs: int) -> None:
        self._policy = policy
        self._max_num_seqs = max_num_seqs
        self.by_id: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.parked: dict[str, Request] = {}
        self._leaders: dict[str, Request] = {}
        self._keys: dict[str, SortKey] = {}
        self._serials: dict[str, tuple[int, int]] = {}
        self._counter = itertools.count()

    def holds(self, request: Request) -> bool:
        """Whether this very request, not another with its id, is unfinished."""
        return self.by_id.get(request.request_id) is request

    def enter(self, request: Request) -> None:
        """Queue a new request; its siblings wait in it."""
        serial = next(self._counter)
        self._register(request, serial)
        for sibling in request.siblings:
            self._register(sibling, serial)
            self._leaders[sibling.request_id] = request
        self.wait(request)

    def enter_fork(self, parent: Request, child: Request) -> None:
        """Note a child that arrived, for the policy, when its parent did. The caller gives it a place."""
        self._register(child, self._serials[parent.request_id][0])

    def wait(self, request: Request) -> None:
        """Put a request into the queue, at its policy's place."""
        self.waiting.push(request, self._keys[request.request_id])

    def release_siblings(self, leader: Request) -> list[Request]:
        """Take the siblings out of their leader. The caller gives them a place."""
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            del self._leaders[sibling.request_id]
        return siblings

    def leave(self, request: Request) -> list[Request]:
        """Take a request out for good, with the siblings that wait in it; returns all who left."""
        request_id = request.request_id
        leader = self._leaders.pop(request_id, None)
        if leader is not None:
            leader.siblings.remove(request)
        elif self.parked.pop(request_id, None) is None and not self.waiting.remove(request):
            self.running.remove(request)
        leaving = [request, *self.release_siblings(request)]
        for item in leaving:
            del self.by_id[item.request_id], self._keys[item.request_id], self._serials[item.request_id]
        return leaving

    def victim(self, among: Sequence[Request]) -> Request:
        """Who gives way when blocks run out."""
        return self._policy.victim(among, self._keys)

    def free_seats(self) -> int:
        """Sequences that may still start; a leader keeps seats for its siblings."""
        return self._max_num_seqs - sum(1 + len(request.siblings) for request in self.running)

    def check(self, owner_ids: set[str]) -> None:
        """Raise EngineError unless every request is in exactly one place and exactly the running own blocks."""
        problems = []
        found: Counter[str] = Counter(self._leaders.keys())
        for sibling_id, leader in self._leaders.items():
            if sibling_id not in (sibling.request_id for sibling in leader.siblings):
                problems.append(f"{sibling_id!r} is not among the siblings of {leader.request_id!r}")
        running_ids = [request.request_id for request in self.running]
        places: tuple[Iterable[str], ...] = (running_ids, [item.request_id for item in self.waiting], list(self.parked))
        for ids in places:
            found.update(ids)
        if sorted(running_ids) != sorted(owner_ids):
            problems.append(f"running are {sorted(running_ids)} but blocks are owned by {sorted(owner_ids)}")
        problems += [f"{request_id!r} has a place but is gone" for request_id in found if request_id not in self.by_id]
        for request_id, request in self.by_id.items():
            if found[request_id] != 1 or request.status.is_finished:
                problems.append(f"{request_id!r} ({request.status.name}) is in {found[request_id]} places")
        if self.free_seats() < 0:
            problems.append(f"{-self.free_seats()} sequences more than max_num_seqs={self._max_num_seqs}")
        if problems:
            raise EngineError(f"scheduler integrity: {'; '.join(problems[:8])}")

    def _register(self, request: Request, serial: int) -> None:
        self.by_id[request.request_id] = request
        self._serials[request.request_id] = (serial, next(self._counter))
        self._keys[request.request_id] = self._policy.key(request, self._serials[request.request_id])
