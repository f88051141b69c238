"""`Pace`: how many tokens a step may compute while others generate in it, so that their next tokens come in time.

It is measured, not assumed: a step of so many tokens takes a hundred times longer with one model than with another.
The scheduler, which knows no time, is told the number. Next to read: `../scheduler/step_plan.py`.
"""

STEP_S = 0.025
"""Outputs come at least 40 times a second, which is as soon as anybody sees it: the time of one step with all its
rounds, as far as can be foreseen, and of one that computes prompts beside requests that generate."""
MAX_DECODES = 3.0
"""Where generating one token takes longer than a third of that, a step with prompts takes so many times as long."""
_NEWEST = 0.2
"""Weight of the newest step in the averages."""


class Pace:
    """Averages over the last steps: tokens per second where prompts were computed, and seconds per round elsewhere."""

    def __init__(self) -> None:
        self._tokens_per_s = 0.0
        self._round_s = 0.0

    def note(self, num_tokens: int, duration_s: float, *, num_rounds: int = 1, has_prompts: bool) -> None:
        """A step has ended. num_tokens: of all rounds."""
        if has_prompts:
            self._tokens_per_s = _average(self._tokens_per_s, num_tokens / max(duration_s, 1e-6))
        elif num_tokens:
            self._round_s = _average(self._round_s, duration_s / num_rounds)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step that is not too long; 0 as long as none with prompts was seen."""
        return int(self._tokens_per_s * max(STEP_S, MAX_DECODES * self._round_s))


def _average(before: float, newest: float) -> float:
    if before == 0:
        return newest
    # One step during which the machine stood still must not count as if all were so.
    return before + _NEWEST * (min(newest, 2 * before) - before)
