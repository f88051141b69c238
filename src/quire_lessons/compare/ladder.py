"""The same workload with one technique more at a time: naive recomputation, KV cache, batching, paging, … 4 bits.

Each rung adds one thing to the rung before it. The rungs up to prefix sharing run op by op in PyTorch, so that the gain
of native kernels is a rung of its own; without PyTorch they run with native kernels, and that rung is left out. Drafts
help with text that repeats, so the last rung compares them on such a text. The time is bounded: see `LIMIT_S`.
Next to read: `rig.py`; `batching.py` and `kv.py`, whose rules are the lower rungs; `speculation.py`.
"""

import importlib.util
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quire.config import EngineConfig
from quire.errors import CapacityError, ConfigError, RequestError, UnsupportedModelError
from quire.events import EventLog
from quire.scheduler.scheduler import Scheduler
from quire_lessons.compare.batching import BatchTable
from quire_lessons.compare.cache import sample_lengths, step_times
from quire_lessons.compare.kv import Contiguous, RunBlocks
from quire_lessons.compare.results import FAKE_MODEL, Chart, Comparison, Progress, RunSettings, Series, TimedRequest
from quire_lessons.compare.rig import Clock, Rig, Run, draw_prompt
from quire_lessons.compare.speculation import Record, load_engines, measure

BLOCK_SIZE = 16
NUM_REQUESTS = 8
SHARED_LEN = 64
"""Tokens with which all prompts begin, as those of one application do."""
OWN_LEN, LONG_LEN, LONG_PERIOD = 24, 160, 4
"""Mean length of what follows, length of a long one, and how many prompts there are to one that is long."""
MEAN_OUTPUT, MAX_OUTPUT = 10, 24
MAX_SLOTS = 4
"""Longest sequences that the pool holds."""
CHUNK = 64
NUM_SAMPLES = 4
"""Lengths at which a step of the naive loop is measured."""
LIMIT_S, NUM_SCHEDULES = 150.0, 6
"""Most seconds that the rungs with a KV cache may take op by op, by an estimate, and their number. Requests beyond it
are left out, if the workload was not given. All rungs together took 218 s on 2 busy cores, with 5 of 8 requests."""
DRAFTED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Rung:
    """A technique with its figures. `run` is None where steps were sampled, or where another program ran."""

    name: str
    seconds: float
    run: Run | None
    explanation: str


def compare(settings: RunSettings, progress: Progress) -> Comparison:
    """Climb the ladder. Raises: ConfigError, ModelError, CapacityError; ComparisonError if sampled tokens differ."""
    if settings.model == FAKE_MODEL:
        raise ConfigError("compare ladder measures real work: model='fake' has none")
    model = settings.model or "smollm2"
    longest = max(len(job.prompt) + job.num_tokens for job in workload(settings, 2))
    jobs: list[TimedRequest] = []
    rungs: list[Rung] = []
    has_torch = importlib.util.find_spec("torch") is not None
    notes = [] if has_torch else ["PyTorch is not installed: all rungs run with native kernels."]
    for kernels in ("op by op", "native", "4 bits") if has_torch else ("native", "4 bits"):
        rig = _make_rig(settings, model, progress, longest, kernels)
        jobs = jobs or workload(settings, rig.config.model.vocab_size)
        rig.drive("warm-up", [replace(job, num_tokens=2) for job in jobs[:2]])
        if not rungs:
            samples = _sample_steps(rig, jobs)
            fit = len(jobs) if settings.requests or settings.lengths() else samples.num_that_fit(jobs)
            if fit < len(jobs):
                notes.append(
                    f"{fit} of {len(jobs)} requests ran: here the lower rungs would take more than "
                    f"{LIMIT_S:.0f} s for all of them."
                )
            jobs = jobs[:fit]
            rungs += _schedules(rig, jobs, longest, samples)
        else:
            rungs.append(_kernels(rig, jobs, kernels))
        del rig
    beside = _transformers(model, jobs) if has_torch else None
    drafts = _drafts(settings, model, progress)
    return _result(settings, model, jobs, rungs, drafts, beside, notes)


def workload(settings: RunSettings, vocab_size: int) -> list[TimedRequest]:
    """Prompts with a common beginning and an own end, some of them long; outputs of exponential length. All at once."""
    tokens = random.Random(settings.seed)
    shared = draw_prompt(tokens, SHARED_LEN, vocab_size)
    return [
        TimedRequest(
            (shared[: prompt_len * 4 // 5] + draw_prompt(tokens, prompt_len, vocab_size))[:prompt_len], num_tokens
        )
        for prompt_len, num_tokens in settings.lengths() or _draw_lengths(settings)
    ]


def _draw_lengths(settings: RunSettings) -> list[tuple[int, int]]:
    """Return prompt and output tokens of each request; they do not depend on the vocabulary."""
    generator, lengths = random.Random(settings.seed), []
    for index in range(settings.requests or NUM_REQUESTS):
        is_long = index % LONG_PERIOD == LONG_PERIOD - 1
        own = LONG_LEN if is_long else round(generator.uniform(0.75, 1.25) * OWN_LEN)
        num_tokens = max(4, min(MAX_OUTPUT, round(generator.expovariate(1 / MEAN_OUTPUT))))
        lengths.append((SHARED_LEN + own, num_tokens))
    return lengths


def _make_rig(settings: RunSettings, model: str, progress: Progress, longest: int, kernels: str) -> Rig:
    options: dict[str, Any] = {"quantization": "int4"}
    if kernels != "4 bits":
        options = {"dtype": "float32", "weight_cache": "off", "enforce_eager": kernels == "op by op"}

    def report(stage: str, done: int, total: int) -> None:
        progress(f"{stage} ({kernels})", done, total)

    return Rig(
        settings,
        model,
        report,
        device="cpu",
        max_num_seqs=settings.requests or NUM_REQUESTS,
        max_model_len=longest,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=max(longest, 512),
        num_blocks_override=MAX_SLOTS * -(-longest // BLOCK_SIZE) + 1,
        **options,
    )


def _schedules(rig: Rig, jobs: Sequence[TimedRequest], longest: int, samples: "_Samples") -> list[Rung]:
    """Run the rungs that differ in scheduling and memory alone, on one executor."""
    max_blocks = -(-longest // BLOCK_SIZE)

    def drive(name: str, changes: dict[str, Any], *, is_static: bool = False, is_contiguous: bool = False) -> Run:
        def make(config: EngineConfig, events: EventLog, clock: Clock) -> Scheduler:
            chosen = replace(config.scheduler, **changes)
            table = BatchTable(chosen, clock, math.inf) if is_static else None
            blocks = RunBlocks(chosen, events, Contiguous(max_blocks)) if is_contiguous else None
            if table is not None:
                table.more_come = False
            return Scheduler(chosen, events, clock, requests=table, blocks=blocks)

        return rig.drive(name, jobs, make)

    whole: dict[str, Any] = {"enable_chunked_prefill": False}
    slots, chunked = whole | {"max_num_seqs": MAX_SLOTS}, {"max_num_batched_tokens": CHUNK}
    runs = {
        "KV cache": drive("KV cache", whole | {"max_num_seqs": 1}),
        "static batch": drive("static batch", slots, is_static=True, is_contiguous=True),
        "continuous batch": drive("continuous batch", slots, is_contiguous=True),
        "paged memory": drive("paged memory", whole),
        "chunked prefill": drive("chunked prefill", chunked),
        "prefix sharing": drive("prefix sharing", chunked | {"enable_prefix_caching": True}),
    }
    first = runs["KV cache"].num_computed
    reasons = {
        "KV cache": f"each token is computed once, {first} in all",
        "static batch": f"up to {MAX_SLOTS} requests share a step, as many as have room for {longest} tokens each; the "
        "batch ends with its longest member",
        "continuous batch": "a request that ends makes room for the next one in the same step",
        "paged memory": f"blocks of {BLOCK_SIZE} tokens in place of reservations: "
        f"{_most_at_once(runs['paged memory'])} requests fit in the same memory",
        "chunked prefill": f"a step has at most {CHUNK} tokens, so that decodes do not wait for long prompts: it "
        "shortens pauses, not the whole",
        "prefix sharing": f"{runs['prefix sharing'].num_computed} tokens are computed in place of {first}: the common "
        "beginning of the prompts once",
    }
    naive = Rung(
        "naive recomputation",
        sum(map(samples.naive_s, jobs)),
        None,
        "each step computes the whole sequence again, one request after the other; steps at "
        f"{len(samples.lengths)} lengths were measured, the others are interpolated",
    )
    return [naive, *(Rung(name, run.makespan, run, reasons[name]) for name, run in runs.items())]


def _kernels(rig: Rig, jobs: Sequence[TimedRequest], kernels: str) -> Rung:
    """Run the topmost schedule with other kernels or weights."""
    run = rig.drive(
        kernels,
        jobs,
        lambda config, events, clock: Scheduler(
            replace(config.scheduler, max_num_batched_tokens=CHUNK, enable_prefix_caching=True), events, clock
        ),
    )
    if kernels == "native":
        reason = "the layers of a step are one native call in place of PyTorch's operations; the weights stay in fp32"
    else:
        reason = "a decode reads 5 bits per weight in place of 32, and multiplies in int8: other tokens may follow"
    return Rung("native kernels" if kernels == "native" else kernels, run.makespan, run, reason)


@dataclass(frozen=True, slots=True)
class _Samples:
    """Seconds of steps at some lengths of a sequence: of all its tokens, and of the last one behind a KV cache."""

    lengths: list[int]
    naive: list[float]
    cached: list[float]

    def naive_s(self, job: TimedRequest) -> float:
        """Return the time of a request alone, without a KV cache."""
        steps = np.arange(len(job.prompt), len(job.prompt) + job.num_tokens)
        return float(np.interp(steps, self.lengths, self.naive).sum())

    def num_that_fit(self, jobs: Sequence[TimedRequest]) -> int:
        """Return how many of the first requests all rungs with a KV cache serve within `LIMIT_S`; 2 at least."""
        prompts = np.interp([len(job.prompt) for job in jobs], self.lengths, self.naive)
        decodes = np.array([job.num_tokens for job in jobs]) * max(self.cached)
        return max(2, int((np.cumsum(prompts + decodes) * NUM_SCHEDULES <= LIMIT_S).sum()))


def _sample_steps(rig: Rig, jobs: Sequence[TimedRequest]) -> _Samples:
    """Measure steps at some lengths between the shortest prompt and the longest sequence."""
    first = min(len(job.prompt) for job in jobs)
    last = max(len(job.prompt) + job.num_tokens for job in jobs)
    text = draw_prompt(random.Random(1), last, rig.config.model.vocab_size)
    lengths = sample_lengths(first, last - first, 1)
    lengths = sorted({lengths[round(at)] for at in np.linspace(0, len(lengths) - 1, NUM_SAMPLES)})
    naive, cached = zip(*(step_times(rig, [text[:length]]) for length in lengths), strict=True)
    return _Samples(lengths, [*naive], [*cached])


def _drafts(settings: RunSettings, model: str, progress: Progress) -> dict[str, Record] | str:
    """Compare drafts with none on a text that repeats, weights as stored.

    Returns: the records by mode, or why there are none. Raises: ComparisonError if outputs differ.
    """
    alone = RunSettings(seed=settings.seed)
    try:
        engines = load_engines(model, alone, progress, device="cpu")
    except (ConfigError, CapacityError) as error:
        return f"drafts: not compared: {error.message}"
    try:
        return measure(engines, "edit", alone, DRAFTED_TOKENS, progress)
    except RequestError as error:
        return f"drafts: not compared: {error.message}"
    finally:
        for engine in engines.values():
            engine.shutdown()


def _transformers(model: str, jobs: Sequence[TimedRequest]) -> tuple[float, str] | str | None:
    """Time `generate` of Transformers in padded batches. Returns: seconds and a sentence, or why there are none.

    None where Transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    from quire.insight.reference import load_reference
    from quire.lazy_torch import torch
    from quire.weights.sources import resolve_source

    try:
        reference = load_reference(resolve_source(model).path)
    except (ConfigError, UnsupportedModelError) as error:
        return f"Transformers' generate is not beside it: {error.message}"
    seconds = 0.0
    for start in range(0, len(jobs), MAX_SLOTS):
        batch = jobs[start : start + MAX_SLOTS]
        width, num_tokens = max(len(job.prompt) for job in batch), max(job.num_tokens for job in batch)
        ids = torch.tensor([[0] * (width - len(job.prompt)) + list(job.prompt) for job in batch])
        mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in batch])
        started = time.perf_counter()
        reference.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            pad_token_id=0,
        )
        seconds += time.perf_counter() - started
    return seconds, f"`generate` in float32, padded batches of {MAX_SLOTS}, each as long as its longest member"


def _result(
    settings: RunSettings,
    model: str,
    jobs: Sequence[TimedRequest],
    rungs: Sequence[Rung],
    drafts: dict[str, Record] | str,
    beside: tuple[float, str] | str | None,
    notes: Sequence[str],
) -> Comparison:
    num_tokens, num_prompt = sum(job.num_tokens for job in jobs), sum(len(job.prompt) for job in jobs)
    rows: list[tuple[Any, ...]] = []
    expected = next(rung.run for rung in rungs if rung.run is not None).outputs
    for before, rung in zip((None, *rungs), rungs, strict=False):
        factor = None if before is None else before.seconds / rung.seconds
        product, rate = rungs[0].seconds / rung.seconds, num_tokens / rung.seconds
        if rung.run is None:
            rows.append((rung.name, rate, factor, product, 1, None, None))
        else:
            equal = sum(map(tuple.__eq__, expected, rung.run.outputs))
            rows.append((rung.name, rate, factor, product, _most_at_once(rung.run), longest_pause(rung.run), equal))
    explanation = [f"{rung.name}: {rung.explanation}." for rung in rungs]
    if isinstance(drafts, str):
        explanation.append(drafts)
    else:
        off, on = drafts["off"].rate, drafts["drafts"].rate
        rows.append(("drafts", on, on / off, None, 1, None, None))
        explanation.append(_explain_drafts(drafts, rungs[0].seconds / rungs[-1].seconds))
    if isinstance(beside, tuple):
        seconds, reason = beside
        rows.append(("Transformers", num_tokens / seconds, None, rungs[0].seconds / seconds, MAX_SLOTS, None, None))
        explanation.append(f"Transformers: {reason}.")
    elif beside is not None:
        explanation.append(beside)
    columns = (
        ("rung", "text"),
        ("tokens/s", "number"),
        ("factor", "times"),
        ("product", "times"),
        ("most at once", ""),
        ("longest pause", "seconds"),
        ("outputs as rung 2", ""),
    )
    same = [row for row in rows if row[3] is not None]  # drafts have another text
    chart = Chart(
        "output tokens per second",
        "number",
        "",
        "bars",
        tuple(Series(str(row[0]), ((0.0, float(row[1]), float(at)),)) for at, row in enumerate(same)),
    )
    shown = {"model": model, "seed": settings.seed, "requests": len(jobs), "chunk": CHUNK, "slots": MAX_SLOTS}
    title = f"{len(jobs)} requests, {num_prompt} prompt and {num_tokens} output tokens, all there at once"
    return Comparison("ladder", title, shown, columns, tuple(rows), (*explanation, *notes), (chart,))


def _explain_drafts(drafts: Mapping[str, Record], product: float) -> str:
    off, on = drafts["off"], drafts["drafts"]
    num_verified, num_right = (sum(draft[at] for draft in on.drafts) for at in (0, 1))
    return (
        "drafts: on another text, which repeats, weights as stored: one request that writes a source file again, "
        f"{off.rate:.3g} tokens/s without them and {on.rate:.3g} with them, the same tokens. {num_right} of "
        f"{num_verified} draft tokens were right. For such texts all factors together are "
        f"{product * on.rate / off.rate:.3g}×."
    )


def longest_pause(run: Run) -> float:
    """Return the longest time between two tokens of one request."""
    last: dict[str, float] = {}
    longest = 0.0
    for step in run.steps:
        end = step.start + step.duration
        for item in step.scheduled:
            if item.max_new_tokens:
                longest = max(longest, end - last.get(item.request_id, end))
                last[item.request_id] = end
    return longest


def _most_at_once(run: Run) -> int:
    """Return the most requests of one step."""
    return max(len(step.scheduled) for step in run.steps)
