"""Ranks in threads of one process: they share memory, or a store of torch.distributed's, and start at once."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import torch
from torch.distributed import HashStore

from quire import _native
from quire.config import EngineConfig
from quire.grammar.compiler import GrammarCompiler
from quire.parallel.rank_messages import BlocksMoved, Step
from quire.parallel.rank_processes import Ranks
from quire.parallel.tensor_parallel import RankExecutor
from quire.runtime.links import Links, RankMemory
from quire.runtime.torch_group import TorchGroup
from quire.runtime.worker import Worker
from quire.types import StepResult
from quire.weights.checkpoint import Checkpoint


def exchanges(num_ranks: int, num_threads: int = 1, num_spins: int = 0) -> list[_native.Exchange]:
    """The views of all ranks. The memory is kept for the process's life: an `Exchange` does not hold it."""
    memory = RankMemory(1, num_ranks, num_threads)
    KEPT.append(memory)
    return [exchange for rank in range(num_ranks) if (exchange := memory.links(rank, num_spins).exchange)]


KEPT: list[Any] = []


def on_ranks(num_ranks: int, run: Callable[[int], Any]) -> list[Any]:
    """Call a function once per rank, each in a thread, at the same time."""
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


def groups(num_ranks: int, vocab_size: int, device: str = "cpu") -> list[TorchGroup]:
    """The ranks of a group, all on this device, which gloo connects."""
    store, place = HashStore(), torch.device(device)
    return on_ranks(num_ranks, lambda rank: TorchGroup(store, rank, num_ranks, place, vocab_size, uses_nccl=False))


class _Threads(Ranks):
    """Ranks 1 … N - 1 as threads, where `RankExecutor` has `RankProcesses`."""

    cpus: ClassVar[list[int]] = []

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, grammars: GrammarCompiler | None) -> None:
        super().__init__()
        self._memory = RankMemory.of(config)
        if config.uses_plan:
            self.links = [self._memory.links(rank, 0) for rank in range(config.num_ranks)]
        else:
            joined = groups(config.num_ranks, config.model.vocab_size, config.device)
            self.links = [Links(group=group) for group in joined]
        self.workers = [Worker(config, checkpoint, links=each, grammars=grammars) for each in self.links]
        self._pools = [ThreadPoolExecutor(1) for _ in self.workers[1:]]
        self.futures: deque[list[Future[StepResult]]] = deque()

    @property
    def stored_blocks(self) -> list[set[tuple[int, bytes]]]:
        return [worker.cache.stored_blocks for worker in self.workers[1:]]

    def send(self, step: Step) -> None:
        pairs = zip(self._pools, self.workers[1:], strict=True)
        self.futures.append([pool.submit(self._follow, worker, step) for pool, worker in pairs])

    def _follow(self, worker: Worker, step: Step) -> StepResult:
        result = worker.follow(step.output, step.yielded, step.wanted)
        if result.transfers is not None:
            self.note_moved(BlocksMoved(result.step_id, result.transfers))
        return result

    def _end_all(self) -> None:
        self._memory.give_up()

    def stop(self) -> None:
        self._end_all()
        for pool, worker in zip(self._pools, self.workers[1:], strict=True):
            pool.shutdown()
            worker.cache.close()


class ThreadRanks(RankExecutor):
    """An executor whose ranks are threads. Attributes: `results`: those of all ranks in the last step."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, grammars: GrammarCompiler | None = None) -> None:
        self._threads = _Threads(config, checkpoint, grammars)
        self.workers, self.links = self._threads.workers, self._threads.links
        self.results: list[StepResult] = []
        super().__init__(self.workers[0], self._threads)  # type: ignore[arg-type]

    def collect(self) -> StepResult:
        result = super().collect()
        self.results = [result, *(future.result() for future in self._threads.futures.popleft())]
        return result
