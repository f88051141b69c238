"""Contiguous, buddy and paged allocation of the KV cache: one pool and one workload, the same engine.

Next to read: `rig.py`.
"""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import not_

from quire.byte_sizes import format_bytes
from quire.cache_spec import PoolShape
from quire.config import EngineConfig, SchedulerConfig
from quire.errors import ConfigError, MemoryCapacityError
from quire.events import EventKind, EventLog
from quire.scheduler.blocks import BlockManager
from quire.scheduler.prefix_lookup import PrefixHit
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.transfers import Tier, Transfer
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
from quire_lessons.compare.rig import Clock, Rig, Run, Size, check_outputs_equal, checked, draw_prompt, given_jobs

# --- Contiguous and buddy allocation: a sequence owns one run of consecutive blocks ---------------
# An allocator chooses the length and the place of a run; `RunBlocks`, with `BlockManager`'s interface, takes it, and
# moves it when it must grow. The pool comes to an allocator as a byte per block, 1 if it is free.


class Contiguous:
    """Reserves the longest possible sequence for each request; first fit."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks

    def run_len(self, num_needed: int) -> int:
        """Return the blocks to reserve for a sequence that needs `num_needed`."""
        return self._max_blocks

    def find(self, free: bytes, length: int) -> int | None:
        """Return the index of the first block of a free run of `length` blocks, if there is one."""
        at = free.find(b"\1" * length)
        return None if at < 0 else at


class Buddy:
    """Reserves powers of two at multiples of their length, which split in two buddies and merge again.

    Of the free runs it takes the one whose surrounding free run is smallest, as a buddy system's free lists do.
    """

    def run_len(self, num_needed: int) -> int:
        """See `Contiguous`."""
        return 1 << (num_needed - 1).bit_length()

    def find(self, free: bytes, length: int) -> int | None:
        """See `Contiguous`."""
        wanted = b"\1" * length
        starts = [at for at in range(0, len(free) - length + 1, length) if free[at : at + length] == wanted]
        return min(starts, key=lambda at: self._surrounding(free, at, length), default=None)

    def _surrounding(self, free: bytes, at: int, length: int) -> int:
        """Length of the largest free run of a buddy system that contains this one."""
        while True:
            doubled = 2 * length
            start = at - at % doubled
            if start + doubled > len(free) or free[start : start + doubled] != b"\1" * doubled:
                return length
            length = doubled


RunAllocator = Contiguous | Buddy


class RunBlocks(BlockManager):
    """A `BlockManager` whose sequences own one run of consecutive blocks each.

    A table holds all reserved blocks. A run that must grow takes the free blocks behind it, or moves: the step copies
    it. Without prefix caching, forks and windows. Attributes: `num_moves`: runs that moved; `num_split`: times that a
    request found no run although enough blocks were free.
    """

    def __init__(self, config: SchedulerConfig, events: EventLog | None, allocator: RunAllocator) -> None:
        super().__init__(config, events)
        spec = config.kv_cache_groups[0].spec
        if len(config.kv_cache_groups) > 1 or spec.window is not None or spec.is_state or config.enable_prefix_caching:
            raise ConfigError("consecutive blocks need a model whose layers all keep every token, and no prefix cache")
        self.num_moves = self.num_split = 0
        self._spec, self._allocator, self._block_len, self._log = spec, allocator, config.block_size, events

    def check_fits(self, request: Request, num_tokens: int) -> None:
        """Raise MemoryCapacityError if the pool has fewer blocks than are reserved for `num_tokens`."""
        needed = self._run_len(num_tokens)
        if needed > self.pool.num_usable:
            raise MemoryCapacityError(
                f"request '{request.request_id}' reserves {needed} consecutive KV blocks, the cache has "
                f"{self.pool.num_usable}"
            )

    def num_missing(self, request: Request) -> int:
        """Blocks that the known tokens of an admitted request lack: none, they were reserved."""
        return 0

    def fits(self, request: Request, hit: PrefixHit, num_reserved: int) -> bool:
        """Return True if there is a run for all known tokens."""
        length = self._run_len(request.num_tokens)
        fits = self._allocator.find(self._free_map(), length) is not None
        self.num_split += not fits and length <= self.pool.num_free
        return fits

    def allocate(self, request: Request, num_tokens: int, num_drafts: int = 0) -> tuple[Transfer, ...] | None:
        """Make room for the next `num_tokens` tokens in one run; None, and nothing taken, if there is no such run."""
        owned = request.blocks
        table = owned.tables[0]
        num_known = max(request.num_tokens, request.num_computed_tokens + num_tokens)
        length = self._run_len(num_known)
        if self._spec.table_len(num_known, self._block_len) <= len(table):
            return ()
        free = self._free_map()
        if table and (table[0] - 1) % length == 0:
            behind = range(table[-1] + 1, table[0] + length)
            if free[table[-1] : table[-1] + len(behind)] == b"\1" * len(behind):
                self._extend(request, table, behind)
                return ()
        found = self._allocator.find(free, length)
        if found is None:
            self.num_split += length <= self.pool.num_free
            return None
        old_ids = tuple(table)
        table.clear()
        owned.changed_from[0] = 0
        self._extend(request, table, range(found + 1, found + length + 1))
        if not old_ids:
            return ()
        self.num_moves += 1
        for block_id in old_ids:
            self.pool.release(block_id, holds_prefix=False)
        return (Transfer(0, Tier.DEVICE, old_ids, Tier.DEVICE, tuple(table[: len(old_ids)])),)

    def _free_map(self) -> bytes:
        """Return a byte per usable block, 1 if it is free. Index i is block i + 1."""
        return bytes(map(not_, self.pool.reference_counts[1:]))

    def _run_len(self, num_tokens: int) -> int:
        return self._allocator.run_len(self._spec.table_len(num_tokens, self._block_len))

    def _extend(self, request: Request, table: list[int], block_ids: range) -> None:
        """Take free blocks for a table. Mutates: table."""
        owned = request.blocks
        for block_id in block_ids:
            self.pool.share(block_id)
        table.extend(block_ids)
        owned.is_changed = True
        if self._log is not None:
            self._log.record(EventKind.ALLOCATE, request.request_id, block_ids=tuple(block_ids))


# --- The comparison -------------------------------------------------------------------------------

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
