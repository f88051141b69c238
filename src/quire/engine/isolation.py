"""`Isolation`: finds the request that makes the executor raise, so that it fails alone.

The requests of a lost step are *suspects*: they run again one at a time, with no other request, until each has
computed all the tokens it had when the step was lost, and its next token or its vector. Recomputing gives the same
bits, so no text changes. If a suspect's step raises again, the suspect is at fault and ends with an error. Other
requests wait meanwhile. Knows no executor and no outputs. Next to read: `llm_engine.py`, `Scheduler.update`.
"""

import logging
from collections import deque
from collections.abc import Callable

from quire.events import EventKind, EventLog
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.types import RequestResult, SchedulerOutput, StepResult

logger = logging.getLogger("quire.engine")
MAX_FAILED_ALONE = 3
"""If this many requests failed alone, without a result of any step between, the fault is the engine's."""
MAX_UNEXPLAINED = 3
"""If more steps in a row were lost although each of their requests ran well alone, the fault is the engine's."""


class Isolation:
    """Decides after each lost step whether a request or the engine is at fault.

    Attributes: `is_active`: a step was lost and the matter is not settled; else no method need be called.
    """

    def __init__(self, scheduler: Scheduler, events: EventLog, caller_of: Callable[[str], str]) -> None:
        """`caller_of`: sequence id → the caller's request, so that the completions of one count once."""
        self._scheduler = scheduler
        self._events = events
        self._caller_of = caller_of
        self._suspects: deque[tuple[Request, int]] = deque()
        """With the tokens known when the step was lost: once these are computed the suspect is cleared."""
        self._failed_alone: set[str] = set()
        self._num_unexplained = 0
        self._has_worked = False
        """A step has given a result since there are suspects."""
        self.is_active = False

    def suspect_id(self) -> str | None:
        """Return the request that must run alone in the next step; None: all may run."""
        while self._suspects:
            request, num_tokens = self._suspects[0]
            if self._scheduler.get(request.request_id) is request and request.num_computed_tokens < num_tokens:
                return request.request_id
            self._suspects.popleft()
        return None

    def note(self, result: StepResult) -> None:
        """Take note of a step that was computed."""
        if any(item.error is None for item in result.results):
            self._has_worked = True
            self._failed_alone.clear()
            if not self._suspects:
                self._num_unexplained = 0
                self.is_active = False

    def judge(self, schedule: SchedulerOutput, error: Exception) -> StepResult:
        """Return the result of a step on which the executor raised. Raises: `error`, if the engine is at fault."""
        self.is_active = True
        request_ids = [item.request_id for item in schedule.scheduled]
        kind = type(error).__name__
        self._events.record(EventKind.LOST, step_id=schedule.step_id, num_requests=len(request_ids), error=kind)
        if self._suspects and request_ids == [self._suspects[0][0].request_id]:
            return self._blame(schedule.step_id, request_ids[0], error)
        self._num_unexplained += 1
        if self._num_unexplained > MAX_UNEXPLAINED:
            raise error
        if not self._suspects:
            self._has_worked = False
        logger.warning("a step of %d requests failed: they run again one at a time", len(request_ids), exc_info=error)
        self._suspect(request_ids)
        return StepResult(schedule.step_id, (), is_lost=True)

    def _suspect(self, request_ids: list[str]) -> None:
        # In the step's order: requests that ran before come first, and show that the engine works before one is blamed.
        found = [request for name in request_ids if (request := self._scheduler.get(name)) is not None]
        others = [suspect for suspect in self._suspects if suspect[0] not in found]
        self._suspects = deque([*((request, request.num_tokens) for request in found), *others])

    def _blame(self, step_id: int, request_id: str, error: Exception) -> StepResult:
        self._suspects.popleft()
        self._num_unexplained = 0
        if not self._has_worked:
            self._failed_alone.add(self._caller_of(request_id))
            if len(self._failed_alone) >= MAX_FAILED_ALONE:
                raise error
        kind = type(error).__name__
        logger.error("request %r fails: the model failed on it alone", request_id, exc_info=error)
        message = f"the model failed on this request ({kind}), also when it ran alone; the engine's log says more"
        return StepResult(step_id, (RequestResult(request_id, error=message),), is_lost=True)
