"""Admission control: a queue bounded in requests and prompt tokens, limits per key.

The gate calls `Admission.begin` for each request that costs work, before its body is read; `generation.generate` calls
`Admission.enter` for each that computes. A request waits if it is admitted and, by the engine's last report, does not
run yet. Knows no HTTP beyond the errors. Next to read: `metrics.py`.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from quire.engine.process.messages import RequestUpdate, Statistics
from quire.server.engines import Engines
from quire.server.errors import ApiError
from quire.server.options import ServerOptions
from quire.server.request_record import RequestRecord
from quire.server.tracing import Tracer

MINUTE_S = 60.0
RESERVED_SHARE = 4
"""A quarter of the queue stays free of any one key, once a second key has sent a request."""
MIN_WAIT_S, MAX_WAIT_S = 1.0, 60.0
"""Limits of `Retry-After`."""


class Bucket:
    """Token bucket of `per_minute`. Generated tokens, known only afterwards, may overdraw it."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at_s = clock()

    @property
    def level(self) -> float:
        """Amount that is left now; below 0 if overdrawn."""
        now_s = self._clock()
        gained = max(0.0, now_s - self._at_s) * self.per_minute / MINUTE_S
        self._level, self._at_s = min(float(self.per_minute), self._level + gained), now_s
        return self._level

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `amount` is available, or the bucket is full."""
        missing = min(amount, self.per_minute) - self.level
        return max(0.0, missing) * MINUTE_S / self.per_minute

    def take(self, amount: float) -> None:
        """Use an amount, even if it is not available. Mutates: the level."""
        self._level = self.level - amount


class RateLimits:
    """Buckets of one key, for the limits that there are."""

    def __init__(self, options: ServerOptions, clock: Callable[[], float]) -> None:
        per_minute = {"requests": options.requests_per_minute, "tokens": options.tokens_per_minute}
        self._buckets = {kind: Bucket(limit, clock) for kind, limit in per_minute.items() if limit is not None}

    def check(self, *, num_requests: int = 0, num_tokens: int = 1) -> None:
        """Raises: ApiError 429 with `Retry-After`, if requests or tokens must wait."""
        amounts = {"requests": num_requests, "tokens": num_tokens}
        wait_s = max((bucket.wait_s(amounts[kind]) for kind, bucket in self._buckets.items()), default=0.0)
        if wait_s > 0:
            message = f"this key has used what it may in a minute; try again in {wait_s:.0f} s"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=wait_s)

    def take(self, *, num_requests: int = 0, num_tokens: int = 0) -> None:
        """Use requests and tokens. Mutates: the buckets."""
        amounts = {"requests": num_requests, "tokens": num_tokens}
        for kind, bucket in self._buckets.items():
            bucket.take(amounts[kind])


class KeyRates:
    """The limits of each key. Its memory is bounded by the number of keys."""

    def __init__(self, options: ServerOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._limits: dict[str, RateLimits] = {}

    def __len__(self) -> int:
        return len(self._limits)

    def of(self, record: RequestRecord) -> RateLimits:
        """Return the limits of a request's key."""
        limits = self._limits.get(record.client_id)
        if limits is None:
            limits = self._limits[record.client_id] = RateLimits(self._options, self._clock)
        return limits


@dataclass(frozen=True, slots=True)
class Place:
    """Place of one request in the server, from its admission to its end."""

    limits: RateLimits
    tracer: Tracer | None
    record: RequestRecord

    def note(self, update: RequestUpdate) -> None:
        """Count the tokens of an update for the log and the key's limit; write a trace with the last update."""
        num_tokens = sum(len(choice.token_ids) for choice in update.choices)
        self.limits.take(num_tokens=num_tokens)
        if update.finished:
            self.record.num_cached_tokens += update.num_cached_tokens
        self.record.num_generated_tokens += num_tokens
        if self.tracer is not None and update.metrics is not None:
            reasons = [choice.finish_reason for choice in update.choices if choice.finish_reason is not None]
            self.tracer.write(self.record, update.metrics, reasons)


class Admission:
    """Counters of the requests in the server. For one event loop."""

    def __init__(
        self,
        options: ServerOptions,
        engines: Engines,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
        rates: KeyRates | None = None,
    ) -> None:
        """`rates`: those of other models of the server, which share the keys' limits."""
        self.num_requests = 0
        self.num_refused: Counter[str] = Counter()
        """By reason: the `code` of the error."""
        self._options = options
        self._engines = engines
        self._clock = clock
        self._num_prompt_tokens = 0
        self._next_return_s = 0.0
        self._held: Counter[str] = Counter()
        self.rates = KeyRates(options, clock) if rates is None else rates
        self._tracer = tracer

    @property
    def _max_num_seqs(self) -> int:
        """Sequences that all engines compute at once."""
        return self._engines.options.max_num_seqs * len(self._engines.statistics)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of requests that, by the engine's last report, have not been scheduled."""
        return max(
            0, self._num_prompt_tokens - sum(item.num_running_prompt_tokens for item in self._engines.statistics)
        )

    # --- Calls of the routes --------------------------------------------------------------------

    def begin(self, record: RequestRecord, *, is_queued: bool) -> None:
        """Count a request whose body has not been read. `is_queued`: it will take a place in the queue.

        Raises: ApiError 429 with `Retry-After`; it is then not counted.
        """
        self._check_rate(record, num_requests=1)
        if is_queued:
            self.check_room(record, 1)
        self.rates.of(record).take(num_requests=1)

    def check_room(self, record: RequestRecord, num_requests: int) -> None:
        """Refuse requests before they are tokenised. Raises: ApiError 429 with `Retry-After`."""
        self._check_queue(record, 1, num_requests)

    def num_at_once(self, num_prompts: int, num_choices: int) -> int:
        """Return the number of prompts of one request to compute at a time, each with `num_choices` choices."""
        limit = self._max_num_seqs + self._options.max_queued_requests
        return min(num_prompts, max(1, (limit - limit // RESERVED_SHARE) // num_choices))

    @contextmanager
    def enter(self, record: RequestRecord, num_prompt_tokens: int, num_completions: int) -> Iterator[Place]:
        """Hold a place while the body runs. Raises: ApiError 429 with `Retry-After`."""
        self._check_rate(record, num_tokens=num_prompt_tokens)
        self._check_queue(record, num_prompt_tokens, num_completions)
        limits = self.rates.of(record)
        limits.take(num_tokens=num_prompt_tokens)
        record.num_prompt_tokens += num_prompt_tokens
        self._hold(record, num_prompt_tokens, num_completions)
        try:
            yield Place(limits, self._tracer, record)
        finally:
            self._hold(record, -num_prompt_tokens, -num_completions)

    @contextmanager
    def wait(self, record: RequestRecord) -> Iterator[None]:
        """Hold a place while the body waits for the model. Raises: ApiError 429 with `Retry-After`."""
        self.check_room(record, 1)
        self._hold(record, 0, 1)
        try:
            yield
        finally:
            self._hold(record, 0, -1)

    # --- The queue ------------------------------------------------------------------------------

    def _check_queue(self, record: RequestRecord, num_prompt_tokens: int, num_completions: int) -> None:
        options = self._options
        limit = self._max_num_seqs + options.max_queued_requests
        if num_completions > limit:
            message = f"n={num_completions} is more than this server takes at once, {limit}: ask for fewer"
            raise self._refuse(ApiError(400, message, code="too_many_completions", param="n"))
        # While an engine's queue is empty, it has room for `max_num_seqs` sequences.
        max_num_seqs, statistics = self._engines.options.max_num_seqs, self._engines.statistics
        num_waiting = self.num_requests - sum(it.num_running if it.num_waiting else max_num_seqs for it in statistics)
        if num_waiting + num_completions > options.max_queued_requests:
            raise self._full(
                f"{max(0, num_waiting)} completions wait already, of at most {options.max_queued_requests}", statistics
            )
        num_tokens = self.num_queued_tokens
        if num_tokens > 0 and num_tokens + num_prompt_tokens > options.max_queued_tokens:
            raise self._full(
                f"{num_tokens} prompt tokens wait already, of at most {options.max_queued_tokens}", statistics
            )
        share = max(1, limit - limit // RESERVED_SHARE)
        if len(self.rates) > 1 and self._held[record.client_id] + num_completions > share:
            raise self._full(
                f"this key has {self._held[record.client_id]} completions here, of at most {share}", statistics
            )

    def _full(self, what: str, statistics: Sequence[Statistics]) -> ApiError:
        """Return the refusal; `Retry-After` is the engines' mean time per completion times those in the server.

        Each refused client gets a later time than the one before: with one time for all, most would be refused again.
        """
        now_s, num_finished = self._clock(), sum(sum(item.num_finished.values()) for item in statistics)
        busy_s = sum(item.busy_s for item in statistics) / len(statistics)
        each_s = busy_s / num_finished if num_finished else 0.0
        free_s = max(self._next_return_s, now_s + self.num_requests * each_s)
        wait_s = min(MAX_WAIT_S, max(MIN_WAIT_S, free_s - now_s))
        self._next_return_s = now_s + wait_s + each_s
        message = f"the server is busy: {what}; try again later"
        return self._refuse(ApiError(429, message, code="queue_full", retry_after_s=wait_s))

    def _refuse(self, error: ApiError) -> ApiError:
        self.num_refused[error.code or ""] += 1
        return error

    def _check_rate(self, record: RequestRecord, *, num_requests: int = 0, num_tokens: int = 1) -> None:
        try:
            self.rates.of(record).check(num_requests=num_requests, num_tokens=num_tokens)
        except ApiError as error:
            raise self._refuse(error) from None

    def _hold(self, record: RequestRecord, num_prompt_tokens: int, num_completions: int) -> None:
        self.num_requests += num_completions
        self._num_prompt_tokens += num_prompt_tokens
        self._held[record.client_id] += num_completions
        if not self._held[record.client_id]:
            del self._held[record.client_id]
