"""Queues of waiting requests: `WaitingQueue` in the order of their sort keys, `FairQueue` in turns of their clients.

They know no blocks and no steps. Next to read: `request_table.py`, which owns one.
"""

import heapq
import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter

from quire.types import Request

MAX_IDLE_CLIENTS = 1024
"""Clients without requests whose tokens are remembered: bounds memory."""
_SORT_KEY = attrgetter("sort_key")


class WaitingQueue:
    """Requests in the order of their sort keys, which are unique.

    A table tells it of requests that come (`arrive`) and end (`depart`), and of the tokens that they take (`charge`).
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def push(self, request: Request) -> None:
        """Add a request."""
        insort(self._requests, request, key=_SORT_KEY)

    def first(self) -> Request:
        """Return the request with the smallest key. The queue must not be empty."""
        return self._requests[0]

    def remove(self, request: Request) -> bool:
        """Take a request out, wherever it stands. Return False if it was not there."""
        at = bisect_left(self._requests, request.sort_key, key=_SORT_KEY)
        is_found = at < len(self._requests) and self._requests[at] is request
        if is_found:
            del self._requests[at]
        return is_found

    def arrive(self, request: Request) -> None:
        """Take note of a new request, before it is pushed."""

    def charge(self, request: Request, num_tokens: int) -> None:
        """Take note of tokens that the engine computed for a request, or will compute: of its prompt, and generated."""

    def depart(self, request: Request) -> None:
        """Take note of a request that ended, wherever it was."""


class FairQueue(WaitingQueue):
    """Deficit round robin: the next request is the oldest one of the waiting client that was given the fewest tokens.

    Of clients with equally many one that began to wait comes first, else the one whose turn is longest ago. So, while
    several clients wait, each is given as many tokens as the others, up to those of one request per place, and none
    starves. A client that returns from idleness has at least the tokens of the least served one that waits (or, if none
    does, that runs): it saved nothing up. Admission takes O(log clients), amortised: a client's place in the heap is
    corrected when it comes first. Requests without a client are those of the client "".
    Admission is enough: a step has a token for every running request (`max_num_seqs` is at most its budget), and what
    is left goes to prompts, which are admitted one by one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[str, WaitingQueue] = {}
        """Of clients that wait."""
        self._heap: list[tuple[int, bool, int, str]] = []
        """Of each client that waits, and of some others: tokens, at most those it has; had it a turn; turn; name."""
        self._listed: set[str] = set()
        """Clients in the heap."""
        self._turns = itertools.count()
        self._num_tokens: dict[str, int] = {}
        self._num_unfinished: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain.from_iterable(self._queues.values())

    def push(self, request: Request) -> None:
        """See `WaitingQueue`."""
        client_id = request.client_id
        self._queues.setdefault(client_id, WaitingQueue()).push(request)
        if client_id not in self._listed:
            self._listed.add(client_id)
            heapq.heappush(self._heap, (self._num_tokens[client_id], False, next(self._turns), client_id))

    def first(self) -> Request:
        """See `WaitingQueue`."""
        while True:
            num_tokens, _, _, client_id = self._heap[0]
            if client_id not in self._queues:
                self._listed.remove(client_id)
                heapq.heappop(self._heap)
            elif num_tokens < self._num_tokens[client_id]:
                heapq.heapreplace(self._heap, (self._num_tokens[client_id], True, next(self._turns), client_id))
            else:
                return self._queues[client_id].first()

    def remove(self, request: Request) -> bool:
        """See `WaitingQueue`."""
        queue = self._queues.get(request.client_id)
        if queue is None or not queue.remove(request):
            return False
        if not queue:
            del self._queues[request.client_id]
        return True

    def arrive(self, request: Request) -> None:
        """See `WaitingQueue`."""
        client_id = request.client_id
        if not self._num_unfinished[client_id]:
            others = [self.first().client_id] if self._queues else self._num_unfinished
            base = min((self._num_tokens[name] for name in others), default=0)
            self._num_tokens[client_id] = max(self._num_tokens.pop(client_id, 0), base)
        self._num_unfinished[client_id] += 1

    def charge(self, request: Request, num_tokens: int) -> None:
        """See `WaitingQueue`."""
        self._num_tokens[request.client_id] += num_tokens

    def depart(self, request: Request) -> None:
        """See `WaitingQueue`."""
        self._num_unfinished[request.client_id] -= 1
        if self._num_unfinished[request.client_id]:
            return
        del self._num_unfinished[request.client_id]
        if not self._num_unfinished:
            for record in (self._num_tokens, self._heap, self._listed):
                record.clear()
        elif len(self._num_tokens) > len(self._num_unfinished) + MAX_IDLE_CLIENTS:
            idle = [name for name in self._num_tokens if name not in self._num_unfinished]
            for name in idle[: len(idle) // 2]:  # those that arrived longest ago
                del self._num_tokens[name]
