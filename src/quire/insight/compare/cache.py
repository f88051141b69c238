"""No KV cache and KV cache: the same requests, and a scheduler that forgets before each step what was computed.

Next to read: `rig.py`.
"""

import random
from collections.abc import Sequence

from quire.insight.compare.results import Chart, Comparison, Progress, Series, Settings
from quire.insight.compare.rig import Job, Rig, Run, Step, check_outputs_equal, draw_prompt
from quire.scheduler.scheduler import Scheduler
from quire.types import SchedulerOutput

PROMPT_LEN = 16


class RecomputingScheduler(Scheduler):
    """Computes every token of a request again in each step, from position 0, as a loop without a KV cache does."""

    def schedule(self, alone: str | None = None, step_tokens: int = 0, tokens_per_s: float = 0.0) -> SchedulerOutput:
        """Take back all computed tokens, then decide the step. Blocks stay and are overwritten."""
        for request in self.requests.running:
            request.num_computed_tokens = 0
        return super().schedule(alone, step_tokens, tokens_per_s)


def compare(settings: Settings, progress: Progress) -> Comparison:
    """Generate with and without the cache. Raises: ComparisonError, ConfigError, ModelError, CapacityError."""
    model, context = settings.model or "smollm2", settings.context or 96
    num_requests = settings.requests or 1
    rig = Rig(
        settings, model, progress, max_num_seqs=num_requests, max_model_len=context, block_size=16,
        max_num_batched_tokens=context * num_requests, num_blocks_override=num_requests * -(-context // 16) + 2,
    )  # fmt: skip
    generator, vocab_size = random.Random(settings.seed), rig.config.model.vocab_size
    jobs = [Job(draw_prompt(generator, PROMPT_LEN, vocab_size), context - PROMPT_LEN) for _ in range(num_requests)]
    rig.drive("warm-up", [Job(job.prompt, 4) for job in jobs])
    runs = {
        "no KV cache": rig.drive(
            "naive", jobs, lambda config, events, clock: RecomputingScheduler(config.scheduler, events, clock)
        ),
        "KV cache": rig.drive("cached", jobs),
    }
    num_equal = check_outputs_equal(runs)
    columns = (
        ("mode", "text"), ("tokens computed", ""), ("attention pairs", ""), ("total", rig.unit),
        ("first tokens", rig.unit), ("last tokens", rig.unit), (f"tokens/{rig.unit[:-1]}", "number"),
    )  # fmt: skip
    num_tokens = sum(job.num_tokens for job in jobs)
    rows = tuple(
        (
            mode, run.num_computed, sum(map(attention_pairs, run.steps)), run.makespan, _mean_step(run.steps[1:9]),
            _mean_step(run.steps[-8:]), num_tokens / run.makespan,
        )
        for mode, run in runs.items()
    )  # fmt: skip
    series = tuple(
        Series(mode, tuple((float(PROMPT_LEN + at), step.duration) for at, step in enumerate(run.steps)))
        for mode, run in runs.items()
    )
    shown = {"model": model, "seed": settings.seed, "requests": num_requests, "context": context, "unit": rig.unit}
    title = f"requests: {num_requests}, each of {PROMPT_LEN} prompt and {context - PROMPT_LEN} generated tokens"
    chart = Chart("time of each step", "tokens in the sequence", rig.unit, "line", series)
    explanation = _explain(runs["no KV cache"], runs["KV cache"], context, num_requests)
    return Comparison("cache", title, shown, columns, rows, explanation, (chart,), num_equal)


def attention_pairs(step: Step) -> int:
    """Pairs of a token and a token that it attends to, itself included, in one head of one layer."""
    return sum(
        item.num_tokens * item.num_computed_tokens + item.num_tokens * (item.num_tokens + 1) // 2
        for item in step.scheduled
    )


def _mean_step(steps: Sequence[Step]) -> float:
    return sum(step.duration for step in steps) / len(steps)


def _explain(naive: Run, cached: Run, context: int, num_requests: int) -> tuple[str, ...]:
    pairs = [sum(map(attention_pairs, run.steps)) for run in (naive, cached)]
    growth = [_mean_step(run.steps[-8:]) / _mean_step(run.steps[1:9]) for run in (naive, cached)]
    return (
        f"no KV cache: each step computes the whole sequence again, {PROMPT_LEN} + {PROMPT_LEN + 1} + … + "
        f"{context - 1} = {naive.num_computed // num_requests} tokens per request; its last steps took "
        f"{growth[0]:.1f} times as long as its first.",
        f"KV cache: each token is computed once, {cached.num_computed // num_requests} per request: "
        f"{naive.num_computed / cached.num_computed:.0f} times fewer tokens and {pairs[0] / pairs[1]:.0f} times fewer "
        f"attention pairs; its last steps took {growth[1]:.1f} times as long as its first.",
    )
