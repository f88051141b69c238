"""`RankExecutor`: the ranks of a model, rank 0 in this process and each other one in its own.

All ranks run the same steps; rank 0's results are the executor's. Rank 0 is of the last stage, which samples: the
stages before it compute further steps meanwhile, and are told the tokens with them. An exception while rank 0 samples
a request ends that request. Any other exception in a step ends all ranks, since they may no longer agree.
Next to read: `rank_processes.py` for the processes, `runtime/ranks.py` for the steps.
"""

import contextlib
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from quire.adapter import Adapter
from quire.config import EngineConfig
from quire.errors import EngineDeadError
from quire.grammar.compiler import GrammarCompiler
from quire.lazy_torch import OP_BY_OP, require_torch
from quire.linux import allowed_cpus, keep_to_cpus
from quire.parallel.executor import Executor, InProcessExecutor, log_step
from quire.parallel.rank_messages import BlocksMoved, Step
from quire.parallel.rank_processes import RankProcesses
from quire.runtime.cache_engine import WAIT_S
from quire.runtime.model_runner import ModelRunner
from quire.runtime.ranks import Yielded, check_ranks
from quire.runtime.worker import Worker
from quire.transfers import Tier, TransferReport
from quire.types import SchedulerOutput, StepResult
from quire.weights.checkpoint import Checkpoint
from quire.weights.model_files import Progress

if TYPE_CHECKING:
    from quire.parallel.ray_ranks import RayRanks


def create_executor(
    config: EngineConfig,
    checkpoint: Checkpoint,
    progress: Progress | None = None,
    grammars: GrammarCompiler | None = None,
) -> Executor:
    """Load the model, on as many ranks as the configuration says. Raises: as the `create` of the executor."""
    if not config.uses_plan:
        require_torch(OP_BY_OP)  # before ranks start, or the tokenizer is read
    kind = InProcessExecutor if config.num_ranks == 1 else RankExecutor
    return kind.create(config, checkpoint, progress, grammars)


@dataclass(slots=True)
class _Read:
    """A block that all ranks read from their disk tiers. `step_id`: of the step that began it."""

    step_id: int
    num_left: int
    is_whole: bool = True


class _Reads:
    """Reads from the disk tiers of all ranks: the scheduler is told of a block when each rank has ended its read.

    A block that any rank could not read has failed. So ranks never disagree on what a block holds.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._reads: dict[int, _Read] = {}

    def begin(self, output: SchedulerOutput) -> None:
        """Note the reads that a step begins."""
        if output.forgets_all:
            self._reads.clear()
        for item in output.transfers:
            if item.source_tier is Tier.DISK:
                self._reads |= {block_id: _Read(output.step_id, self._num_ranks) for block_id in item.target_ids}

    def merge(self, own: TransferReport, others: Iterable[BlocksMoved]) -> TransferReport:
        """Return the report of all ranks; `own` is rank 0's. Ranks copy from host memory within the step, so that rank
        0's copies tell of all."""
        filled = [block_id for block_id in own.filled if block_id not in self._reads]
        failed: list[int] = []
        reports = [own]
        self._note(own, sys.maxsize, filled, failed)
        for item in others:
            self._note(item.report, item.step_id, filled, failed)
            reports.append(item.report)
        num_read = sum(report.num_bytes_read for report in reports)
        num_written = sum(report.num_bytes_written for report in reports)
        return TransferReport(tuple(filled), tuple(failed), num_read, num_written, own.host_bytes_per_s)

    def _note(self, report: TransferReport, step_id: int, filled: list[int], failed: list[int]) -> None:
        """Take up what a rank reports at the end of a step. Mutates: filled, failed."""
        for block_id in (*report.filled, *report.failed):
            read = self._reads.get(block_id)
            if read is None or step_id < read.step_id:  # from host memory, or of a lost step
                continue
            read.num_left -= 1
            read.is_whole &= block_id not in report.failed
            if not read.num_left:
                del self._reads[block_id]
                (filled if read.is_whole else failed).append(block_id)


class RankExecutor(InProcessExecutor):
    """Rank 0 in this process, and the processes of the others."""

    def __init__(self, worker: Worker, processes: "RankProcesses | RayRanks") -> None:
        super().__init__(worker)
        self.max_in_flight = worker.config.options.pipeline_parallel_size
        self._processes = processes
        self._in_flight: deque[SchedulerOutput] = deque()
        self._yielded: list[Yielded] = []
        self._wanted: tuple[Adapter, ...] = ()
        self._reads = _Reads(worker.config.num_ranks)
        self._finalizer = weakref.finalize(self, processes.stop)

    @classmethod
    def create(
        cls,
        config: EngineConfig,
        checkpoint: Checkpoint,
        progress: Progress | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> "RankExecutor":
        """Load the model, each rank its share. `grammars`: for requests with `structured_outputs`.

        Raises: ConfigError naming sizes that fit if the model cannot be split so; ModelFileError,
        UnsupportedModelError; EngineDeadError if a rank's process ends.
        """
        check_ranks(config, checkpoint)
        processes = _start_ranks(config, checkpoint)
        try:
            worker = Worker(config, checkpoint, progress, processes.links, grammars)
            processes.wait_until_loaded()
        except BaseException:
            processes.stop()
            raise
        return cls(worker, processes)

    def submit(self, output: SchedulerOutput) -> None:
        """See `Executor`. The stages before the last begin with it."""
        log_step(output)
        yielded, self._yielded = tuple(self._yielded), []
        self._in_flight.append(output)
        self._reads.begin(output)
        with contextlib.suppress(EngineDeadError):  # `collect` raises it
            self._processes.send(Step(msgspec.structs.replace(output, times_ops=False), yielded, self._wanted))

    def read_adapters(self, wanted: Sequence[Adapter], wait_s: float) -> set[str]:
        """See `Executor`. The other ranks begin with the next step; a step waits for the last of them."""
        self._wanted = tuple(wanted)
        return super().read_adapters(wanted, wait_s)

    def collect(self) -> StepResult:
        """See `Executor`. Raises: EngineDeadError if a rank is lost or fails, or after `shutdown`."""
        if self._worker is None:
            raise EngineDeadError("the executor was shut down; build a new engine")
        self._processes.check()
        runner = self._worker.runner
        try:
            with _bound_to(self._processes.cpus):
                output, result = self._run_oldest(runner)
                while any(later.forgets_all for later in self._in_flight):  # the other ranks run lost steps too
                    output, result = self._run_oldest(runner)
            self._processes.check()
            if self._worker.cache.disk is None:
                return result
            own = result.transfers or TransferReport()
            waits = output.awaits_transfers and not (own.filled or own.failed)
            merged = self._reads.merge(own, self._processes.take_moved(WAIT_S if waits else 0.0))
            return msgspec.structs.replace(result, transfers=merged)
        except BaseException as error:
            if isinstance(error, EngineDeadError):
                self._processes.await_failure()
            reason = f"rank 0 failed with {type(error).__name__}: {error}"
            self._processes.fail(EngineDeadError(reason.removesuffix(": ")))
            if isinstance(error, Exception):
                self._processes.check()  # raises the first failure, of any rank
            raise

    def _run_oldest(self, runner: ModelRunner) -> tuple[SchedulerOutput, StepResult]:
        output = self._in_flight.popleft()
        result = runner.run(output)
        if self.max_in_flight > 1:
            self._yielded.append((result.step_id, {item.request_id: item.token_ids for item in result.results}))
        return output, result

    def watch(self, tell: Callable[[EngineDeadError], None]) -> None:
        """Call `tell`, in any thread, when a rank is lost, also between steps; at once if one is lost already."""
        self._processes.watch(tell)

    @property
    def stored_blocks(self) -> set[tuple[int, bytes]]:
        """Cache group and digest of the blocks that the disk tiers of all ranks hold."""
        return super().stored_blocks.intersection(*self._processes.stored_blocks)

    def shutdown(self) -> None:
        """End the other ranks and let go of rank 0."""
        self._processes.finish()
        super().shutdown()
        self._finalizer()


def _start_ranks(config: EngineConfig, checkpoint: Checkpoint) -> "RankProcesses | RayRanks":
    if config.options.distributed_executor_backend == "mp":
        return RankProcesses(config, checkpoint.files)
    from quire.parallel.ray_ranks import RayRanks

    return RayRanks(config, checkpoint.files)


@contextlib.contextmanager
def _bound_to(cpus: list[int]) -> Iterator[None]:
    """Keep the calling thread on these CPUs for the block; any, if there are none."""
    if not cpus:
        yield
        return
    before = allowed_cpus()
    keep_to_cpus(cpus)
    try:
        yield
    finally:
        keep_to_cpus(before)
