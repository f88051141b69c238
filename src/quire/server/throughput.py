"""How fast the engine has been of late and how long answers become, and so how long what waits will take.

Knows no HTTP. Next to read: `admission.py`, which tells it to those it sends away.
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
"""From so many rows a step on, more rows make it longer and the engine no faster."""
FORGOTTEN_SHARE = 0.02
"""Of what is known of answers, with each one that ends: some fifty count."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """The engine's counters at some time."""

    at_s: float
    num_tokens: int = 0
    num_steps: int = 0
    busy_s: float = 0.0


class Throughput:
    """Tokens per second of computing, prompt and generated together, over the last half minute of use."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples: deque[_Sample] = deque(maxlen=NUM_SAMPLES)

    def note(self, statistics: Statistics) -> None:
        """Look at the engine's counters; call as often as you like. Mutates: the samples."""
        now_s = self._clock()
        if self._samples:
            last = self._samples[-1]
            if statistics.num_computed_tokens < last.num_tokens or statistics.busy_s < last.busy_s:
                self._samples.clear()  # another engine, which counts from 0
            elif now_s - last.at_s < SAMPLE_EVERY_S or statistics.busy_s == last.busy_s:
                return
        counters = (statistics.num_computed_tokens, statistics.num_steps, statistics.busy_s)
        self._samples.append(_Sample(now_s, *counters))

    def tokens_per_s(self, statistics: Statistics, num_seats: int = 1) -> float | None:
        """With `num_seats` requests at once; None while nothing was computed.

        Where steps had fewer rows than that, it is taken to grow with the square root of their number: two to six
        times from one row to 8, measured on CPUs.
        """
        self.note(statistics)
        for first in (self._samples[0], _Sample(0.0)):
            num_tokens, spent_s = statistics.num_computed_tokens - first.num_tokens, statistics.busy_s - first.busy_s
            if spent_s > 0 and num_tokens > 0:
                num_rows = num_tokens / max(1, statistics.num_steps - first.num_steps)
                return num_tokens / spent_s * math.sqrt(max(1.0, min(num_seats, MOST_ROWS) / num_rows))
        return None

    def wait_s(self, statistics: Statistics, num_tokens: float, num_seats: int = 1) -> float:
        """Until so many tokens have been computed."""
        speed = self.tokens_per_s(statistics, num_seats)
        if speed is None:
            return DEFAULT_WAIT_S
        return min(MAX_WAIT_S, max(DEFAULT_WAIT_S, num_tokens / speed))


class AnswerLengths:
    """How much of the tokens that clients allow their answers come to use; all of them, until some have ended."""

    def __init__(self) -> None:
        self._num_allowed = self._num_generated = 1.0

    def add(self, num_allowed: int, num_generated: int) -> None:
        """One request has ended. Mutates: the share."""
        kept = 1 - FORGOTTEN_SHARE
        self._num_allowed = kept * self._num_allowed + num_allowed
        self._num_generated = kept * self._num_generated + num_generated

    @property
    def used_share(self) -> float:
        """Between 0 and 1."""
        return self._num_generated / self._num_allowed
