"""`StepPlanner`: decides one step, as a `StepPlan`. `ExecutorView`: the message to the executor that the plan becomes.

The executor reads an output in this order: forget `finished_ids` and `preempted_ids`, make `transfers`, take up
`new_requests`, compute `scheduled`. An id may be forgotten and be new in one output. News for the executor waits for
the next step that computes something, so an empty output may be dropped.
Next to read: `request_table.py` (order of requests), `blocks.py` (block tables).
"""

import enum
from collections.abc import Sequence

import msgspec

from quire.config import SchedulerConfig
from quire.errors import EngineError
from quire.events import EventKind, EventLog
from quire.scheduler.blocks import BlockManager
from quire.scheduler.pace import prefill_budget
from quire.scheduler.request import Request
from quire.scheduler.request_table import RequestTable, is_idle
from quire.transfers import Transfer
from quire.types import NewRequest, RequestStatus, ScheduledRequest, SchedulerOutput

_MAX_OVERTAKEN = 32  # long prompts looked past in one step: bounds the step's cost when thousands wait


class AdmissionOutcome(enum.Enum):
    """Outcome for a waiting request in this step."""

    ADMITTED = enum.auto()
    OVERTAKEN = enum.auto()  # later requests may go first: it awaits blocks, or there are too many long prompts
    BLOCKED = enum.auto()  # later requests wait too: else a big request would wait for ever


class StepShare(msgspec.Struct):
    """A request's part of a step.

    num_tokens: tokens to compute, `draft_token_ids` included.
    catches_up: all known tokens are computed after this step; then the request samples.
    """

    request: Request
    num_tokens: int
    catches_up: bool
    transfers: tuple[Transfer, ...] = ()
    logits_from: str | None = None
    draft_token_ids: tuple[int, ...] = ()

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that count for the prefill budget: none of a decode."""
        num_known = self.num_tokens - len(self.draft_token_ids)
        return num_known if num_known > 1 else 0


class StepPlan:
    """The shares of a step, and the token budget left.

    A prompt is partial if it goes on after this step. The counts of partial prompts and of reserved blocks are only
    read for admission, which does not happen in a step that preempts; so `remove` leaves them alone.
    Attributes: `is_blocked`: a request lacks blocks and its victim is in flight, so later requests must wait.
    `may_overlap`: a request of this step may be scheduled again before the step's result is known.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._num_partial = 0
        self._num_long_partial = 0
        self._prefill_budget = config.max_num_batched_tokens
        self.budget = config.max_num_batched_tokens
        self.free_places = 0
        self.shares: dict[Request, StepShare] = {}
        self.num_preempted = 0
        self.num_reserved_blocks = 0
        self.num_lookahead_tokens = 0
        self.is_blocked = False
        self.is_pipelined = config.pipeline_stages > 1
        # The first stage of a pipeline waits for the token.
        self.may_overlap = config.max_in_flight > 1 and not self.is_pipelined

    def limit_prefill(self, running: Sequence[Request], step_tokens: int = 0, num_startable: int = 0) -> None:
        """Throttle prefill if requests decode in this step: `pace.prefill_budget`."""
        per_decode = self._config.prefill_tokens_per_decode
        if per_decode is None:
            return
        num_decodes = sum(request.num_uncomputed_tokens == 1 for request in running)
        if num_decodes:
            num_prompts = len(running) - num_decodes + num_startable
            self._prefill_budget = max(prefill_budget(step_tokens, num_decodes, num_prompts), per_decode * num_decodes)

    def may_compute(self, running: Sequence[Request]) -> tuple[Request, ...]:
        """Return the running requests without those beyond this step's share of the decodes: each stage gets some."""
        if not self.is_pipelined:
            return tuple(running)
        decodes = [request for request in running if request.num_tokens - request.num_computed_tokens <= 1]
        share = -(-len(decodes) // self._config.pipeline_stages)
        others = set([request for request in decodes if request.num_uncomputed_tokens][share:])
        return tuple(request for request in running if request not in others)

    def allow_lookahead(self, running: Sequence[Request], num_free_blocks: int) -> None:
        """Enable multi-step decode if every running request decodes and enough blocks are free.

        A request with stop strings gets one token a step: its end is found in the text, outside of the step. Call only
        when no waiting request could start.
        """
        if self._config.multi_step_decode == 1 or not running or not all(map(_may_look_ahead, running)):
            return
        num_left = min([request.max_tokens - len(request.output_token_ids) for request in running])
        wanted = min(self._config.multi_step_decode, num_left)
        num_blocks = (wanted // self._config.block_size + 2) * len(self._config.kv_cache_groups) * len(running)
        if num_blocks <= num_free_blocks:
            self.num_lookahead_tokens = wanted - 1

    def chunk_len(self, num_left: int) -> int:
        """Return the tokens that a request with `num_left` uncomputed ones gets; 0 if the prefill budget is spent."""
        threshold = self._config.long_prefill_token_threshold
        given = min(num_left, self.budget, threshold) if threshold else min(num_left, self.budget)
        return given if given <= 1 else min(given, self._prefill_budget)

    def choose_drafts(
        self, request: Request, num_tokens: int, num_running: int, blocks: BlockManager
    ) -> tuple[int, ...]:
        """Return the drafts to verify behind `num_tokens` known tokens.

        They leave a token and a block of each group to every running request, so no request waits or is preempted.
        """
        if request.sampling is None or request.awaits_external_token or request.siblings or request.num_pending_tokens:
            return ()
        if blocks.state_groups and num_tokens > 1:  # after a rejection it computes these again: it must get ahead first
            return ()
        num_useful = request.max_tokens - len(request.output_token_ids) - 1
        drafts = request.draft_token_ids[: max(0, min(num_useful, self.budget - num_tokens - num_running))]
        return drafts if self._has_room(num_tokens + len(drafts), num_running, blocks) else ()

    def take_guesses(self, request: Request, num_tokens: int, num_running: int, blocks: BlockManager) -> int:
        """Return the tokens behind `num_tokens` for whose guesses it needs blocks. Mutates: request, if these lack."""
        if not self._has_room(num_tokens + self.num_lookahead_tokens + request.num_guesses, num_running, blocks):
            request.num_guesses = 0
        return request.num_guesses

    def _has_room(self, num_tokens: int, num_running: int, blocks: BlockManager) -> bool:
        """Return True if `num_tokens` of a request leave a block of each group to every running request."""
        num_blocks = num_tokens // self._config.block_size + 2 + num_running
        return num_blocks * len(self._config.kv_cache_groups) <= blocks.num_free

    def add(self, share: StepShare, num_missing_blocks: int = 0) -> None:
        """Give a request its tokens. `num_missing_blocks`: of a prompt that goes on after this step."""
        self.shares[share.request] = share
        self.budget -= share.num_tokens
        if share.num_tokens > 1:
            self._prefill_budget -= share.num_prefill_tokens
        if not share.catches_up:
            self._num_partial += 1
            self._num_long_partial += self._is_long(share.request)
            self.num_reserved_blocks += num_missing_blocks

    def remove(self, request: Request) -> None:
        """Take a preempted request out, with its tokens and transfers, if it was in."""
        share = self.shares.pop(request, None)
        if share is not None:
            self.budget += share.num_tokens
            self._prefill_budget += share.num_prefill_tokens
        self.num_preempted += 1

    def allows_partial(self) -> bool:
        """Return True if another prompt may be left unfinished by this step."""
        return self._config.enable_chunked_prefill and self._num_partial < self._config.max_num_partial_prefills

    def allows_long_partial(self, request: Request) -> bool:
        """Return True if this prompt, if long, may be left unfinished beside the other long ones."""
        return not self._is_long(request) or self._num_long_partial < self._config.max_long_partial_prefills

    def _is_long(self, request: Request) -> bool:
        return 0 < self._config.long_prefill_token_threshold < request.num_tokens


def _may_look_ahead(request: Request) -> bool:
    sampling = request.sampling
    return (
        sampling is not None
        and request.num_uncomputed_tokens == 1
        and bool(request.output_token_ids)
        and not (request.num_in_flight or request.draft_token_ids or request.expects_drafts)
        and not (request.awaits_external_token or sampling.stop)
    )


class StepPlanner:
    """Decides one step after another: chooses requests, allocates their blocks, admits and preempts."""

    def __init__(self, config: SchedulerConfig, requests: RequestTable, blocks: BlockManager, events: EventLog) -> None:
        self.executor_view = ExecutorView()
        self._config = config
        self._requests = requests
        self._blocks, self._checkpoints = blocks, blocks.checkpoints
        self._events = events
        self._leaving: Request | None = None
        """A victim in flight: it gets no more tokens until it can be preempted."""
        # A few blocks stay free, or the next decodes would preempt the requests just admitted.
        self._headroom = config.num_blocks // 100

    def plan(self, step_tokens: int, *, is_first: bool) -> StepPlan:
        """Decide a step of all requests that can run. `is_first`: no step is in flight."""
        plan, requests = StepPlan(self._config), self._requests
        num_startable = min(len(requests.waiting), requests.num_free_places()) if requests.waiting else 0
        plan.limit_prefill(requests.running, step_tokens, num_startable)
        if not num_startable:
            plan.allow_lookahead(requests.running, self._blocks.num_free)
            if plan.num_lookahead_tokens and self._blocks.state_groups:  # a step past a checkpoint would leave it out
                num_tokens, limit = 1 + plan.num_lookahead_tokens, self._checkpoints.chunk_limit
                plan.num_lookahead_tokens = min(limit(request, num_tokens) for request in requests.running) - 1
        self._continue_running(plan.may_compute(requests.running), plan)
        if requests.waiting and not (plan.num_preempted or plan.is_blocked):
            self._admit_waiting(plan)
            while is_first and not plan.shares and requests.waiting and self._free_idle_blocks(plan):
                self._admit_waiting(plan)
        self._fork_siblings(plan)
        return plan

    def plan_alone(self, request: Request) -> StepPlan:
        """Decide a step of one request, and of siblings that it forks, while no step is in flight."""
        plan = StepPlan(self._config)
        self._continue_running((request,), plan)
        while request.status is not RequestStatus.RUNNING:  # not admitted yet, or it was its own victim
            plan.free_places = self._requests.num_free_places()
            if self._try_admit(request, plan, fetches=False) is AdmissionOutcome.ADMITTED:
                self._requests.waiting.remove(request)
            elif not self._blocks.tiers.yield_blocks():
                self._preempt(self._requests.victim(self._requests.running), plan)
        self._fork_siblings(plan)
        return plan

    def _continue_running(self, requests: tuple[Request, ...], plan: StepPlan) -> None:
        for request in requests:
            if plan.budget == 0 or plan.is_blocked:
                break
            if request.status is not RequestStatus.RUNNING:  # preempted in this step
                continue
            if request is self._leaving:
                if request.num_in_flight:
                    continue
                self._leaving = None
            num_left = num_tokens = request.num_uncomputed_tokens
            if num_left > 1:
                num_tokens = plan.chunk_len(num_left)
                if num_tokens > 1:
                    num_tokens = self._checkpoints.chunk_limit(request, num_tokens)
            if num_tokens == 0:  # its next token is not decided yet, or the prefill budget is spent
                continue
            drafts: tuple[int, ...] = ()
            if request.draft_token_ids and num_tokens == num_left:
                drafts = plan.choose_drafts(request, num_tokens, len(requests), self._blocks)
            num_tokens += len(drafts)
            num_ahead = plan.num_lookahead_tokens + plan.take_guesses(request, num_tokens, len(requests), self._blocks)
            transfers = self._allocate_or_preempt(request, num_tokens + num_ahead, len(drafts), plan)
            if transfers is not None:
                share = StepShare(request, num_tokens, num_tokens == num_left + len(drafts), transfers, None, drafts)
                plan.add(share, 0 if share.catches_up else self._blocks.num_missing(request))

    def _allocate_or_preempt(
        self, request: Request, num_tokens: int, num_drafts: int, plan: StepPlan
    ) -> tuple[Transfer, ...] | None:
        while (transfers := self._blocks.allocate(request, num_tokens, num_drafts)) is None:
            if self._blocks.tiers.yield_blocks():
                continue
            victim = self._requests.victim(self._requests.running)
            if victim.num_in_flight:
                self._leaving = victim
                plan.is_blocked = True
                return None
            self._preempt(victim, plan)
            if victim is request:
                return None
        return transfers

    def _free_idle_blocks(self, plan: StepPlan) -> bool:
        """If only requests that do not run hold blocks, take some from them. Returns: whether blocks were freed."""
        tiers = self._blocks.tiers
        if tiers.is_fetching or tiers.yield_blocks():
            return not tiers.is_fetching
        idle = list(filter(is_idle, self._requests.running))
        if idle:
            self._preempt(self._requests.victim(idle), plan)
        return bool(idle)

    def _admit_waiting(self, plan: StepPlan) -> None:
        overtaken: list[Request] = []
        # Counted once: over all admissions of a step it would take time quadratic in their number.
        plan.free_places = self._requests.num_free_places()
        while self._requests.waiting and plan.budget > 0 and len(overtaken) < _MAX_OVERTAKEN:
            request = self._requests.waiting.first()
            outcome = self._try_admit(request, plan, fetches=True)
            if outcome is AdmissionOutcome.BLOCKED:
                break
            self._requests.waiting.remove(request)
            if outcome is AdmissionOutcome.OVERTAKEN:
                overtaken.append(request)
        for request in overtaken:
            self._requests.waiting.push(request)

    def _try_admit(self, request: Request, plan: StepPlan, *, fetches: bool) -> AdmissionOutcome:
        if plan.free_places < 1 + len(request.siblings):
            return AdmissionOutcome.BLOCKED
        hit = self._blocks.lookup.find(request)
        num_reserved = plan.num_reserved_blocks + (self._headroom if self._requests.running else 0)
        if fetches and (self._requests.lacks_adapter(request) or self._blocks.awaits_tiers(request, hit, num_reserved)):
            return AdmissionOutcome.OVERTAKEN
        num_left = request.num_tokens - hit.num_tokens
        num_tokens = plan.chunk_len(num_left)
        if num_tokens < num_left:
            if not plan.allows_long_partial(request):
                return AdmissionOutcome.OVERTAKEN
            if not num_tokens or not plan.allows_partial():
                return AdmissionOutcome.BLOCKED
        if not self._blocks.fits(request, hit, num_reserved):
            return AdmissionOutcome.BLOCKED
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = hit.num_tokens
        request.num_computed_tokens = hit.num_tokens
        num_tokens = self._checkpoints.chunk_limit(request, num_tokens)
        request.status = RequestStatus.RUNNING
        self._requests.admit(request, num_left)
        plan.free_places -= 1 + len(request.siblings)
        self._events.record(
            EventKind.ADMIT,
            request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=hit.num_tokens,
            arrival_s=request.arrival_time_s,
            is_resumed=request.num_preemptions > 0,
        )
        self._blocks.admit(request, hit)
        transfers = self._blocks.allocate(request, num_tokens)
        if transfers is None:
            raise EngineError(f"request '{request.request_id}' was admitted without enough free KV blocks")
        share = StepShare(request, num_tokens, num_tokens == num_left, transfers)
        plan.add(share, 0 if share.catches_up else self._blocks.num_missing(request))
        return AdmissionOutcome.ADMITTED

    def _fork_siblings(self, plan: StepPlan) -> None:
        for leader in [share.request for share in plan.shares.values() if share.request.siblings and share.catches_up]:
            for sibling in self._requests.release_siblings(leader):
                sibling.num_cached_tokens = leader.num_cached_tokens
                self.fork_running(leader, sibling, leader.num_tokens)
                plan.add(StepShare(sibling, 0, catches_up=True, logits_from=leader.request_id))

    def fork_running(self, parent: Request, child: Request, num_computed_tokens: int) -> None:
        """Start a child with the blocks of its parent's computed tokens."""
        child.num_computed_tokens = num_computed_tokens
        child.status = RequestStatus.RUNNING
        self._requests.running.append(child)
        self._blocks.fork(parent, child)

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        plan.remove(victim)
        self.withdraw(victim)

    def withdraw(self, victim: Request) -> None:
        """Preempt: free all blocks, keep all tokens."""
        self._events.record(EventKind.PREEMPT, victim.request_id, num_computed_tokens=victim.num_computed_tokens)
        has_sampled = is_idle(victim)
        self._requests.running.remove(victim)
        self._blocks.preempt(victim)
        victim.status = RequestStatus.PREEMPTED
        self.executor_view.forget(victim)
        victim.num_computed_tokens = victim.num_pending_tokens = 0
        victim.num_preemptions += 1
        if has_sampled:
            # It has sampled already; to recompute before its token is chosen would only take blocks again.
            self._requests.parked.append(victim)
        else:
            self._requests.waiting.push(victim)


class ExecutorView:
    """News for the executor: each step tells it only what it does not know.

    After a lost step the executor's knowledge is unknown, so the next step starts from nothing.
    """

    def __init__(self) -> None:
        self._preempted: list[str] = []
        self._finished: list[str] = []
        self._forgets_all = False

    def forget(self, request: Request) -> None:
        """Make the executor forget the request, if it knows it; a preempted one returns as new."""
        if request.num_sent_tokens is not None:
            request.num_sent_tokens = None
            ids = self._finished if request.status.is_finished else self._preempted
            ids.append(request.request_id)

    def forget_all(self) -> None:
        """Make the executor forget every request; those that go on return as new. All must be preempted before."""
        self._preempted, self._finished, self._forgets_all = [], [], True

    def commit(self, step_id: int, plan: StepPlan, blocks: BlockManager, *, is_first: bool) -> SchedulerOutput:
        """Turn the plan into the message to the executor. Mutates: its requests, which are now in flight."""
        awaits = is_first and not plan.shares and blocks.tiers.is_fetching
        if not (plan.shares or awaits):
            return SchedulerOutput(step_id, (), (), (), (), ())
        shares, moved = plan.shares.values(), blocks.tiers.take_transfers()
        new_requests = tuple([_announce(it.request) for it in shares if it.request.num_sent_tokens is None])
        num_guesses = min((share.request.num_guesses for share in shares), default=0)
        scheduled = [_schedule(share, plan, blocks) for share in shares]
        transfers = (*moved, *[item for share in shares if share.transfers for item in share.transfers])
        news = tuple(self._preempted), tuple(self._finished), self._forgets_all
        self._preempted, self._finished, self._forgets_all = [], [], False
        return SchedulerOutput(
            step_id,
            new_requests,
            tuple(scheduled),
            transfers,
            *news,
            awaits_transfers=awaits,
            num_draft_tokens=num_guesses,
        )


def _announce(request: Request) -> NewRequest:
    request.num_sent_tokens, spec = request.num_tokens, request.spec
    return NewRequest(
        request_id=request.request_id,
        token_ids=tuple(request.token_slice(0, request.num_tokens)),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        pooling=spec.pooling,
        eos_token_ids=tuple(sorted(spec.eos_token_ids)),
        seed=spec.seed,
        bad_words_token_ids=spec.bad_words_token_ids,
        max_tokens=request.max_tokens,
        awaits_external_token=request.awaits_external_token,
        mirostat_mu=request.mirostat_mu,
        adapter=spec.adapter,
    )


def _schedule(share: StepShare, plan: StepPlan, blocks: BlockManager) -> ScheduledRequest:
    request, drafts = share.request, share.draft_token_ids
    max_new_tokens = 0
    if share.catches_up and request.sampling is not None:
        max_new_tokens = 1 + len(drafts) + plan.num_lookahead_tokens
    new_token_ids: tuple[int, ...] = ()
    num_tokens, num_sent = request.num_tokens, request.num_sent_tokens
    if num_sent is not None and num_sent < num_tokens:
        new_token_ids = tuple(request.token_slice(num_sent, num_tokens))
        request.num_sent_tokens = num_tokens
    item = ScheduledRequest(
        request.request_id,
        request.num_computed_tokens,
        share.num_tokens,
        max_new_tokens,
        new_token_ids,
        request.blocks.take_updates(),
        share.logits_from,
        drafts,
    )
    request.num_in_flight += 1
    request.num_computed_tokens += share.num_tokens - len(drafts)
    request.draft_token_ids, request.num_guesses = (), 0
    # A last token is no input. The steps in flight yield one token each: a request does not look ahead among them.
    if max_new_tokens == 1 and plan.may_overlap and request.runs_ahead and not request.expects_drafts:
        num_output = len(request.output_token_ids) + request.num_pending_tokens + 1
        request.num_pending_tokens += num_output < request.max_tokens
    return item
