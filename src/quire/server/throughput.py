"""Estimate of the waiting time from the engine's recent speed and the usual length of answers.

Knows no HTTP. Next to read: `admission.py`, which sends it to clients as `Retry-After`.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from quire.engine.process.messages import Statistics

SAMPLE_EVERY_S = 1.0
NUM_SAMPLES = 30
DEFAULT_WAIT_S = 1.0
MAX_WAIT_S = 60.0
MOST_ROWS = 64
"""Batch size from which on larger batches do not raise the throughput."""
FORGOTTEN_SHARE = 0.02
"""Weight of a new answer in the moving average: about the last fifty count."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """Counters of the engine at one time."""

    at_s: float
    num_tokens: int = 0
    num_steps: int = 0
    busy_s: float = 0.0


class Throughput:
    """Tokens per second of busy time, prompt and generated ones together, over the last half minute of use."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples: deque[_Sample] = deque(maxlen=NUM_SAMPLES)

    def note(self, statistics: Statistics) -> None:
        """Take a sample of the engine's counters at most once a second. Mutates: the samples."""
        now_s = self._clock()
        if self._samples:
            last = self._samples[-1]
            if statistics.num_computed_tokens < last.num_tokens or statistics.busy_s < last.busy_s:
                self._samples.clear()  # a new engine counts from 0
            elif now_s - last.at_s < SAMPLE_EVERY_S or statistics.busy_s == last.busy_s:
                return
        counters = (statistics.num_computed_tokens, statistics.num_steps, statistics.busy_s)
        self._samples.append(_Sample(now_s, *counters))

    def tokens_per_s(self, statistics: Statistics, num_seats: int = 1) -> float | None:
        """Return the throughput with `num_seats` concurrent requests; None before the first step.

        From steps with fewer rows it is extrapolated with the square root of their number: CPUs gain a factor of two
        to six from one row to 8.
        """
        self.note(statistics)
        for first in (self._samples[0], _Sample(0.0)):
            num_tokens, spent_s = statistics.num_computed_tokens - first.num_tokens, statistics.busy_s - first.busy_s
            if spent_s > 0 and num_tokens > 0:
                num_rows = num_tokens / max(1, statistics.num_steps - first.num_steps)
                return num_tokens / spent_s * math.sqrt(max(1.0, min(num_seats, MOST_ROWS) / num_rows))
        return None

    def wait_s(self, statistics: Statistics, num_tokens: float, num_seats: int = 1) -> float:
        """Return the estimated seconds to compute `num_tokens`."""
        speed = self.tokens_per_s(statistics, num_seats)
        if speed is None:
            return DEFAULT_WAIT_S
        return min(MAX_WAIT_S, max(DEFAULT_WAIT_S, num_tokens / speed))


class AnswerLengths:
    """Share of `max_tokens` that answers use; 1 until some have ended."""

    def __init__(self) -> None:
        self._num_allowed = self._num_generated = 1.0

    def add(self, num_allowed: int, num_generated: int) -> None:
        """Count a request that has ended. Mutates: the share."""
        kept = 1 - FORGOTTEN_SHARE
        self._num_allowed = kept * self._num_allowed + num_allowed
        self._num_generated = kept * self._num_generated + num_generated

    @property
    def used_share(self) -> float:
        """Share between 0 and 1."""
        return self._num_generated / self._num_allowed
