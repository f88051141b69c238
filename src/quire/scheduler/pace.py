"""`Pace`: the measured speed of steps, from which the engine tells the scheduler how long steps may be.

The scheduler itself reads no clock, so that a recorded schedule can be replayed.
Next to read: `step_plan.py`.
"""

from quire.config import STEP_S

MAX_DECODES = 3.0
"""If decoding one token takes longer than a third of `STEP_S`, a step with prompts may take this many times as long."""
_NEWEST = 0.2
"""Weight of the newest step in averages."""


class Pace:
    """Measures how many tokens a step may compute while requests decode in it, so that their next tokens come in time.

    A step of the same size takes a hundred times longer with one model than with another. The scheduler, which knows no
    time, is told the number. Keeps averages over the last steps. `tokens_per_s`: of steps with prompts; 0: none yet.
    """

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self._iteration_s = 0.0

    def note(self, num_tokens: int, duration_s: float, *, num_iterations: int = 1, has_prompts: bool) -> None:
        """Take note of a step.

        num_tokens: of all iterations; 0: the step only moved blocks between tiers, and does not count.
        duration_s: from its schedule to its outputs. num_iterations: forward passes of a step without prompts.
        """
        if not num_tokens:
            return
        if has_prompts:
            self.tokens_per_s = _average(self.tokens_per_s, num_tokens / max(duration_s, 1e-6))
        else:
            self._iteration_s = _average(self._iteration_s, duration_s / num_iterations)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step that is not too long; 0 as long as no step with prompts was seen."""
        return int(self.tokens_per_s * max(STEP_S, MAX_DECODES * self._iteration_s))


def _average(before: float, newest: float) -> float:
    """Return the moving average, `newest` if there is none yet."""
    if before == 0:
        return newest
    # One step during which the machine stood still must not count as if all were so.
    return before + _NEWEST * (min(newest, 2 * before) - before)
