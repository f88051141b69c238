"""`Executor`: where steps are computed. The engine knows only this protocol: a worker in this process, in others, or
a fake one in tests.

Next to read: `runtime/worker.py`.
"""

from collections.abc import Callable
from typing import Protocol

from quire.config import EngineConfig
from quire.errors import EngineDeadError
from quire.grammar.compiler import GrammarCompiler
from quire.runtime.worker import Worker
from quire.types import SchedulerOutput, StepResult
from quire.weights.checkpoint import Checkpoint
from quire.weights.progress import Progress


class Executor(Protocol):
    """Computes steps, one after another."""

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        """Compute one step. Blocks until its tokens are known.

        It may raise: the next step then has `forgets_all`, and takes up each request anew. An EngineDeadError says
        that no step will ever succeed again.
        """
        ...

    def watch(self, ends_step: Callable[[int], bool]) -> None:
        """From now on `ends_step` is asked between rounds, with the number computed, whether the step ends with these.

        Without, steps end at `max_rounds`, or with the round in which a request ends.
        """
        ...

    def shutdown(self) -> None:
        """Give back memory and processes. Steps after this are an error; a second call does nothing."""
        ...


class InProcessExecutor:
    """One worker in this process: the simplest executor, and the easiest to debug."""

    def __init__(self, worker: Worker) -> None:
        self._worker: Worker | None = worker

    @classmethod
    def create(
        cls, config: EngineConfig, checkpoint: Checkpoint, progress: Progress | None = None
    ) -> "InProcessExecutor":
        """Load the model and allocate its KV memory.

        Raises: ConfigError, ModelFileError, UnsupportedModelError.
        """
        return cls(Worker(config, checkpoint, progress))

    def use_grammars(self, grammars: GrammarCompiler) -> None:
        """From now on requests with `structured_outputs` can be computed; the tokenizer is needed for that."""
        assert self._worker is not None
        self._worker.sampler.grammars = grammars

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        """Compute one step. Raises EngineDeadError after `shutdown`."""
        if self._worker is None:
            raise EngineDeadError("the executor was shut down; build a new engine")
        return self._worker.execute_model(output)

    def watch(self, ends_step: Callable[[int], bool]) -> None:
        """See `Executor`."""
        assert self._worker is not None
        self._worker.runner.ends_step = ends_step

    def shutdown(self) -> None:
        """Let go of the worker, and with it of weights and KV memory."""
        self._worker = None
