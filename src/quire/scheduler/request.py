"""`Request`: the scheduler's record of one sequence: what was asked, how far it is, and everything that it owns.

Its KV blocks, its chain of prefix hashes, blocks on the way to it and its drafts are fields: no other part keeps them
by its id. Requests that wait are in a `WaitingQueue`, in the order of their sort keys, or in a `FairQueue`, in turns of
their clients. Next to read: `scheduler.py`; `blocks.py` and `tiers.py`, which change what a request owns.
"""

import heapq
import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import msgspec

from quire.sampling_params import SamplingParams
from quire.scheduler.prefix_cache import CacheEntry, Key, PrefixChain
from quire.transfers import Tier
from quire.types import NULL_BLOCK_ID, BlockTableUpdate, Draft, RequestResult, RequestSpec, RequestStatus

MAX_IDLE_CLIENTS = 1024
"""Clients without requests whose tokens are remembered: bounds memory."""
_SORT_KEY = attrgetter("sort_key")


@dataclass(frozen=True, slots=True)
class KeptState:
    """The state after `position` tokens, which a step continued in a copy: one page per state group."""

    position: int
    block_ids: dict[int, int]
    """Group index → page."""
    drafts_end: int | None
    """Tokens that the step's state covers with all drafts; None for a step without drafts."""


@dataclass(slots=True)
class OwnedBlocks:
    """Block tables of one sequence, and how much of each the executor has not seen; no tables if it owns nothing."""

    tables: list[list[int]] = field(default_factory=list)
    changed_from: list[int] = field(default_factory=list)
    """Entries from here on are unknown to the executor; the table's length if it knows all."""
    num_left_behind: list[int] = field(default_factory=list)
    """Leading entries behind a sliding window: all are the null block."""
    num_registered: int = 0
    """Leading blocks already offered to the prefix cache."""
    is_changed: bool = False
    unchanged_updates: tuple[BlockTableUpdate, ...] = ()
    kept_states: list[KeptState] = field(default_factory=list)
    """Checkpoints to register, and states to go back to if drafts are rejected; oldest first."""

    def note_change(self, group_index: int, at: int) -> None:
        """Take note that entries of a table changed from `at` on."""
        self.changed_from[group_index] = min(self.changed_from[group_index], at)
        self.is_changed = True

    def replace(self, group_index: int, at: int, block_id: int) -> int:
        """Put another block into a table. Returns: the block it replaces."""
        table = self.tables[group_index]
        before, table[at] = table[at], block_id
        self.note_change(group_index, at)
        return before

    def cut(self, group_index: int, num_entries: int) -> list[int]:
        """Take the entries behind the first `num_entries` out of a table. Returns: their blocks, deepest first."""
        table = self.tables[group_index]
        if num_entries >= len(table):
            return []
        blocks = table[num_entries:]
        del table[num_entries:]
        self.note_change(group_index, num_entries)
        return blocks[::-1]

    def leave_behind(self, group_index: int, num_entries: int) -> list[int]:
        """Take the first `num_entries` out of a table, if a window moved on. Returns: their blocks, deepest first."""
        table, done = self.tables[group_index], self.num_left_behind[group_index]
        if num_entries <= done:
            return []
        blocks, table[done:num_entries] = table[done:num_entries], [NULL_BLOCK_ID] * (num_entries - done)
        self.num_left_behind[group_index] = num_entries
        self.note_change(group_index, done)
        return blocks[::-1]

    def take_updates(self) -> tuple[BlockTableUpdate, ...]:
        """Return what changed in the tables since the last call, per group; the executor knows it from then on."""
        if not self.is_changed:
            return self.unchanged_updates
        updates = tuple(
            BlockTableUpdate(start, tuple(table[start:]))
            for start, table in zip(self.changed_from, self.tables, strict=True)
        )
        self.changed_from = [len(table) for table in self.tables]
        self.unchanged_updates = tuple(BlockTableUpdate(len(table), ()) for table in self.tables)
        self.is_changed = False
        return updates

    def block_ids(self) -> Iterator[int]:
        """Return all blocks, one entry per reference; deepest first, so that the start of a prefix is evicted last."""
        for kept in self.kept_states:
            yield from kept.block_ids.values()
        for at in range(max(map(len, self.tables), default=0) - 1, -1, -1):
            for table in self.tables:
                if at < len(table) and table[at] != NULL_BLOCK_ID:
                    yield table[at]


@dataclass(slots=True, eq=False)
class Fetch:
    """Device blocks that wait for a request: those of its hit, and those that another tier fills.

    coming: blocks that are not filled yet.
    """

    request: "Request"
    block_ids: list[int]
    coming: dict[int, tuple[Tier, CacheEntry]] = field(default_factory=dict)
    disk_digests: set[bytes] = field(default_factory=set)
    host_digests: set[bytes] = field(default_factory=set)

    @property
    def is_orphan(self) -> bool:
        """True if its request has ended."""
        return self.request.fetch is not self


@dataclass(slots=True, eq=False)
class DraftRecord:
    """Record of a request that the parts of `drafts/` keep.

    accepted_share: of its last tokens, those that were right drafts. asked_from: number of its tokens from which on it
    is asked for a draft. guess: it came with the last step; is_offered: the next step may verify it. is_left: a head
    gives it no guesses any more. follower: its place in texts, of `SuffixProposer`.
    """

    accepted_share: float = 0.0
    asked_from: int = 0
    guess: Draft | None = None
    is_offered: bool = False
    is_left: bool = False
    follower: Any = None


@dataclass(slots=True, eq=False)
class Request:
    """Record of one sequence. It is given tokens to compute until `num_computed_tokens` catches up with the tokens it
    has; the step that catches up samples at least one more.

    The first four fields are those of `spec` that every step reads. Fields beyond the obvious:
        siblings: the other n - 1 sequences of an `n > 1` request, forked in the step that completes the prompt.
        awaits_external_token: the next token is chosen outside the sampler (beam search): `update` does not append.
        runs_ahead: a step may compute its next token before the last one is known: it is chosen from the logits alone.
        observer: gets the updates of a request that was given to the scheduler directly (beam search).
        draft_token_ids: a guess of the next tokens, which the next step verifies, if it can; any gives the same tokens.
        expects_drafts: the request gets one token a step unless it has drafts, so that it can be given some.
        num_guesses: tokens that the executor's draft model may guess behind the request's next step, which clears it.
        num_computed_tokens: advances when a step is scheduled, without its drafts; `update` adds those accepted.
        num_pending_tokens: input tokens that steps in flight (`num_in_flight`) will yield.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission.
        num_sent_tokens: tokens that the executor knows; None if it does not know the request.
        mirostat_mu: the sampler's state behind the known tokens, which tokens alone do not tell after a preemption.
        fetch: blocks on the way from other tiers; `has_fetched`: it does so once before each admission.
        swapped_keys: blocks that host memory keeps until it runs again.
        serial: order of arrival, then a number that makes forks unique. sort_key: place in the queue, by the policy.
    """

    spec: RequestSpec
    request_id: str = field(init=False)
    prompt_token_ids: list[int] = field(init=False)
    sampling: SamplingParams | None = field(init=False)
    max_tokens: int = field(init=False)
    arrival_time_s: float = field(init=False)
    chain: PrefixChain = field(init=False)
    runs_ahead: bool = field(init=False)
    awaits_external_token: bool = False
    siblings: list["Request"] = field(default_factory=list)
    observer: "Callable[[SequenceUpdate], None] | None" = None

    output_token_ids: list[int] = field(default_factory=list)
    draft_token_ids: tuple[int, ...] = ()
    expects_drafts: bool = False
    num_guesses: int = 0
    drafting: DraftRecord = field(default_factory=DraftRecord)
    mirostat_mu: float | None = None
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_in_flight: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_sent_tokens: int | None = None
    status: RequestStatus = RequestStatus.WAITING
    stop_reason: int | str | None = None
    leader: "Request | None" = None
    serial: tuple[int, int] = (0, 0)
    sort_key: tuple[float, ...] = ()
    blocks: OwnedBlocks = field(default_factory=OwnedBlocks)
    fetch: Fetch | None = None
    has_fetched: bool = False
    swapped_keys: list[Key] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec = self.spec
        self.request_id, self.prompt_token_ids = spec.request_id, spec.prompt_token_ids
        self.sampling, self.max_tokens = spec.sampling, spec.max_tokens
        self.arrival_time_s = spec.arrival_time_s
        self.chain = PrefixChain(spec.hash_extras, spec.adapter)
        is_plain = self.sampling is not None and self.sampling.takes_logits_as_they_are
        self.runs_ahead = is_plain and not self.awaits_external_token

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and generated."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that the next step may compute, the pending ones included; 0 while the next token is not decided."""
        num_known = len(self.prompt_token_ids) + len(self.output_token_ids)
        return num_known + self.num_pending_tokens - self.num_computed_tokens

    def token_slice(self, start: int, stop: int) -> list[int]:
        """Known tokens at positions start … stop - 1."""
        prompt_len = len(self.prompt_token_ids)
        if start >= prompt_len:
            return self.output_token_ids[start - prompt_len : stop - prompt_len]
        if stop <= prompt_len:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - prompt_len]

    def hashes(self, num_blocks: int, block_size: int) -> PrefixChain:
        """Return the chain, which covers at least the first `num_blocks` blocks of the known tokens."""
        num_done = len(self.chain.digests)
        if num_done < num_blocks:
            self.chain.extend(self.token_slice(num_done * block_size, num_blocks * block_size), block_size)
        return self.chain


class SequenceUpdate(msgspec.Struct, frozen=True):
    """A request's progress by one step: result, appended tokens, and the position up to which the step computed."""

    request: Request
    result: RequestResult
    new_token_ids: tuple[int, ...]
    num_computed_tokens: int


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
        client_id = request.spec.client_id
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
        queue = self._queues.get(request.spec.client_id)
        if queue is None or not queue.remove(request):
            return False
        if not queue:
            del self._queues[request.spec.client_id]
        return True

    def arrive(self, request: Request) -> None:
        """See `WaitingQueue`."""
        client_id = request.spec.client_id
        if not self._num_unfinished[client_id]:
            others = [self.first().spec.client_id] if self._queues else self._num_unfinished
            base = min((self._num_tokens[name] for name in others), default=0)
            self._num_tokens[client_id] = max(self._num_tokens.pop(client_id, 0), base)
        self._num_unfinished[client_id] += 1

    def charge(self, request: Request, num_tokens: int) -> None:
        """See `WaitingQueue`."""
        self._num_tokens[request.spec.client_id] += num_tokens

    def depart(self, request: Request) -> None:
        """See `WaitingQueue`."""
        self._num_unfinished[request.spec.client_id] -= 1
        if self._num_unfinished[request.spec.client_id]:
            return
        del self._num_unfinished[request.spec.client_id]
        if not self._num_unfinished:
            for record in (self._num_tokens, self._heap, self._listed):
                record.clear()
        elif len(self._num_tokens) > len(self._num_unfinished) + MAX_IDLE_CLIENTS:
            idle = [name for name in self._num_tokens if name not in self._num_unfinished]
            for name in idle[: len(idle) // 2]:  # those that arrived longest ago
                del self._num_tokens[name]
