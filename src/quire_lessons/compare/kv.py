"""Contiguous, buddy and paged allocation of the KV cache: one pool and one workload, the same engine.

Next to read: `allocators.py`.
"""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from quire.byte_sizes import format_bytes
from quire.cache_spec import PoolShape
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.events import EventLog
from quire.scheduler.blocks import BlockManager
from quire.scheduler.scheduler import Scheduler
from quire_lessons.compare.allocators import Buddy, Contiguous, RunAllocator, RunBlocks
from quire_lessons.compare.memory import Size, checked
from quire_lessons.compare.results import (
    FAKE_MODEL,
    Chart,
    Comparison,
    Progress,
    RunSettings,
    Series,
    TimedRequest,
    thinned,
)
from quire_lessons.compare.rig import Clock, Rig, Run, check_outputs_equal, draw_prompt, given_jobs

BLOCK_SIZE = 16
POOL_BYTES = 256 << 20
"""Default pool for a context of `CONTEXT`; in proportion for others."""
CONTEXT = 2048
MEDIAN, SIGMA = math.exp(5.4) / CONTEXT, 0.7
"""Lognormal lengths: median as a share of the context, and the standard deviation of the logarithm."""


@dataclass(slots=True)
class KvUse:
    """The pool after each step. `reserved` and `used`: tokens; `unusable`: free tokens that the request which needs
    memory cannot use, because they are not in one run."""

    num_running: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    unusable: list[int] = field(default_factory=list)
    num_split: int = 0
    fullest: tuple[tuple[int, int, bool], ...] = ()
    """At the step with most tokens in use: first block, end, and whether it holds tokens, of each piece."""

    def observe(self, scheduler: Scheduler) -> None:
        """Record the pool after a step."""
        blocks = scheduler.blocks
        running = scheduler.requests.running
        self.num_running.append(len(running))
        self.reserved.append(sum(len(request.blocks.tables[0]) for request in running) * BLOCK_SIZE)
        self.used.append(sum(request.num_computed_tokens for request in running))
        num_split = blocks.num_split if isinstance(blocks, RunBlocks) else 0
        self.unusable.append(blocks.num_free * BLOCK_SIZE if num_split > self.num_split else 0)
        self.num_split = num_split
        if self.used[-1] > max(self.used[:-1], default=0):
            self.fullest = _merge(
                (block_id, at * BLOCK_SIZE < request.num_computed_tokens)
                for request in running
                for at, block_id in enumerate(request.blocks.tables[0])
            )


def compare(settings: RunSettings, progress: Progress) -> Comparison:
    """Run the workload with each allocator. Raises: ComparisonError, ConfigError, ModelError, CapacityError."""
    model = settings.model or FAKE_MODEL
    is_fake = model == FAKE_MODEL
    lengths = settings.lengths()
    settings.check_context("kv")
    longest = max(map(sum, lengths), default=CONTEXT if is_fake else 512)
    context = settings.context or max(BLOCK_SIZE, 1 << (longest - 1).bit_length())
    if context & (context - 1):
        raise ConfigError(f"context={context} is not a power of two, which the buddy allocator needs")
    num_requests = len(lengths) or settings.requests or (128 if is_fake else 24)
    pool_bytes = settings.pool_bytes or POOL_BYTES * context // CONTEXT
    size = Size("pool", pool_bytes, lambda num_bytes: {"kv_cache_memory_bytes": num_bytes})
    rig = Rig(
        settings,
        model,
        progress,
        size=size,
        max_num_seqs=256,
        max_model_len=context,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=max(2048, context),
    )
    config = rig.config.scheduler
    vocab_size = rig.config.model.vocab_size
    if lengths:
        jobs = given_jobs(settings.seed, lengths, settings.rate, vocab_size)
    else:
        jobs = workload(settings.seed, num_requests, settings.rate, context, vocab_size)
    modes: dict[str, RunAllocator | None] = {
        f"contiguous ({context})": Contiguous(context // BLOCK_SIZE),
        "buddy (power of two)": Buddy(),
        f"paged ({BLOCK_SIZE})": None,
    }
    runs, memories, managers = {}, {}, {}
    for mode, allocator in modes.items():
        runs[mode], memories[mode], managers[mode] = _drive(rig, mode, jobs, allocator)
    num_equal = check_outputs_equal(runs)
    block_bytes = PoolShape(config.kv_cache_groups, BLOCK_SIZE, 1).block_bytes
    pool_tokens = (config.num_blocks - 1) * BLOCK_SIZE
    totals = [len(job.prompt) + job.num_tokens for job in jobs]
    title = (
        f"pool of {format_bytes(pool_bytes)}: {pool_tokens} tokens in {config.num_blocks - 1} blocks of {BLOCK_SIZE}; "
        f"{num_requests} requests of {min(totals)} to {max(totals)} tokens, mean {sum(totals) / len(totals):.0f}"
    )
    shown = {
        "model": model,
        "seed": settings.seed,
        "requests": num_requests,
        "pool_bytes": pool_bytes,
        "block_bytes": block_bytes,
        "context": context,
        "rate": settings.rate,
        "unit": rig.unit,
    }
    columns = (
        ("allocator", "text"),
        ("most at once", ""),
        ("mean at once", "number"),
        ("reserved in use", "share"),
        ("internal waste", "share"),
        ("external waste", "share"),
        ("preempted", ""),
        ("moved", ""),
        ("makespan", rig.unit),
    )
    rows = tuple(_row(mode, runs[mode], memories[mode], managers[mode], pool_tokens) for mode in modes)
    explanation = tuple(_explain(mode, memories[mode], managers[mode], runs[mode]) for mode in modes)
    charts = _charts(memories, runs, rig.unit)
    return Comparison("kv", title, shown, columns, rows, explanation, charts, num_equal)


def workload(seed: int, num_requests: int, rate: float | None, context: int, vocab_size: int) -> list[TimedRequest]:
    """Requests of lognormal total length, half of it prompt; all there at once, or with Poisson arrivals.

    Raises: MemoryCapacityError.
    """

    def draw() -> Iterator[TimedRequest]:
        generator, arrival = random.Random(seed), 0.0
        for _ in range(num_requests):
            length = max(16, min(context, round(generator.lognormvariate(math.log(MEDIAN * context), SIGMA))))
            yield TimedRequest(draw_prompt(generator, length // 2, vocab_size), length - length // 2, arrival)
            if rate is not None:
                arrival += generator.expovariate(rate)

    return checked(draw())


def _drive(
    rig: Rig, mode: str, jobs: list[TimedRequest], allocator: RunAllocator | None
) -> tuple[Run, KvUse, BlockManager]:
    memory, managers = KvUse(), []

    def make_scheduler(config: EngineConfig, events: EventLog, clock: Clock) -> Scheduler:
        blocks = None if allocator is None else RunBlocks(config.scheduler, events, allocator)
        scheduler = Scheduler(config.scheduler, events, clock, blocks=blocks)
        managers.append(scheduler.blocks)
        return scheduler

    run = rig.drive(mode, jobs, make_scheduler, memory.observe)
    return run, memory, managers[0]


def _merge(cells: Iterable[tuple[int, bool]]) -> tuple[tuple[int, int, bool], ...]:
    """Join neighbouring blocks of one kind."""
    runs: list[tuple[int, int, bool]] = []
    for block_id, is_used in sorted(cells):
        if runs and runs[-1][1:] == (block_id, is_used):
            runs[-1] = (runs[-1][0], block_id + 1, is_used)
        else:
            runs.append((block_id, block_id + 1, is_used))
    return tuple(runs)


def _mean(values: Sequence[int], run: Run) -> float:
    """Mean over the steps in which a request waited; over all steps if none did."""
    chosen = [value for value, step in zip(values, run.steps, strict=True) if step.num_waiting] or values
    return sum(chosen) / len(chosen)


def _row(mode: str, run: Run, memory: KvUse, blocks: BlockManager, pool_tokens: int) -> tuple[object, ...]:
    reserved, used = _mean(memory.reserved, run), _mean(memory.used, run)
    return (
        mode,
        max(memory.num_running),
        _mean(memory.num_running, run),
        used / reserved if reserved else None,
        (reserved - used) / pool_tokens,
        _mean(memory.unusable, run) / pool_tokens,
        run.num_preemptions,
        blocks.num_moves if isinstance(blocks, RunBlocks) else 0,
        run.makespan,
    )


def _explain(mode: str, memory: KvUse, blocks: BlockManager, run: Run) -> str:
    reserved, used = _mean(memory.reserved, run), _mean(memory.used, run)
    waste = f"{reserved - used:.0f} of {reserved:.0f} reserved tokens held nothing on average"
    if not isinstance(blocks, RunBlocks):
        return f"{mode}: {waste}, the unfilled part of each request's last block; any free block serves any request."
    if mode.startswith("contiguous"):
        return f"{mode}: {waste}: each request reserves the longest sequence, whether it generates it or not."
    return (
        f"{mode}: {waste}: lengths are rounded up to a power of two; {blocks.num_moves} runs were copied to grow, and "
        f"{blocks.num_split} times a request found no run although enough blocks were free."
    )


def _charts(memories: dict[str, KvUse], runs: dict[str, Run], unit: str) -> tuple[Chart, ...]:
    lines = tuple(
        Series(
            mode, thinned((step.start, count) for step, count in zip(runs[mode].steps, memory.num_running, strict=True))
        )
        for mode, memory in memories.items()
    )
    pools = []
    for row, memory in enumerate(memories.values()):
        for is_used, shade in ((True, 1.0), (False, 0.3)):
            spans = tuple((float(at), float(end), float(row)) for at, end, used in memory.fullest if used is is_used)
            pools.append(Series("tokens" if is_used else "reserved, empty", spans, shade))
    names = ", ".join(memories)
    return (
        Chart("requests running", f"time ({unit})", "requests", "line", lines),
        Chart(f"the pool when fullest, from above: {names}", "block", "", "spans", tuple(pools)),
    )
