"""Static, dynamic and continuous batching: one workload, three rules of admission, the same engine.

`BatchTable` is the scheduler's own request table with another rule: requests join only when no batch runs, and when the
batch is full, no further request will come, or (dynamic) a timer has run out. Next to read: `kv.py`.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from quire.config import EngineConfig, SchedulerConfig
from quire.events import EventLog
from quire.scheduler.request_table import RequestTable
from quire.scheduler.scheduler import Scheduler
from quire_lessons.compare.results import (
    FAKE_MODEL,
    Chart,
    Comparison,
    Progress,
    RunSettings,
    Series,
    TimedRequest,
    cell_text,
    percentile,
)
from quire_lessons.compare.rig import Clock, Rig, Run, Size, check_outputs_equal, checked, draw_prompt, given_jobs

MEAN_PROMPT, MEAN_OUTPUT = 60 / 512, 80 / 512
"""Mean lengths before clipping, as shares of the context."""
LOAD = 2.0
"""Default rate of arrivals, as a share of what full slots generate: requests wait, so that empty slots are a loss."""
TIMER = 0.625
"""Dynamic batching: longest wait of a batch's oldest request, in steps per token of the mean output."""


class BatchTable(RequestTable):
    """Admits a batch when none runs: if it is full, or `more_come` is False, or its oldest request waited `timer`."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float], timer: float) -> None:
        super().__init__(config)
        self._slots = config.max_num_seqs
        self._clock = clock
        self._timer = timer
        self.more_come = True

    def starts_at(self) -> float:
        """Time at which the waiting requests start even if the batch is not full."""
        return min((request.arrival_time_s for request in self.waiting), default=math.inf) + self._timer

    def num_free_places(self) -> int:
        """Sequences that may start: all slots or none."""
        if self.running:
            return 0
        is_due = len(self.waiting) >= self._slots or not self.more_come or self._clock() >= self.starts_at()
        return self._slots if is_due else 0


def num_pads(counts: Sequence[int], num_rows: int = 0) -> int:
    """Tokens that a rectangular batch computes beside the real ones: rows x longest row - real tokens.

    counts: tokens per request of a step. num_rows: rows of the batch; those of ended requests are computed too.
    A prompt of 100 tokens in a batch of 8 with 7 decodes: (100 - 1) x (8 - 1) = 693.
    """
    return max(len(counts), num_rows) * max(counts, default=0) - sum(counts)


def compare(settings: RunSettings, progress: Progress) -> Comparison:
    """Run the workload in each mode. Raises: ComparisonError, ConfigError, ModelError, CapacityError."""
    model = settings.model or FAKE_MODEL
    is_fake = model == FAKE_MODEL
    lengths = settings.lengths()
    settings.check_context("batching")
    longest = settings.context or max(map(sum, lengths), default=512 if is_fake else 128)

    def options(length: int) -> dict[str, int]:
        return {
            "max_model_len": length,
            "max_num_batched_tokens": max(2048, settings.slots * length),
            "num_blocks_override": settings.slots * -(-length // 16) + 2,
        }

    size = Size("context", longest, options)
    rig = Rig(settings, model, progress, size=size, max_num_seqs=settings.slots, block_size=16)
    num_requests = len(lengths) or settings.requests or (256 if is_fake else 32)
    step = 1.0 if is_fake else _step_seconds(rig, settings.slots, longest)
    mean_steps = sum(tokens for _, tokens in lengths) / len(lengths) if lengths else MEAN_OUTPUT * longest
    rate = settings.rate or (math.inf if lengths else LOAD * settings.slots / mean_steps / step)
    timer = TIMER * mean_steps * step
    vocab_size = rig.config.model.vocab_size
    if lengths:
        jobs = given_jobs(settings.seed, lengths, rate, vocab_size)
    else:
        jobs = workload(settings.seed, num_requests, rate, longest, vocab_size)
    if is_fake:
        jobs = [replace(job, arrival=float(math.ceil(job.arrival))) for job in jobs]
    runs = {
        "static": _drive_batches(rig, "static", jobs, math.inf),
        f"dynamic ({timer:.3g})": _drive_batches(rig, "dynamic", jobs, timer),
        "continuous": rig.drive("continuous", jobs),
    }
    num_equal = check_outputs_equal(runs)
    shown = {
        "model": model,
        "seed": settings.seed,
        "requests": num_requests,
        "slots": settings.slots,
        "rate": None if rate == math.inf else rate,
        "timer": timer,
        "context": longest,
        "unit": rig.unit,
    }
    title = (
        f"{num_requests} requests, {sum(len(job.prompt) for job in jobs)} prompt and "
        f"{sum(job.num_tokens for job in jobs)} output tokens, "
        f"{'all there at once' if rate == math.inf else f'{rate:.3g} arrive per {rig.unit[:-1]}'}, "
        f"{settings.slots} slots"
    )
    columns = (
        ("mode", "text"),
        ("makespan", rig.unit),
        ("slot use", "share"),
        ("pads", ""),
        ("not pads", "share"),
        ("wait p50", rig.unit),
        ("wait p95", rig.unit),
        ("latency p95", rig.unit),
        (f"tokens/{rig.unit[:-1]}", "number"),
    )
    rows = tuple(_row(mode, run, jobs, settings.slots) for mode, run in runs.items())
    explanation = tuple(_explain(mode, run, jobs, settings.slots, rig.unit) for mode, run in runs.items())
    longest_run = max(max(run.ended) for run in runs.values())
    charts = tuple(_chart(mode, run, jobs, rig.unit, longest_run) for mode, run in runs.items())
    return Comparison("batching", title, shown, columns, rows, explanation, charts, num_equal)


def workload(seed: int, num_requests: int, rate: float, longest: int, vocab_size: int) -> list[TimedRequest]:
    """Poisson arrivals; prompts and outputs of exponential length, together at most `longest` tokens.

    Raises: MemoryCapacityError.
    """

    def draw() -> Iterator[TimedRequest]:
        generator, arrival = random.Random(seed), 0.0
        for _ in range(num_requests):
            prompt_len = max(4, min(longest // 2, round(generator.expovariate(1 / (MEAN_PROMPT * longest)))))
            num_tokens = max(4, min(longest // 2, round(generator.expovariate(1 / (MEAN_OUTPUT * longest)))))
            yield TimedRequest(draw_prompt(generator, prompt_len, vocab_size), num_tokens, arrival)
            arrival += generator.expovariate(rate)

    return checked(draw())


def _step_seconds(rig: Rig, slots: int, longest: int) -> float:
    """Measure a decode step of all slots. Touches the memory first, so that no mode pays for it."""
    run = rig.drive("warm-up", [TimedRequest(tuple(range(1, longest // 2)), 16)] * slots)
    return percentile([step.duration for step in run.steps[1:]], 0.5)


def _drive_batches(rig: Rig, mode: str, jobs: Sequence[TimedRequest], timer: float) -> Run:
    tables: list[BatchTable] = []

    def make_scheduler(config: EngineConfig, events: EventLog, clock: Clock) -> Scheduler:
        tables.append(BatchTable(config.scheduler, clock, timer))
        return Scheduler(config.scheduler, events, clock, requests=tables[0])

    def wakes_at(more_come: bool) -> float:
        tables[0].more_come = more_come
        return math.inf if tables[0].running else tables[0].starts_at()

    return rig.drive(mode, jobs, make_scheduler, wakes_at=wakes_at)


def _pads(run: Run, is_closed: bool) -> int:
    """Return the padding of a run in rectangular batches. `is_closed`: rows of ended requests stay until the end."""
    total = num_rows = 0
    for step in run.steps:
        if any(item.num_computed_tokens == 0 for item in step.scheduled) or not is_closed:
            num_rows = len(step.scheduled)
        total += num_pads([item.num_tokens for item in step.scheduled], num_rows) if step.scheduled else 0
    return total


def _row(mode: str, run: Run, jobs: Sequence[TimedRequest], slots: int) -> tuple[Any, ...]:
    waits = [start - job.arrival for start, job in zip(run.started, jobs, strict=True)]
    latencies = [end - job.arrival for end, job in zip(run.ended, jobs, strict=True)]
    slot_use = sum(len(step.scheduled) * step.duration for step in run.steps) / (slots * run.makespan)
    pads = _pads(run, is_closed=True) if mode != "continuous" else 0  # a ragged batch has none
    return (
        mode,
        run.makespan,
        slot_use,
        pads,
        run.num_computed / (run.num_computed + pads),
        percentile(waits, 0.5),
        percentile(waits, 0.95),
        percentile(latencies, 0.95),
        sum(job.num_tokens for job in jobs) / run.makespan,
    )


def _explain(mode: str, run: Run, jobs: Sequence[TimedRequest], slots: int, unit: str) -> str:
    """Say where the slot time went that computed no request."""
    needed = [step for step in run.steps if step.num_waiting]
    held = sum((slots - len(step.scheduled)) * step.duration for step in needed if step.scheduled)
    filling = sum(slots * step.duration for step in needed if not step.scheduled)
    mean_wait = sum(start - job.arrival for start, job in zip(run.started, jobs, strict=True)) / len(jobs)
    is_closed, total = mode != "continuous", slots * run.makespan
    reason = "because no request joins a running batch" if is_closed else "although requests join in any step"
    pads = _pads(run, is_closed)
    computed = f"{run.num_computed} tokens"
    padding = (
        f"its rectangular batches compute {pads} wasted pads beside {computed}"
        if is_closed
        else f"its ragged batches compute {computed} and no pad, where rectangular ones would add {pads}"
    )
    filled = f", and {filling / total:.0%} while a batch filled" if is_closed else ""
    return (
        f"{mode}: a request waited {cell_text(mean_wait, unit)}{' steps' * (unit == 'steps')} on average; "
        f"{held / total:.0%} of the slot time was empty "
        f"while requests waited, {reason}{filled}; {padding}."
    )


def _chart(mode: str, run: Run, jobs: Sequence[TimedRequest], unit: str, x_most: float) -> Chart:
    times = list(enumerate(zip(jobs, run.started, run.ended, strict=True)))
    waiting = tuple((job.arrival, start, float(row)) for row, (job, start, _) in times)
    running = tuple((start, end, float(row)) for row, (_, start, end) in times)
    series = (Series("waiting", waiting, 0.25), Series("running", running))
    return Chart(f"{mode}: one row per request", f"time ({unit})", "", "spans", series, x_most)
