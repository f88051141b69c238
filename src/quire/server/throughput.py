"""How fast the engine has been of late, and so how long what waits will take. Knows no HTTP.

Next to read: `admission.py`, which tells it to those it sends away.
"""

from collections import deque
from collections.abc import Callable

from quire.engine.process.messages import Statistics

SAMPLE_EVERY_S = 1.0
NUM_SAMPLES = 30
DEFAULT_WAIT_S = 1.0
MAX_WAIT_S = 60.0


class Throughput:
    """Tokens per second of computing, prompt and generated together, over the last half minute of use."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int, float]] = deque(maxlen=NUM_SAMPLES)

    def note(self, statistics: Statistics) -> None:
        """Look at the engine's counters; call as often as you like. Mutates: the samples."""
        now_s = self._clock()
        if self._samples:
            at_s, num_tokens, busy_s = self._samples[-1]
            if statistics.num_computed_tokens < num_tokens or statistics.busy_s < busy_s:
                self._samples.clear()  # another engine, which counts from 0
            elif now_s - at_s < SAMPLE_EVERY_S or statistics.busy_s == busy_s:
                return
        self._samples.append((now_s, statistics.num_computed_tokens, statistics.busy_s))

    def tokens_per_s(self, statistics: Statistics) -> float | None:
        """None while nothing was computed."""
        self.note(statistics)
        _, num_tokens, busy_s = self._samples[0]
        for first_tokens, first_busy_s in ((num_tokens, busy_s), (0, 0.0)):
            spent_s = statistics.busy_s - first_busy_s
            if spent_s > 0 and statistics.num_computed_tokens > first_tokens:
                return (statistics.num_computed_tokens - first_tokens) / spent_s
        return None

    def wait_s(self, statistics: Statistics, num_prompt_tokens: int, num_completions: int) -> float:
        """Until so much has been computed: prompts, and completions as long as they have been on average."""
        speed = self.tokens_per_s(statistics)
        if speed is None:
            return DEFAULT_WAIT_S
        num_finished = sum(statistics.num_finished.values())
        mean_len = statistics.num_generated_tokens / num_finished if num_finished else 0.0
        return min(MAX_WAIT_S, max(DEFAULT_WAIT_S, (num_prompt_tokens + mean_len * num_completions) / speed))
