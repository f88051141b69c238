"""`Executor`: where steps are computed. The engine knows only this protocol: a worker in this process, in others, or
a fake one in tests.

Next to read: `runtime/worker.py`.
"""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from quire.adapter import Adapter
from quire.config import EngineConfig
from quire.errors import EngineDeadError
from quire.grammar.compiler import GrammarCompiler
from quire.runtime.worker import Worker
from quire.types import SchedulerOutput, StepResult
from quire.weights.checkpoint import Checkpoint
from quire.weights.model_files import Progress

logger = logging.getLogger("quire.parallel")


class Executor(Protocol):
    """Computes steps in the order of their submission.

    Everything that a worker needs comes at construction or in a `SchedulerOutput`: there are no callbacks.
    Attributes: `max_in_flight`: steps that may be submitted before the oldest one is collected.
    """

    max_in_flight: int

    def submit(self, output: SchedulerOutput) -> None:
        """Take a step. Never blocks on the model. A step with `forgets_all` replaces the steps not collected yet."""

    def collect(self) -> StepResult:
        """Return the result of the oldest step submitted; blocks until its tokens are known.

        It may raise: then that step and all steps submitted after it are lost, the next one has `forgets_all`, and
        takes up each request anew. An EngineDeadError says that no step will ever succeed again.
        """

    def read_adapters(self, wanted: Sequence[Adapter], wait_s: float) -> set[str]:
        """Read these adapters beside the steps, and no others; wait until one has been read, at most `wait_s`.

        Returns: digests of all adapters for which a step would not wait.
        """

    def end_step_early(self) -> None:
        """Ask the running step to end after its current decode iteration; may be called by any thread.

        The request is dropped when `collect` returns. A caller that takes its messages after `collect` misses none.
        """

    def shutdown(self) -> None:
        """Give back memory and processes. Steps after this are an error; a second call does nothing."""


def log_step(output: SchedulerOutput) -> None:
    """Write the debug line of a submitted step."""
    logger.debug(
        "step %d: %d requests, %d tokens, %d new, %d ended, %d preempted, %d transfers",
        output.step_id,
        len(output.scheduled),
        output.num_tokens,
        len(output.new_requests),
        len(output.finished_ids),
        len(output.preempted_ids),
        len(output.transfers),
    )


class InProcessExecutor:
    """A worker in this process: the simplest executor, and the easiest to debug."""

    def __init__(self, worker: Worker) -> None:
        self.max_in_flight = worker.runner.max_in_flight
        self._worker: Worker | None = worker
        self._launched: deque[Any] = deque()

    @classmethod
    def create(
        cls,
        config: EngineConfig,
        checkpoint: Checkpoint,
        progress: Progress | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> "InProcessExecutor":
        """Load the model and allocate its KV memory. `grammars`: for requests with `structured_outputs`.

        Raises: ConfigError, ModelFileError, UnsupportedModelError.
        """
        return cls(Worker(config, checkpoint, progress, grammars=grammars))

    @property
    def stored_blocks(self) -> set[tuple[int, bytes]]:
        """Cache group and digest of the blocks that the disk tier holds."""
        return set() if self._worker is None else self._worker.cache.stored_blocks

    def submit(self, output: SchedulerOutput) -> None:
        """See `Executor`. On a CPU the step is computed by `collect`."""
        log_step(output)
        if output.forgets_all:
            self._launched.clear()
        if self._worker is not None:
            self._launched.append(self._worker.runner.launch(output))

    def collect(self) -> StepResult:
        """See `Executor`. Raises EngineDeadError after `shutdown`."""
        if self._worker is None:
            raise EngineDeadError("the executor was shut down; build a new engine")
        try:
            return self._worker.runner.finish(self._launched.popleft())
        except BaseException:
            self._launched.clear()  # the steps behind a lost one are lost too
            raise

    def read_adapters(self, wanted: Sequence[Adapter], wait_s: float) -> set[str]:
        """See `Executor`."""
        adapters = None if self._worker is None else self._worker.adapters
        return set() if adapters is None else adapters.prepare(wanted, wait_s)

    def end_step_early(self) -> None:
        """See `Executor`."""
        if (worker := self._worker) is not None:
            worker.runner.end_early()

    def shutdown(self) -> None:
        """Let go of the worker, and with it of weights and KV memory."""
        if self._worker is not None:
            self._worker.cache.close()
        self._worker = None
