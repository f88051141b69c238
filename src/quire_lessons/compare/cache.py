"""No KV cache and KV cache: the same requests, and a scheduler that forgets before each step what was computed.

Without a cache the work grows with the square of the length. Up to `MAX_ROWS` rows every step runs; of longer
generations some steps run, and the others are interpolated. Next to read: `rig.py`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.errors import ComparisonError, ConfigError
from quire.scheduler.scheduler import Scheduler
from quire.types import SchedulerOutput
from quire_lessons.compare.results import Chart, Comparison, Progress, RunSettings, Series, TimedRequest, thinned
from quire_lessons.compare.rig import RecordedStep, Rig, Run, Size, check_outputs_equal, draw_prompt

PROMPT_LEN, CONTEXT = 16, 96
MAX_ROWS = 1 << 13
"""Most rows that the loop without a cache computes, and that sampled steps without a cache compute."""
NUM_ENDS = 8
"""Steps at the beginning and the end whose mean time is shown."""


class RecomputingScheduler(Scheduler):
    """Computes every token of a request again in each step, from position 0, as a loop without a KV cache does."""

    def schedule(self, alone: str | None = None, step_tokens: int = 0, tokens_per_s: float = 0.0) -> SchedulerOutput:
        """Take back all computed tokens, then decide the step. Blocks stay and are overwritten."""
        for request in self.requests.running:
            request.num_computed_tokens = 0
        return super().schedule(alone, step_tokens, tokens_per_s)


@dataclass(frozen=True, slots=True)
class Loop:
    """A generation in one mode: rows and attention pairs in all, seconds of each step, and how many of them ran."""

    num_rows: int
    num_pairs: int
    times: Sequence[float]
    num_measured: int

    @property
    def total(self) -> float:
        """Time of all steps."""
        return sum(self.times)

    @property
    def first(self) -> float:
        """Mean of the first decodes; of the only step if there is one."""
        return _mean(self.times[1 : 1 + NUM_ENDS] or self.times)

    @property
    def last(self) -> float:
        """Mean of the last steps."""
        return _mean(self.times[-NUM_ENDS:])


def compare(settings: RunSettings, progress: Progress) -> Comparison:
    """Generate with and without the cache. Raises: ComparisonError, ConfigError, ModelError, CapacityError."""
    model, num_requests = settings.model or "smollm2", settings.requests or 1
    prompt_len, output_lens = _lengths(settings)
    context = prompt_len + max(output_lens)

    def options(length: int) -> dict[str, int]:
        return {
            "max_model_len": length,
            "max_num_batched_tokens": length * num_requests,
            "num_blocks_override": num_requests * -(-length // 16) + 2,
        }

    size = Size("context", context, options)
    rig = Rig(settings, model, progress, size=size, max_num_seqs=num_requests, block_size=16)
    generator, vocab_size = random.Random(settings.seed), rig.config.model.vocab_size
    texts = [draw_prompt(generator, context, vocab_size) for _ in range(num_requests)]
    rig.drive("warm-up", [TimedRequest(text[:prompt_len], min(4, max(output_lens))) for text in texts])
    rows: list[tuple[object, ...]] = []
    loops: dict[str, Loop] = {}
    explanation: tuple[str, ...] = ()
    num_equal = 0
    for num_tokens in output_lens:
        is_whole = num_requests * sum(range(prompt_len, prompt_len + num_tokens)) <= MAX_ROWS
        run = _run_whole if is_whole else _run_samples
        naive, cached, equal = run(rig, texts, prompt_len, num_tokens)
        num_equal += equal
        loops = {"no KV cache": naive, "KV cache": cached}
        suffix = f", n = {num_tokens}" * (len(output_lens) > 1)
        for mode, loop in loops.items():
            rows.append(
                (
                    mode + suffix,
                    loop.num_rows,
                    loop.num_pairs,
                    loop.total,
                    loop.first,
                    loop.last,
                    num_requests * num_tokens / loop.total,
                )
            )
        explanation += _explain(naive, cached, prompt_len, num_tokens, num_requests, suffix)
    columns = (
        ("mode", "text"),
        ("tokens computed", ""),
        ("attention pairs", ""),
        ("total", rig.unit),
        ("first tokens", rig.unit),
        ("last tokens", rig.unit),
        (f"tokens/{rig.unit[:-1]}", "number"),
    )
    series = tuple(
        Series(mode, thinned((float(prompt_len + at), seconds) for at, seconds in enumerate(loop.times)))
        for mode, loop in loops.items()
    )
    shown = {"model": model, "seed": settings.seed, "requests": num_requests, "context": context, "unit": rig.unit}
    lengths = " or ".join(map(str, output_lens))
    title = f"requests: {num_requests}, each of {prompt_len} prompt and {lengths} generated tokens"
    chart = Chart("time of each step", "tokens in the sequence", rig.unit, "line", series)
    return Comparison("cache", title, shown, columns, tuple(rows), explanation, (chart,), num_equal)


def _lengths(settings: RunSettings) -> tuple[int, tuple[int, ...]]:
    """Return the prompt's length, and the generated tokens of each run. Raises: ConfigError."""
    if len(settings.prompt_lens) > 1:
        raise ConfigError(f"compare cache takes one prompt length, not {len(settings.prompt_lens)}")
    context = settings.context or CONTEXT
    prompt_len = settings.prompt_lens[0] if settings.prompt_lens else min(PROMPT_LEN, context // 2)
    if settings.output_lens:
        return prompt_len, tuple(dict.fromkeys(settings.output_lens))
    if prompt_len >= context:
        raise ConfigError(
            f"prompt_lens={prompt_len} leaves no token of context={context}: context={prompt_len + 1} fits"
        )
    return prompt_len, (context - prompt_len,)


def _run_whole(rig: Rig, texts: Sequence[tuple[int, ...]], prompt_len: int, num_tokens: int) -> tuple[Loop, Loop, int]:
    """Run every step in both modes. Returns: both, and the number of equal outputs. Raises: ComparisonError."""
    jobs = [TimedRequest(text[:prompt_len], num_tokens) for text in texts]
    naive = rig.drive(
        "naive", jobs, lambda config, events, clock: RecomputingScheduler(config.scheduler, events, clock)
    )
    cached = rig.drive("cached", jobs)
    num_equal = check_outputs_equal({"no KV cache": naive, "KV cache": cached})
    loops = [
        Loop(
            run.num_computed,
            sum(map(attention_pairs, run.steps)),
            [step.duration for step in run.steps],
            len(run.steps),
        )
        for run in (naive, cached)
    ]
    return loops[0], loops[1], num_equal


def _run_samples(
    rig: Rig, texts: Sequence[tuple[int, ...]], prompt_len: int, num_tokens: int
) -> tuple[Loop, Loop, int]:
    """Run the steps at some lengths in both modes, and interpolate the times of those between.

    A step's work depends on the length of the sequence alone, so the text before a sampled step is random.
    Returns: as `_run_whole`. Raises: ComparisonError.
    """
    lengths = np.arange(prompt_len, prompt_len + num_tokens)
    sampled = sample_lengths(prompt_len, num_tokens, len(texts))
    times = np.array([step_times(rig, [text[:length] for text in texts]) for length in sampled])
    (first, _), *_ = times
    naive, cached = (np.interp(lengths, sampled, column) for column in times.T)
    cached[0] = first  # the prompt itself is computed alike
    pairs = int((lengths * (lengths + 1) // 2).sum()), int(lengths[-1] * (lengths[-1] + 1) // 2)
    rows = int(lengths.sum()), int(lengths[-1])
    found = [
        Loop(len(texts) * rows[at], len(texts) * pairs[at], each.tolist(), len(sampled))
        for at, each in enumerate((naive, cached))
    ]
    return found[0], found[1], len(texts)


def sample_lengths(prompt_len: int, num_tokens: int, num_requests: int) -> list[int]:
    """Return lengths of the sequence at which steps run: evenly spread, both ends included, `MAX_ROWS` rows in all."""
    first, last = max(2, prompt_len), prompt_len + num_tokens - 1
    count = max(2, MAX_ROWS * 2 // (num_requests * (first + last)))
    return sorted({round(float(length)) for length in np.linspace(first, last, min(count, num_tokens))})


def step_times(rig: Rig, texts: Sequence[tuple[int, ...]]) -> tuple[float, float]:
    """Measure the step after these texts, which yields a token of each, without and with their KV cache.

    The last token of the texts is replaced by the model's own. Raises: ComparisonError if the tokens differ.
    """
    cached = rig.drive("cached", [TimedRequest(text[:-1], 2) for text in texts])
    whole = [(*text[:-1], output[0]) for text, output in zip(texts, cached.outputs, strict=True)]
    naive = rig.drive("naive", [TimedRequest(text, 1) for text in whole])
    for index, (with_cache, without) in enumerate(zip(cached.outputs, naive.outputs, strict=True)):
        if with_cache[1:] != without:
            raise ComparisonError(
                f"request {index} got different tokens behind {len(texts[0])} tokens: {with_cache[1]} with a KV cache, "
                f"{without[0]} without"
            )
    return _duration(naive), cached.steps[-1].duration


def attention_pairs(step: RecordedStep) -> int:
    """Pairs of a token and a token that it attends to, itself included, in one head of one layer."""
    return sum(
        item.num_tokens * item.num_computed_tokens + item.num_tokens * (item.num_tokens + 1) // 2
        for item in step.scheduled
    )


def _duration(run: Run) -> float:
    return sum(step.duration for step in run.steps)


def _mean(times: Sequence[float]) -> float:
    return sum(times) / len(times)


def _explain(
    naive: Loop, cached: Loop, prompt_len: int, num_tokens: int, num_requests: int, suffix: str
) -> tuple[str, ...]:
    growth = [loop.last / loop.first for loop in (naive, cached)]
    terms = [str(prompt_len + at) for at in range(num_tokens)]
    shown = " + ".join(terms if num_tokens <= 4 else [*terms[:2], "…", terms[-1]])
    sampled = (
        ""
        if naive.num_measured >= num_tokens
        else (
            f" Steps at {naive.num_measured} of {num_tokens} lengths were measured, and the times of the others are "
            "interpolated."
        )
    )
    return (
        f"no KV cache{suffix}: each step computes the whole sequence again, {shown} = "
        f"{naive.num_rows // num_requests} tokens per request; its last steps took "
        f"{growth[0]:.1f} times as long as its first.{sampled}",
        f"KV cache{suffix}: each token is computed once, {cached.num_rows // num_requests} per request: "
        f"{naive.num_rows / cached.num_rows:.1f} times fewer tokens and {naive.num_pairs / cached.num_pairs:.0f} times "
        f"fewer attention pairs; its last steps took {growth[1]:.1f} times as long as its first.",
    )
