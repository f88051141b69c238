"""Length of a step in which some requests decode and others compute prompts.

On a CPU the time of a step grows with its tokens. Next to read: `step_plan.py`, which asks `prefill_budget`.
"""

from quire.config import STEP_S

MIN_STEP_TOKENS = 12
"""Smallest token budget of a step while prefill is throttled: two groups of rows of a CPU's products, which take little
longer than one row."""
MAX_DECODES = 3.0
"""If decoding one token takes longer than a third of `STEP_S`, a step with prompts may take this many times as long."""
WAITING_WEIGHT = 8.0
"""Weight of a request that waits for its first token, beside one that decodes, in the length of steps with prompts."""
MAX_WAITING = 8.0
"""While many requests wait for their first token, a step with prompts may take this many times as long."""
_NEWEST = 0.2
"""Weight of the newest value in averages."""


def prefill_budget(step_tokens: int, num_decodes: int, num_prompts: int) -> int:
    """Return the prompt tokens of a step in which `num_decodes` requests decode; `num_prompts` await their first token.

    A longer step delays the next token of those that decode, a shorter one the first token of the others. So the
    budget, `step_tokens` less the decodes, grows with the number of others per decode. For a single prompt it does not
    grow: if long, it would delay decodes for many steps.
    """
    weight = WAITING_WEIGHT * (num_prompts - 1) / num_decodes
    return max(MIN_STEP_TOKENS, int(step_tokens * min(max(weight, 1), MAX_WAITING))) - num_decodes


def moving_average(before: float | None, newest: float) -> float:
    """Return the moving average of times or rates with a new value; None or 0: there is none yet."""
    if not before:
        return newest
    # One step during which the machine stood still must not count as if all were so.
    return before + _NEWEST * (min(newest, 2 * before) - before)


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
            self.tokens_per_s = moving_average(self.tokens_per_s, num_tokens / max(duration_s, 1e-6))
        else:
            self._iteration_s = moving_average(self._iteration_s, duration_s / num_iterations)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step that is not too long; 0 as long as no step with prompts was seen."""
        return int(self.tokens_per_s * max(STEP_S, MAX_DECODES * self._iteration_s))
