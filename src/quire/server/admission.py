"""Who may start computing: bounded numbers of requests and prompt tokens that wait, limits per key, deadlines.

`Admission.enter` is called once per request, by `generation.generate`. What waits is what was let in and is not yet
running, as the engine last said. Knows no HTTP beyond the errors. Next to read: `rate_limits.py`, `throughput.py`.
"""

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.engine.process.messages import RequestUpdate, Statistics
from quire.server.caller import Caller
from quire.server.errors import ApiError
from quire.server.options import ServerOptions
from quire.server.rate_limits import RateLimits
from quire.server.request_record import current_record
from quire.server.supervisor import Supervisor
from quire.server.throughput import AnswerLengths, Throughput
from quire.server.tracing import Tracer

RESERVED_SHARE = 4
"""One key may not fill the last quarter of the queue while another is known: one that has asked for something."""
MOST_RETURNING = 10_000
"""Clients that were sent away and are still to come back; further ones are not counted."""


class Place:
    """One request's place in the server, from its admission to its end."""

    def __init__(
        self, limits: RateLimits, num_prompt_tokens: int, tracer: Tracer | None, on_tokens: Callable[[int], None]
    ) -> None:
        self.num_generated_tokens = 0
        self._on_tokens = on_tokens
        self._limits = limits
        self._tracer = tracer
        self._record = current_record()
        if self._record is not None:
            self._record.num_prompt_tokens += num_prompt_tokens

    def note(self, update: RequestUpdate) -> None:
        """Count the tokens of an update, for the log and for the key's limit; the last one is traced."""
        num_tokens = sum(len(choice.token_ids) for choice in update.choices)
        self.num_generated_tokens += num_tokens
        self._on_tokens(num_tokens)
        self._limits.take(num_tokens=num_tokens)
        if self._record is not None:
            self._record.num_generated_tokens += num_tokens
            if self._tracer is not None and update.metrics is not None:
                reasons = [choice.finish_reason for choice in update.choices if choice.finish_reason is not None]
                self._tracer.write(self._record, update.metrics, reasons)


class Admission:
    """Counts what is in the server. For one event loop.

    Per key it keeps two numbers and at most two buckets, so its memory is bounded by the number of keys.
    """

    def __init__(
        self,
        options: ServerOptions,
        supervisor: Supervisor,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
    ) -> None:
        self.num_requests = 0
        self.num_refused: Counter[str] = Counter()
        """By reason: the `code` of the error."""
        self._options = options
        self._supervisor = supervisor
        self._clock = clock
        self._num_prompt_tokens = 0
        self._num_allowed_tokens = 0
        self._num_generated_tokens = 0
        self._held: Counter[str] = Counter()
        self._limits: dict[str, RateLimits] = {}
        self._throughput = Throughput(clock)
        self._lengths = AnswerLengths()
        self._returning = _Returning()
        self._tracer = tracer

    # --- What the routes call -------------------------------------------------------------------

    def check_room(self, caller: Caller, num_requests: int) -> None:
        """Refuse early, before a request is tokenised. Raises: ApiError 429 with `Retry-After`."""
        self._check_rate(caller, 1)
        self._check_queue(caller, 1, num_requests)

    def num_at_once(self, num_prompts: int, num_choices: int) -> int:
        """Return the number of prompts of one request to compute at a time, each with `num_choices` choices."""
        limit = self._supervisor.options.max_num_seqs + self._options.max_queued_requests
        return min(num_prompts, max(1, (limit - limit // RESERVED_SHARE) // num_choices))

    @contextmanager
    def enter(
        self, caller: Caller, num_prompt_tokens: int, num_completions: int, num_allowed_tokens: int = 0
    ) -> Iterator[Place]:
        """Hold a place while the body runs; the body must await in the task that entered.

        num_allowed_tokens: that all completions together may have at most.
        Raises: ApiError 429 with `Retry-After`; ApiError 504 out of the body, if it runs longer than a request may.
        """
        self._check_rate(caller, num_prompt_tokens)
        self._check_queue(caller, num_prompt_tokens, num_completions)
        limits = self._limits_of(caller)
        limits.take(num_requests=1, num_tokens=num_prompt_tokens)
        self._hold(caller, num_prompt_tokens, num_completions)
        place = Place(limits, num_prompt_tokens, self._tracer, self._on_tokens)
        self._num_allowed_tokens += num_allowed_tokens
        try:
            with _deadline(self._options.request_timeout_s):
                yield place
        finally:
            self._num_generated_tokens -= place.num_generated_tokens
            self._num_allowed_tokens -= num_allowed_tokens
            self._lengths.add(num_allowed_tokens, place.num_generated_tokens)
            self._hold(caller, -num_prompt_tokens, -num_completions)

    def rate_limit_headers(self, caller: Caller) -> list[tuple[bytes, bytes]]:
        """What a key has left, as headers; none where nothing is limited. Nobody becomes known by asking."""
        limits = self._limits.get(caller.client_id) or RateLimits(self._options, self._clock)
        return limits.headers()

    # --- What waits -----------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Completions that were let in and do not run yet."""
        return max(0, self.num_requests - self._num_seats(self._statistics()))

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of requests that were let in and not yet begun."""
        return self._num_tokens_behind(self._statistics())

    def _num_tokens_behind(self, statistics: Statistics) -> int:
        return max(0, self._num_prompt_tokens - statistics.num_running_prompt_tokens)

    def _num_seats(self, statistics: Statistics) -> int:
        # While nobody waits in the engine, all of its seats can be taken.
        return statistics.num_running if statistics.num_waiting else self._supervisor.options.max_num_seqs

    def _check_queue(self, caller: Caller, num_prompt_tokens: int, num_completions: int) -> None:
        options, num_seats = self._options, self._supervisor.options.max_num_seqs
        limit = num_seats + options.max_queued_requests
        if num_completions > limit:
            message = f"n={num_completions} is more than this server takes at once, {limit}: ask for fewer"
            raise self._refuse(ApiError(400, message, code="too_many_completions", param="n"))
        statistics = self._statistics()
        num_waiting = self.num_requests - self._num_seats(statistics)
        if num_waiting + num_completions > options.max_queued_requests:
            raise self._full(
                f"{max(0, num_waiting)} completions wait already, of at most {options.max_queued_requests}", statistics
            )
        num_tokens = self._num_tokens_behind(statistics)
        if num_tokens and num_tokens + num_prompt_tokens > options.max_queued_tokens:
            raise self._full(
                f"{num_tokens} prompt tokens wait already, of at most {options.max_queued_tokens}", statistics
            )
        share = max(1, limit - limit // RESERVED_SHARE)
        if len(self._limits) > 1 and self._held[caller.client_id] + num_completions > share:
            raise self._full(
                f"this key has {self._held[caller.client_id]} completions here, of at most {share}", statistics
            )

    def _full(self, what: str, statistics: Statistics) -> ApiError:
        # Those who were told to come back come first: with one time for all of them, most would be sent away again.
        now_s = self._clock()
        num_tokens = self._num_tokens_behind(statistics) + self._num_tokens_left(self._returning.count(now_s))
        wait_s = self._throughput.wait_s(statistics, num_tokens, self._supervisor.options.max_num_seqs)
        self._returning.add(now_s + wait_s)
        message = f"the server is busy: {what}; try again later"
        return self._refuse(ApiError(429, message, code="queue_full", retry_after_s=wait_s))

    def _on_tokens(self, num_tokens: int) -> None:
        self._num_generated_tokens += num_tokens

    def _num_tokens_left(self, num_returning: int) -> float:
        """To be computed for all that has begun, and for so many more completions of the same kind."""
        share, num_here = self._lengths.used_share, max(1, self.num_requests)
        num_left = max(0.0, self._num_allowed_tokens * share - self._num_generated_tokens)
        each = (self._num_prompt_tokens + self._num_allowed_tokens * share) / num_here
        return num_left + num_returning * each

    def _refuse(self, error: ApiError) -> ApiError:
        self.num_refused[error.code or ""] += 1
        return error

    def _check_rate(self, caller: Caller, num_prompt_tokens: int) -> None:
        wait_s = self._limits_of(caller).wait_s(num_prompt_tokens)
        if wait_s > 0:
            message = f"this key has used what it may in a minute; try again in {wait_s:.0f} s"
            raise self._refuse(ApiError(429, message, code="rate_limit_exceeded", retry_after_s=wait_s))

    def _limits_of(self, caller: Caller) -> RateLimits:
        limits = self._limits.get(caller.client_id)
        if limits is None:
            limits = self._limits[caller.client_id] = RateLimits(self._options, self._clock)
        return limits

    def _hold(self, caller: Caller, num_prompt_tokens: int, num_completions: int) -> None:
        self.num_requests += num_completions
        self._num_prompt_tokens += num_prompt_tokens
        self._held[caller.client_id] += num_completions
        if not self._held[caller.client_id]:
            del self._held[caller.client_id]

    def _statistics(self) -> Statistics:
        statistics = statistics_of(self._supervisor)
        self._throughput.note(statistics)
        return statistics


class _Returning:
    """When clients that were sent away were told to come back."""

    def __init__(self) -> None:
        self._times_s: list[float] = []

    def add(self, time_s: float) -> None:
        """One more comes at this time."""
        if len(self._times_s) < MOST_RETURNING:
            heapq.heappush(self._times_s, time_s)

    def count(self, now_s: float) -> int:
        """How many are still to come."""
        while self._times_s and self._times_s[0] <= now_s:
            heapq.heappop(self._times_s)
        return len(self._times_s)


def statistics_of(supervisor: Supervisor) -> Statistics:
    """What the engine that runs last said of itself; all zeros while there is none."""
    return supervisor.client.statistics if supervisor.is_ready else Statistics()


@contextmanager
def _deadline(timeout_s: float) -> Iterator[None]:
    """Cancel the running task after so long, and turn that into an error. Raises: ApiError 504."""
    task = asyncio.current_task() if timeout_s else None
    if task is None:
        yield
        return
    is_over = False

    def end() -> None:
        nonlocal is_over
        is_over = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(timeout_s, end)
    try:
        yield
    except asyncio.CancelledError:
        if not is_over or task.uncancel() > 0:
            raise  # cancelled by somebody else too
        raise ApiError(504, f"the request took longer than {timeout_s:g} s, the most that this server allows: ask for "
                       "fewer tokens", code="request_timeout") from None  # fmt: skip
    finally:
        timer.cancel()
