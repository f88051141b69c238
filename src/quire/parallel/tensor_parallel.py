"""`RankExecutor`: the ranks of a model on one machine, rank 0 in this process and each other one in its own.

All ranks run the same steps; rank 0's results are the executor's. Rank 0 is of the last stage, which samples: the
stages before it compute further steps meanwhile, and are told the tokens with them. An exception while rank 0 samples
a request ends that request. Any other exception in a step ends all ranks, since they may no longer agree.
Next to read: `rank_processes.py` for the processes, `runtime/ranks.py` for the steps.
"""

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.errors import EngineDeadError
from quire.grammar.compiler import GrammarCompiler
from quire.parallel.executor import Executor, InProcessExecutor
from quire.parallel.rank_messages import Step
from quire.parallel.rank_processes import RankProcesses
from quire.runtime.ranks import Yielded, check_ranks
from quire.runtime.worker import Worker
from quire.types import SchedulerOutput, StepResult
from quire.weights.checkpoint import Checkpoint
from quire.weights.progress import Progress

if TYPE_CHECKING:
    from quire.parallel.ray_ranks import RayRanks


def create_executor(
    config: EngineConfig,
    checkpoint: Checkpoint,
    progress: Progress | None = None,
    grammars: GrammarCompiler | None = None,
) -> Executor:
    """Load the model, on as many ranks as the configuration says. Raises: as the `create` of the executor."""
    kind = InProcessExecutor if config.num_ranks == 1 else RankExecutor
    return kind.create(config, checkpoint, progress, grammars)


class RankExecutor(InProcessExecutor):
    """Rank 0 in this process, and the processes of the others."""

    def __init__(self, worker: Worker, processes: "RankProcesses | RayRanks") -> None:
        super().__init__(worker)
        self.max_in_flight = worker.config.options.pipeline_parallel_size
        self._processes = processes
        self._in_flight: deque[SchedulerOutput] = deque()
        self._yielded: list[Yielded] = []
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
            worker = Worker(config, checkpoint, progress, processes.links)
            processes.wait_until_loaded()
        except BaseException:
            processes.stop()
            raise
        worker.sampler.grammars = grammars
        return cls(worker, processes)

    def submit(self, output: SchedulerOutput) -> None:
        """See `Executor`. The stages before the last begin with it."""
        yielded, self._yielded = tuple(self._yielded), []
        self._in_flight.append(output)
        with contextlib.suppress(EngineDeadError):  # `collect` raises it
            self._processes.send(Step(replace(output, times_ops=False), yielded))

    def collect(self) -> StepResult:
        """See `Executor`. Raises: EngineDeadError if a rank is lost or fails, or after `shutdown`."""
        if self._worker is None:
            raise EngineDeadError("the executor was shut down; build a new engine")
        self._processes.check()
        runner = self._worker.runner
        output = self._in_flight.popleft()
        try:
            with _bound_to(self._processes.cpus):
                result = runner.run(output)
            if self.max_in_flight > 1:
                self._yielded.append((result.step_id, {item.request_id: item.token_ids for item in result.results}))
            return result
        except BaseException as error:
            reason = f"rank 0 failed with {type(error).__name__}: {error}"
            self._processes.fail(EngineDeadError(reason.removesuffix(": ")))
            if isinstance(error, Exception):
                self._processes.check()  # raises the first failure, of any rank
            raise
        finally:
            runner.ends_early = False

    def watch(self, tell: Callable[[EngineDeadError], None]) -> None:
        """Call `tell`, in any thread, when a rank is lost, also between steps; at once if one is lost already."""
        self._processes.watch(tell)

    def shutdown(self) -> None:
        """End the other ranks and let go of rank 0."""
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
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
