"""Admission control: a queue bounded in requests and prompt tokens, limits per key, deadlines.

`generation.generate` calls `Admission.enter` once per request. A request waits if it is admitted and, by the engine's
last report, does not run yet. Knows no HTTP beyond the errors. Next to read: `rate_limits.py`, `throughput.py`.
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
"""A quarter of the queue stays free of any one key, once a second key has sent a request."""
MOST_RETURNING = 10_000
"""Most refused clients that are counted until they come back."""


class Place:
    """Place of one request in the server, from its admission to its end."""

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
        """Count the tokens of an update for the log and the key's limit; write a trace with the last update."""
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
    """Counters of the requests in the server. For one event loop. Its memory is bounded by the number of keys."""

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

    # --- Calls of the routes --------------------------------------------------------------------

    def check_room(self, caller: Caller, num_requests: int) -> None:
        """Refuse requests before they are read and tokenised. Raises: ApiError 429 with `Retry-After`."""
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

        num_allowed_tokens: sum of `max_tokens` of all completions.
        Raises: ApiError 429 with `Retry-After`; ApiError 504 out of the body after `request_timeout_s`.
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
        """Return the `x-ratelimit-*` headers of a key. This does not make it a known key."""
        limits = self._limits.get(caller.client_id) or RateLimits(self._options, self._clock)
        return limits.headers()

    # --- The queue ------------------------------------------------------------------------------

    def _num_tokens_behind(self, statistics: Statistics) -> int:
        return max(0, self._num_prompt_tokens - statistics.num_running_prompt_tokens)

    def _num_seats(self, statistics: Statistics) -> int:
        # While the engine's queue is empty, it has room for `max_num_seqs` sequences.
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
        # Refused clients get one time after the other: with the same time for all, most would be refused again.
        now_s = self._clock()
        num_tokens = self._num_tokens_behind(statistics) + self._num_tokens_left(self._returning.count(now_s))
        wait_s = self._throughput.wait_s(statistics, num_tokens, self._supervisor.options.max_num_seqs)
        self._returning.add(now_s + wait_s)
        message = f"the server is busy: {what}; try again later"
        return self._refuse(ApiError(429, message, code="queue_full", retry_after_s=wait_s))

    def _on_tokens(self, num_tokens: int) -> None:
        self._num_generated_tokens += num_tokens

    def _num_tokens_left(self, num_returning: int) -> float:
        """Estimate the tokens left to compute for admitted requests and `num_returning` similar ones."""
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
    """Times at which refused clients were told to come back."""

    def __init__(self) -> None:
        self._times_s: list[float] = []

    def add(self, time_s: float) -> None:
        """Note a client that comes back at this time."""
        if len(self._times_s) < MOST_RETURNING:
            heapq.heappush(self._times_s, time_s)

    def count(self, now_s: float) -> int:
        """Return the number of clients that have not come back yet."""
        while self._times_s and self._times_s[0] <= now_s:
            heapq.heappop(self._times_s)
        return len(self._times_s)


def statistics_of(supervisor: Supervisor) -> Statistics:
    """Return the engine's last report; all zeros while no engine runs."""
    return supervisor.client.statistics if supervisor.is_ready else Statistics()


@contextmanager
def _deadline(timeout_s: float) -> Iterator[None]:
    """Cancel the running task after `timeout_s`, 0 being never. Raises: ApiError 504."""
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
            raise  # cancelled for another reason too
        raise ApiError(504, f"the request took longer than {timeout_s:g} s, the most that this server allows: ask for "
                       "fewer tokens", code="request_timeout") from None  # fmt: skip
    finally:
        timer.cancel()
