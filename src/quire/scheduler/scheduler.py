"""`Scheduler`: decides in integers which tokens are computed next. No tensors, no text, no clock in any decision.

There is no prefill phase and no decode phase: every request has `num_computed_tokens` and is given tokens out of one
budget per step until it has caught up with its known tokens; the step that catches up samples at least one more. Up to
`max_in_flight` steps are scheduled before the oldest one's result comes to `update`.
Next to read: `blocks.py` (block tables), `request_table.py` (order), `step_plan.py`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from quire.config import SchedulerConfig
from quire.errors import DuplicateRequestError, EngineError, QueueFullError
from quire.events import EventKind, EventLog
from quire.scheduler.blocks import BlockManager
from quire.scheduler.prefix_cache import Key
from quire.scheduler.request import OwnedBlocks, Request, SequenceUpdate
from quire.scheduler.request_table import RequestTable, is_idle
from quire.scheduler.step_plan import StepPlanner
from quire.types import (
    RequestResult,
    RequestStatus,
    ScheduledRequest,
    SchedulerOutput,
    StepResult,
    Stop,
    find_stop,
)


class _StepInFlight(msgspec.Struct):
    """A scheduled step without a result yet.

    `requests`: those of `output.scheduled`. `detached`: blocks of requests that ended, to release after it.
    """

    output: SchedulerOutput
    requests: list[Request]
    detached: list[OwnedBlocks] = []


class Scheduler:
    """Continuous batching over a paged KV cache. One instance per engine; not thread-safe.

    Every accepted request ends in exactly one finished status, by `update`, `finish` or `abort`. Its blocks are free at
    once, or after the last step in flight that computes it. `clock` stamps requests without an arrival time.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        events: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        requests: RequestTable | None = None,
        blocks: BlockManager | None = None,
        stored: Iterable[Key] = (),
    ) -> None:
        """`requests` and `blocks`: made by the caller, to admit requests or allocate blocks by other rules.

        `stored`: blocks that are on disk, without `blocks`.
        """
        self.config = config
        self._events = EventLog(0) if events is None else events
        self._clock = clock
        self.requests = RequestTable(config) if requests is None else requests
        self.blocks = BlockManager(config, self._events, stored=stored) if blocks is None else blocks
        self._planner = StepPlanner(config, self.requests, self.blocks, self._events)
        self._in_flight: deque[_StepInFlight] = deque()
        self._step_id = 0

    # --- Requests come and go -------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request, with its siblings if `n > 1`. An `arrival_time_s` of 0 means now.

        `InputProcessor` has checked everything that does not depend on other requests or on the KV cache.
        Raises: DuplicateRequestError, QueueFullError, MemoryCapacityError (prompt and max_tokens exceed the whole KV
            cache).
        """
        members = (request, *request.siblings)
        for item in members:
            if item.request_id in self.requests.by_id:
                raise DuplicateRequestError(f"request id '{item.request_id}' is already running; choose another")
        self.blocks.check_fits(request, request.num_prompt_tokens + (request.max_tokens if request.sampling else 0))
        most, num_waiting = self.config.max_num_waiting, len(self.requests.waiting)
        if most is not None and num_waiting >= most:
            raise QueueFullError(f"{num_waiting} requests are waiting, max_num_waiting is {most}; try again later")
        arrival_time_s = request.arrival_time_s or self._clock()
        for item in members:
            item.arrival_time_s = arrival_time_s
        self.requests.enter(request)
        self._events.record(EventKind.ARRIVE, request.request_id, num_prompt_tokens=request.num_prompt_tokens)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """End requests at any moment, with siblings that wait in them; unknown ids are ignored. Returns those ended."""
        return [item for name in request_ids for item in self._end(name, RequestStatus.FINISHED_ABORTED, None)]

    def finish(self, request_id: str, status: RequestStatus, stop_reason: int | str | None = None) -> list[Request]:
        """End a request for a reason found outside: a stop string, an error. Like `abort` otherwise."""
        return self._end(request_id, status, stop_reason)

    def fork(self, parent_id: str, child: Request) -> None:
        """Add a copy of a request that shares its blocks and output tokens (beam search).

        It will recompute if `max_num_seqs` run already or the parent owns no blocks. Raises: EngineError if the parent
        is unknown or in flight.
        """
        parent = self.requests.by_id.get(parent_id)
        if parent is None or parent.num_in_flight:
            raise EngineError(f"cannot fork '{parent_id}': " + ("its step is in flight" if parent else "unknown"))
        child.output_token_ids = list(parent.output_token_ids)
        child.arrival_time_s, child.num_cached_tokens = parent.arrival_time_s, parent.num_cached_tokens
        self.requests.register(child, parent.serial[0])
        if parent.status is RequestStatus.RUNNING and self.requests.num_free_places() > 0:
            self._planner.fork_running(parent, child, parent.num_computed_tokens)
            return
        child.status = RequestStatus.PREEMPTED
        if is_idle(parent) or parent in self.requests.parked:
            self.requests.parked.append(child)
        else:
            self.requests.waiting.push(child)

    def append_token(self, request_id: str, token_id: int) -> None:
        """Give a request that awaits an external token its next token (beam search). No stop rule is applied.

        Raises: EngineError if it does not wait for one; MemoryCapacityError if it would outgrow the whole KV cache.
        """
        request = self.requests.by_id.get(request_id)
        if request is None or not (is_idle(request) or request in self.requests.parked):
            raise EngineError(f"request '{request_id}' does not wait for a token")
        # Unlike a sampled last token this one will be computed, so there must be room for one more.
        self.blocks.check_fits(request, request.num_tokens + 2)
        request.output_token_ids.append(token_id)
        if request in self.requests.parked:
            self.requests.parked.remove(request)
            self.requests.waiting.push(request)

    def get(self, request_id: str) -> Request | None:
        """Return the unfinished request with this id."""
        return self.requests.by_id.get(request_id)

    @property
    def has_unfinished(self) -> bool:
        """True if any request is waiting, running, or awaiting a token, or blocks are on the way to the device."""
        return bool(self.requests.by_id) or self.blocks.tiers.is_fetching

    @property
    def num_running(self) -> int:
        """Unfinished sequences that own blocks."""
        return len(self.requests.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included; siblings count with their leader."""
        return len(self.requests.waiting) + len(self.requests.parked)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, without any effect, while blocks are in use."""
        return self.blocks.reset_prefix_cache()

    # --- Schedule -------------------------------------------------------------------------------

    def schedule(self, alone: str | None = None, step_tokens: int = 0, tokens_per_s: float = 0.0) -> SchedulerOutput:
        """Decide the next step: the tokens that each request computes, and their blocks.

        Running requests come first; waiting requests join only if no request had to leave. If none can run, the output
        `awaits_transfers`, or is empty and needs no `update`. `alone`: only this request runs, with siblings that its
        step forks; it takes blocks of others if needed. `step_tokens`: smallest token budget if prefill is throttled.
        `tokens_per_s`: of prefill. Raises: EngineError if `max_in_flight` steps, or for `alone` any, are in flight.
        """
        if len(self._in_flight) >= (self.config.max_in_flight if alone is None else 1):
            raise EngineError(f"schedule() called before update() of step {self._in_flight[0].output.step_id}")
        self._step_id += 1
        self.blocks.tiers.begin_step(tokens_per_s)
        if alone is None:
            plan = self._planner.plan(step_tokens, is_first=not self._in_flight)
        else:
            plan = self._planner.plan_alone(self.requests.by_id[alone])
        output = self._planner.executor_view.commit(self._step_id, plan, self.blocks, is_first=not self._in_flight)
        if plan.shares or output.awaits_transfers:
            self._in_flight.append(_StepInFlight(output, list(plan.shares)))
            self._events.record(
                EventKind.SCHEDULE,
                step_id=self._step_id,
                num_tokens=output.num_tokens,
                num_requests=len(plan.shares),
                num_waiting=self.num_waiting,
            )
        return output

    def schedule_last(self) -> SchedulerOutput:
        """Return a step that keeps the free cached blocks on disk, in place of all in flight; it needs no `update`."""
        transfers = self.blocks.tiers.save_all()
        return SchedulerOutput(self._step_id + 1, (), (), transfers, (), (), forgets_all=True, awaits_transfers=True)

    # --- Update ---------------------------------------------------------------------------------

    def update(self, output: SchedulerOutput, result: StepResult) -> list[SequenceUpdate]:
        """Apply the result of the oldest step in flight: append tokens, end requests, register prefixes.

        Requests that ended since `schedule` are passed over; a result with an error ends its request alone. A lost step
        loses all steps in flight: every request is preempted, and the next step makes the executor forget all.
        Returns an update per result that counted. Raises: EngineError if the result is another step's or lacks a token.
        """
        oldest_id = self._in_flight[0].output.step_id if self._in_flight else None
        if not output.step_id == result.step_id == oldest_id:
            raise EngineError(f"update of step {output.step_id} with {result.step_id}: the oldest is {oldest_id}")
        step = self._in_flight.popleft()
        results = {item.request_id: item for item in result.results}
        updates: list[SequenceUpdate] = []
        for request, item in zip(step.requests, output.scheduled, strict=True):
            request.num_in_flight -= 1
            if self.requests.by_id.get(item.request_id) is request:  # else it has ended; its id may be in use again
                taken = results.get(item.request_id)
                if taken is not None or not result.is_lost:  # of a lost step there are errors only
                    self._take(request, item, taken, updates)
        self.blocks.tiers.note(result.transfers)
        if result.is_lost:
            self._lose_steps(step)
        for owned in step.detached:
            self.blocks.release(owned)
        return updates

    def _lose_steps(self, oldest: _StepInFlight) -> None:
        """Forget all steps in flight and preempt every request."""
        for step in self._in_flight:
            oldest.requests += step.requests
            oldest.detached += step.detached
            for request in step.requests:
                request.num_in_flight -= 1
        self._in_flight.clear()
        self.blocks.tiers.lose_steps()
        for request in tuple(self.requests.running):
            if request in oldest.requests:
                request.num_computed_tokens = 0  # its sample is lost too: it is not idle
            self._planner.withdraw(request)
        self._planner.executor_view.forget_all()

    def _take(
        self, request: Request, item: ScheduledRequest, result: RequestResult | None, updates: list[SequenceUpdate]
    ) -> None:
        """Apply a request's result. Mutates: updates."""
        num_computed = item.num_computed_tokens + item.num_tokens
        new_token_ids: tuple[int, ...] = ()
        stop: Stop | None = None
        has_failed = result is not None and result.error is not None
        if item.max_new_tokens and not request.awaits_external_token:
            if result is not None and result.token_ids:
                new_token_ids, stop = self._append_tokens(request, result.token_ids)
                request.mirostat_mu = result.mirostat_mu
                self.requests.waiting.charge(request, len(new_token_ids))
            elif not has_failed:
                raise EngineError(f"no token was sampled for request '{request.request_id}'")
            if item.max_new_tokens > 1:
                num_computed += len(new_token_ids) - len(item.draft_token_ids) - 1
                request.num_computed_tokens = num_computed
        elif request.sampling is None and num_computed == request.num_tokens and not has_failed:
            stop = Stop(0, RequestStatus.FINISHED_STOPPED)
        if has_failed and stop is None:
            # The KV that it computed may be damaged too, and must not be found by other requests.
            self.blocks.forget_prefixes(request)
            ended = self._end(request.request_id, RequestStatus.FINISHED_ERROR, None)
        else:
            if stop is None and item.draft_token_ids and len(new_token_ids) <= len(item.draft_token_ids):
                num_computed = self.blocks.truncate(request, num_computed)
                request.num_computed_tokens = num_computed
            self.blocks.register(request, num_computed)
            if stop is not None:
                self._end(request.request_id, stop.status, stop.reason)
            ended = [request]
        if result is not None:
            for member in ended:  # an error of a leader is that of the siblings that wait in it
                updates.append(SequenceUpdate(member, result, new_token_ids if member is request else (), num_computed))

    def _append_tokens(self, request: Request, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], Stop | None]:
        """Append the tokens up to the first stop. Returns them and the stop."""
        sampling, num_output = request.sampling, len(request.output_token_ids)
        assert sampling is not None
        stop = find_stop(sampling, request.spec.eos_token_ids, request.max_tokens, num_output, token_ids)
        if stop is not None:
            token_ids = token_ids[: stop.num_tokens]
        request.output_token_ids += token_ids
        if request.num_sent_tokens is not None:
            request.num_sent_tokens += len(token_ids)
        request.num_pending_tokens = max(0, request.num_pending_tokens - 1)
        return token_ids, stop

    def _end(self, request_id: str, status: RequestStatus, stop_reason: int | str | None) -> list[Request]:
        request = self.requests.by_id.get(request_id)
        ended = [] if request is None else self.requests.leave(request)
        for item in ended:
            item.status, item.stop_reason = status, stop_reason
            self._free_blocks(item)
            self._planner.executor_view.forget(item)
            num_tokens = len(item.output_token_ids)
            self._events.record(EventKind.FINISH, item.request_id, reason=status.value, num_output_tokens=num_tokens)
        return ended

    def _free_blocks(self, request: Request) -> None:
        """Free the blocks of a request that ended, now or after the last step in flight that computes it."""
        if request.num_in_flight:
            step = next(step for step in reversed(self._in_flight) if request in step.requests)
            step.detached.append(self.blocks.detach(request))
        self.blocks.forget(request)
