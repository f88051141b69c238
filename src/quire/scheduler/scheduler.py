"""`Scheduler`: decides in integers which tokens are computed next. No tensors, no text, no clock in any decision.

There is no prefill phase and no decode phase: every request has `num_computed_tokens` and is given tokens out of one
budget per step until it has caught up with its known tokens; the step in which it catches up samples one more.
`schedule` and `update` alternate: a step is planned, executed, and taken note of.
Next to read: `blocks.py` (who owns which block), `policy.py` (who comes first), `admission.py` (what can never run).
"""

import time
from collections.abc import Callable, Iterable

from quire.config import SchedulerConfig
from quire.errors import EngineError
from quire.events import EventKind, EventLog
from quire.scheduler.admission import check_config, check_queue_room, check_request, check_sequence_fits
from quire.scheduler.blocks import BlockManager
from quire.scheduler.executor_view import ExecutorView
from quire.scheduler.integrity import check_blocks
from quire.scheduler.policy import make_policy
from quire.scheduler.request_table import RequestTable, is_idle
from quire.scheduler.step_plan import Admission, Share, StepPlan
from quire.scheduler.stopping import check_stop
from quire.types import (
    Request,
    RequestResult,
    RequestStatus,
    ScheduledRequest,
    SchedulerOutput,
    SequenceUpdate,
    StepResult,
    Transfer,
)

_MAX_OVERTAKEN = 32
"""Long prompts looked past in one step: bounds the step's cost when thousands wait."""


class Scheduler:
    """Continuous batching over a paged KV cache. One instance per engine; not thread-safe.

    Every accepted request ends in exactly one finished status, by `update`, `finish` or `abort`, and then owns no
    block. `blocks` are for reports. `clock` stamps requests that bring no arrival time.

    Raises: ConfigError if settings contradict each other.
    """

    def __init__(
        self, config: SchedulerConfig, events: EventLog | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        check_config(config)
        self.config = config
        self._events = events
        self._clock = clock
        self._requests = RequestTable(make_policy(config), config.max_num_seqs)
        self.blocks = BlockManager(config, events)
        self._executor_view = ExecutorView()
        self._in_flight: dict[str, Request] = {}
        self._step_id = 0
        # A few blocks stay free beside others, or the next decodes would preempt whoever was just admitted.
        self._headroom = config.num_blocks // 100

    # --- Requests come and go -------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request, with its siblings if `n > 1`. An `arrival_time_s` of 0 means now.

        Raises: DuplicateRequestError, QueueFullError, PromptError, ContextLengthError, InvalidParameterError (n above
            max_num_seqs), MemoryCapacityError (prompt and max_tokens exceed the whole KV cache).
        """
        check_request(request, self.config, self.blocks, self._requests.by_id)
        check_queue_room(len(self._requests.waiting), self.config)
        request.arrival_time_s = request.arrival_time_s or self._clock()
        for sibling in request.siblings:
            sibling.arrival_time_s = request.arrival_time_s
        self._requests.enter(request)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """End requests at any moment, also between `schedule` and `update`; their blocks are free at once.

        A leader takes along siblings that still wait in it. Unknown ids are ignored. Returns those ended.
        """
        return [item for name in request_ids for item in self._end(name, RequestStatus.FINISHED_ABORTED, None)]

    def finish(self, request_id: str, status: RequestStatus, stop_reason: int | str | None = None) -> list[Request]:
        """End a request for a reason found outside: a stop string, an error. Like `abort` otherwise."""
        if not status.is_finished:
            raise EngineError(f"request '{request_id}' cannot finish as {status.name}")
        return self._end(request_id, status, stop_reason)

    def fork(self, parent_id: str, child: Request) -> None:
        """Add a copy of a request that shares all of its blocks (beam search); call between steps.

        The child takes over the parent's output tokens and goes on alone from there. If there is no seat for it, or
        the parent owns no blocks, it will recompute. Raises: what `add_request` raises; EngineError if the parent is
        unknown or in flight, or the child brings tokens of its own.
        """
        parent = self._requests.by_id.get(parent_id)
        if parent is None or self._in_flight.get(parent_id) is parent:
            raise EngineError(f"cannot fork '{parent_id}': " + ("its step is in flight" if parent else "unknown"))
        if child.output_token_ids and child.output_token_ids != parent.output_token_ids:
            raise EngineError(f"cannot fork '{parent_id}': '{child.request_id}' brings tokens of its own")
        check_request(child, self.config, self.blocks, self._requests.by_id)
        child.output_token_ids = list(parent.output_token_ids)
        child.arrival_time_s = parent.arrival_time_s
        child.num_cached_tokens = parent.num_cached_tokens
        self._requests.enter_fork(parent, child)
        if parent.status is RequestStatus.RUNNING and self._requests.free_seats() > 0:
            self._fork_running(parent, child, parent.num_computed_tokens)
            return
        child.status = RequestStatus.PREEMPTED
        if is_idle(parent) or parent_id in self._requests.parked:
            self._requests.parked[child.request_id] = child
        else:
            self._requests.wait(child)

    def append_token(self, request_id: str, token_id: int) -> None:
        """Give a request that awaits an external token its next token (beam search). No stop rule is applied.

        Raises: EngineError if it does not wait for one; MemoryCapacityError if it would outgrow the whole KV cache.
        """
        request = self._requests.by_id.get(request_id)
        if request is None or not (is_idle(request) or request_id in self._requests.parked):
            raise EngineError(f"request '{request_id}' does not wait for a token")
        # Unlike a sampled last token this one will be computed, so there must be room for one more.
        check_sequence_fits(request, request.num_tokens + 2, self.config, self.blocks)
        request.output_token_ids.append(token_id)
        if self._requests.parked.pop(request_id, None) is not None:
            self._requests.wait(request)

    def get(self, request_id: str) -> Request | None:
        """The unfinished request with this id."""
        return self._requests.by_id.get(request_id)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting, running, or awaiting a token."""
        return bool(self._requests.by_id)

    @property
    def num_running(self) -> int:
        """Sequences that own blocks."""
        return len(self._requests.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included; siblings count with their leader."""
        return len(self._requests.waiting) + len(self._requests.parked)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while any request owns blocks."""
        return self.blocks.reset_prefix_cache()

    # --- One step -------------------------------------------------------------------------------

    def schedule(self, alone: str | None = None, step_tokens: int = 0) -> SchedulerOutput:
        """Decide the next step: who computes how many tokens, into which blocks.

        Running requests come first, in order; where blocks run out, the policy's victim is preempted. Waiting requests
        join only if nobody had to leave. Empty if nothing can run. Raises: EngineError if a step is in flight.
        `alone`: only this request runs, with siblings that its step forks; others give way if it needs their blocks.
        `step_tokens`: so many the step may have in any case, where prompts get shares of steps.
        """
        if any(map(self._requests.holds, self._in_flight.values())):
            raise EngineError(f"schedule() called before update() of step {self._step_id}")
        self._step_id += 1
        plan = StepPlan(self.config)

        if alone is None:
            self._run_all(plan, step_tokens)
        else:
            self._run_alone(self._requests.by_id[alone], plan)
        self._fork_siblings(plan)

        output = self._executor_view.describe(self._step_id, plan, self.blocks)
        self._in_flight = {share.request.request_id: share.request for share in plan.shares.values()}
        if plan.shares:
            self._record(
                EventKind.SCHEDULE, step_id=self._step_id, num_tokens=output.num_tokens,
                num_requests=len(plan.shares), num_waiting=self.num_waiting,
            )  # fmt: skip
        return output

    def update(self, output: SchedulerOutput, result: StepResult) -> list[SequenceUpdate]:
        """Take note of an executed step: tokens computed, tokens sampled, requests that ended.

        Requests that ended since `schedule` are passed over; a result with an error ends its request alone. After a
        step that is lost everybody is preempted, and the executor will be told to forget all it knew.
        Returns one update per result that counted.
        Raises: EngineError if the result is of another step or lacks a sampled token.
        """
        if not output.step_id == result.step_id == self._step_id:
            raise EngineError(f"update of step {output.step_id} with {result.step_id} after step {self._step_id}")
        results: dict[str, list[RequestResult]] = {}
        for taken in result.results:
            results.setdefault(taken.request_id, []).append(taken)
        in_flight, self._in_flight = self._in_flight, {}
        updates: list[SequenceUpdate] = []
        for item in output.scheduled:
            request = in_flight.get(item.request_id)
            # The same id may by now belong to another request.
            if request is None or not self._requests.holds(request):
                continue
            rounds = results.get(item.request_id, [])
            if rounds or not result.is_lost:  # of a step that is lost there are errors only
                updates += self._take(request, item, rounds)
        if result.is_lost:
            self._executor_view.forget_all()
            for request in tuple(self._requests.running):
                self._withdraw(request)
        return updates

    def check_integrity(self) -> None:
        """Raise EngineError, saying what is wrong, unless all blocks and all requests are where they should be."""
        check_blocks(self.blocks)
        self._requests.check(set(self.blocks.owned))

    # --- Parts of a step ------------------------------------------------------------------------

    def _run_all(self, plan: StepPlan, step_tokens: int) -> None:
        plan.limit_prefill(self._requests.running, step_tokens)
        if not self._requests.waiting or not self._requests.free_seats():
            plan.allow_rounds(self._requests.running, self.blocks.num_free)
        self._continue_running(tuple(self._requests.running), plan)
        if plan.num_preempted == 0:
            self._admit_waiting(plan)
            # Only requests that await an external token hold blocks: those who wait for blocks go first.
            while not plan.shares and self._requests.waiting and self._preempt_idle(plan):
                self._admit_waiting(plan)

    def _run_alone(self, request: Request, plan: StepPlan) -> None:
        self._continue_running((request,), plan)
        while request.status is not RequestStatus.RUNNING:  # not admitted yet, or it gave way to itself
            plan.free_seats = self._requests.free_seats()
            if self._try_admit(request, plan) is Admission.ADMITTED:
                self._requests.waiting.remove(request)
            else:
                self._preempt(self._requests.victim(self._requests.running), plan)

    def _continue_running(self, requests: Iterable[Request], plan: StepPlan) -> None:
        for request in requests:
            if plan.budget == 0:
                break
            if request.status is not RequestStatus.RUNNING:  # preempted in this step
                continue
            num_left = request.num_tokens - request.num_computed_tokens
            num_tokens = self.blocks.chunk_limit(request, plan.chunk_len(num_left))
            if num_tokens == 0:  # its next token is not chosen yet, or prompts have had their share
                continue
            copies = self._allocate_or_preempt(request, num_tokens + plan.max_rounds - 1, plan)
            if copies is not None:
                self._give(Share(request, num_tokens, num_tokens == num_left, copies), plan)

    def _allocate_or_preempt(self, request: Request, num_tokens: int, plan: StepPlan) -> tuple[Transfer, ...] | None:
        while (copies := self.blocks.allocate(request, num_tokens)) is None:
            victim = self._requests.victim(self._requests.running)
            self._preempt(victim, plan)
            if victim is request:
                return None
        return copies

    def _admit_waiting(self, plan: StepPlan) -> None:
        overtaken: list[Request] = []
        # Counted once: over all admissions of a step it would take time quadratic in their number.
        plan.free_seats = self._requests.free_seats()
        while self._requests.waiting and plan.budget > 0 and len(overtaken) < _MAX_OVERTAKEN:
            request = self._requests.waiting.first()
            outcome = self._try_admit(request, plan)
            if outcome is Admission.BLOCKED:
                break
            self._requests.waiting.pop()
            if outcome is Admission.OVERTAKEN:
                overtaken.append(request)
        for request in overtaken:
            self._requests.wait(request)

    def _try_admit(self, request: Request, plan: StepPlan) -> Admission:
        if plan.free_seats < 1 + len(request.siblings):
            return Admission.BLOCKED
        hit = self.blocks.find_prefix(request)
        num_left = request.num_tokens - hit.num_tokens
        num_tokens = plan.chunk_len(num_left)
        if num_tokens < num_left:
            if not plan.allows_long_partial(request):
                return Admission.OVERTAKEN
            if not num_tokens or not plan.allows_partial():
                return Admission.BLOCKED
        num_reserved = plan.num_reserved_blocks + (self._headroom if self._requests.running else 0)
        if not self.blocks.fits(request, hit, num_reserved):
            return Admission.BLOCKED
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = hit.num_tokens
        request.num_computed_tokens = hit.num_tokens
        num_tokens = self.blocks.chunk_limit(request, num_tokens)
        request.status = RequestStatus.RUNNING
        self._requests.running.append(request)
        plan.free_seats -= 1 + len(request.siblings)
        num_prompt, num_cached = request.num_prompt_tokens, hit.num_tokens
        self._record(EventKind.ADMIT, request.request_id, num_prompt_tokens=num_prompt, num_cached_tokens=num_cached)
        self.blocks.admit(request, hit)
        copies = self.blocks.allocate(request, num_tokens)
        if copies is None:
            raise EngineError(f"request '{request.request_id}' was admitted without enough free KV blocks")
        self._give(Share(request, num_tokens, num_tokens == num_left, copies), plan)
        return Admission.ADMITTED

    def _give(self, share: Share, plan: StepPlan) -> None:
        plan.add(share)
        if not share.catches_up:
            plan.add_partial(share.request, self.blocks.num_missing(share.request))

    def _fork_siblings(self, plan: StepPlan) -> None:
        for leader in [share.request for share in plan.shares.values() if share.request.siblings and share.catches_up]:
            for sibling in self._requests.release_siblings(leader):
                sibling.num_cached_tokens = leader.num_cached_tokens
                self._fork_running(leader, sibling, leader.num_tokens)
                plan.add(Share(sibling, 0, catches_up=True, logits_from=leader.request_id))

    def _fork_running(self, parent: Request, child: Request, num_computed_tokens: int) -> None:
        child.num_computed_tokens = num_computed_tokens
        child.status = RequestStatus.RUNNING
        self._requests.running.append(child)
        self.blocks.fork(parent.request_id, child)

    def _preempt_idle(self, plan: StepPlan) -> bool:
        if idle := [request for request in self._requests.running if is_idle(request)]:
            self._preempt(self._requests.victim(idle), plan)
        return bool(idle)

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        plan.remove(victim.request_id)
        self._withdraw(victim)

    def _withdraw(self, victim: Request) -> None:
        """Preemption by recompute: all blocks go, all tokens stay."""
        self._record(EventKind.PREEMPT, victim.request_id, num_computed_tokens=victim.num_computed_tokens)
        has_sampled = is_idle(victim)
        self._requests.running.remove(victim)
        self.blocks.free(victim.request_id)
        self._executor_view.note_preempted(victim.request_id)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        if has_sampled:
            # It has sampled already; to recompute before its token is chosen would only take blocks again.
            self._requests.parked[victim.request_id] = victim
        else:
            self._requests.wait(victim)

    def _take(self, request: Request, item: ScheduledRequest, rounds: list[RequestResult]) -> list[SequenceUpdate]:
        """Take note of what was computed: of no result, of one, or of one per round."""
        updates: list[SequenceUpdate] = []
        for num_further, result in enumerate(rounds or (None,)):
            if result is not None and result.error is not None:
                # What it computed may be damaged too, and must not be found by others.
                self.blocks.forget_prefixes(request.request_id)
                ended = self._end(request.request_id, RequestStatus.FINISHED_ERROR, None)
                return updates + [SequenceUpdate(member, result, None, member.status) for member in ended]
            request.num_computed_tokens = item.num_computed_tokens + item.num_tokens + num_further
            self.blocks.register(request)
            token_id = self._take_token(request, item, result)
            if result is not None:
                updates.append(SequenceUpdate(request, result, token_id, request.status))
            if request.status.is_finished:
                break
        self._executor_view.note_rounds(request.request_id, len(rounds))
        return updates

    def _take_token(self, request: Request, item: ScheduledRequest, result: RequestResult | None) -> int | None:
        """Append what was sampled, unless it is chosen elsewhere, and end the request if that was its last."""
        if request.sampling is None:
            if request.num_computed_tokens == request.num_tokens:
                self._end(request.request_id, RequestStatus.FINISHED_STOPPED, None)
            return None
        if not item.samples or request.awaits_external_token:
            return None
        if result is None or result.token_id is None:
            raise EngineError(f"no token was sampled for request '{request.request_id}' in step {self._step_id}")
        request.output_token_ids.append(result.token_id)
        stop = check_stop(request, result.token_id, self.config.max_model_len)
        if stop is not None:
            self._end(request.request_id, stop.status, stop.reason)
        return result.token_id

    def _end(self, request_id: str, status: RequestStatus, stop_reason: int | str | None) -> list[Request]:
        request = self._requests.by_id.get(request_id)
        if request is None:
            return []
        ended = self._requests.leave(request)
        for item in ended:
            item.status = status
            item.stop_reason = stop_reason
            self.blocks.forget(item.request_id)
            self._executor_view.note_finished(item.request_id)
            num_output = len(item.output_token_ids)
            self._record(EventKind.FINISH, item.request_id, reason=status.value, num_output_tokens=num_output)
        return ended

    def _record(self, kind: EventKind, request_id: str = "", **data: object) -> None:
        if self._events is not None:
            self._events.record(kind, request_id, **data)
