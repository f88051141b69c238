"""Ranks in threads of one process: they share memory as processes do, and start at once."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from quire import _native
from quire.config import EngineConfig
from quire.grammar.compiler import GrammarCompiler
from quire.runtime.worker import Worker
from quire.types import SchedulerOutput, StepResult
from quire.weights.checkpoint import Checkpoint


def exchanges(num_ranks: int, num_threads: int = 1, num_spins: int = 0) -> list[_native.Exchange]:
    """The views of all ranks. The memory is kept for the process's life: an `Exchange` does not hold it."""
    memory = np.zeros(_native.exchange_bytes(num_ranks, num_threads) + 128, np.uint8)
    KEPT.append(memory)
    address = memory.ctypes.data + -memory.ctypes.data % 128
    return [_native.Exchange(address, rank, num_ranks, num_threads, num_spins) for rank in range(num_ranks)]


KEPT: list[Any] = []


def on_ranks(num_ranks: int, run: Callable[[int], Any]) -> list[Any]:
    """Call a function once per rank, each in a thread, at the same time."""
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


class ThreadRanks:
    """An executor whose ranks are threads. Attributes: `results`: those of all ranks in the last step."""

    max_in_flight = 1

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, grammars: GrammarCompiler | None = None) -> None:
        size = config.options.tensor_parallel_size
        views = exchanges(size, config.threads_per_rank)
        self.workers = [Worker(config, checkpoint, exchange=view) for view in views]
        self.workers[0].sampler.grammars = grammars
        self.results: list[StepResult] = []
        self._outputs: list[SchedulerOutput] = []

    def submit(self, output: SchedulerOutput) -> None:
        self._outputs.append(output)

    def collect(self) -> StepResult:
        output = self._outputs.pop()
        runners = [worker.runner for worker in self.workers]
        self.results = on_ranks(len(runners), lambda rank: runners[rank].run(output))
        return self.results[0]

    def end_step_early(self) -> None:
        self.workers[0].runner.ends_early = True

    def shutdown(self) -> None:
        self.workers.clear()
