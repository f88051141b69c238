"""`TensorParallelExecutor`: the ranks of a model on one machine, rank 0 in this process and each other one in its own.

All ranks run the same steps; rank 0's results are the executor's. Any error of a step is the end of all ranks, since
they may no longer agree. Next to read: `rank_processes.py` for the processes, `runtime/ranks.py` for the steps.
"""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

from quire.config import EngineConfig
from quire.errors import EngineDeadError
from quire.grammar.compiler import GrammarCompiler
from quire.parallel.executor import Executor, InProcessExecutor
from quire.parallel.rank_processes import RankProcesses
from quire.runtime.ranks import check_ranks
from quire.runtime.worker import Worker
from quire.types import StepResult
from quire.weights.checkpoint import Checkpoint
from quire.weights.progress import Progress


def create_executor(
    config: EngineConfig,
    checkpoint: Checkpoint,
    progress: Progress | None = None,
    grammars: GrammarCompiler | None = None,
) -> Executor:
    """Load the model, on as many ranks as the configuration says. Raises: as the `create` of the executor."""
    kind = InProcessExecutor if config.options.tensor_parallel_size == 1 else TensorParallelExecutor
    return kind.create(config, checkpoint, progress, grammars)


class TensorParallelExecutor(InProcessExecutor):
    """Rank 0 in this process, and the processes of the others."""

    def __init__(self, worker: Worker, processes: RankProcesses) -> None:
        super().__init__(worker)
        self._processes = processes
        self._finalizer = weakref.finalize(self, processes.stop)

    @classmethod
    def create(
        cls,
        config: EngineConfig,
        checkpoint: Checkpoint,
        progress: Progress | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> "TensorParallelExecutor":
        """Load the model, each rank its share. `grammars`: for requests with `structured_outputs`.

        Raises: ConfigError naming sizes that fit if the model cannot be split so; ModelFileError,
        UnsupportedModelError; EngineDeadError if a rank's process ends.
        """
        check_ranks(config, checkpoint)
        processes = RankProcesses(config, checkpoint.files)
        try:
            worker = Worker(config, checkpoint, progress, processes.exchange)
            processes.wait_until_loaded()
        except BaseException:
            processes.stop()
            raise
        worker.sampler.grammars = grammars
        return cls(worker, processes)

    def collect(self) -> StepResult:
        """See `Executor`. Raises: EngineDeadError if a rank is lost or fails, or after `shutdown`."""
        if self._worker is None:
            raise EngineDeadError("the executor was shut down; build a new engine")
        output, self._submitted = self._submitted, None
        assert output is not None
        runner = self._worker.runner
        self._processes.send(replace(output, times_ops=False))
        try:
            with _bound_to(self._processes.cpus):
                return runner.run(output)
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
