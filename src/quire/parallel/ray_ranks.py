"""`RayRanks`: the stages before the last as actors of a Ray cluster; the last one is in the engine's process.

Steps travel as Ray's messages, hidden states by torch.distributed's gloo over TCP, between two calls of a stage's plan.
A stage is one rank: ranks that share a layer share memory, which nodes do not. Each node needs the same version of
Quire and the model's files at the same path. Ray ends actors whose driver has died.
Next to read: `rank_processes.py`, which has the same methods for processes of this machine.
"""

import contextlib
import datetime
import importlib
import os
import queue
import socket
import threading
import time
from collections import deque
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.config import EngineConfig
from quire.errors import ConfigError, EngineDeadError, EngineError, QuireError
from quire.parallel.frames import Failure
from quire.parallel.rank_messages import StartRank, Step
from quire.parallel.rank_processes import Ranks
from quire.runtime.links import RANK_LOST, Channel, Links, stage_of
from quire.weights.sources import ModelFiles

TIMEOUT = datetime.timedelta(minutes=5)
"""Longest wait for a stage to join, and for the values of a step."""
PING_S = 0.2
"""Pause between two looks at actors that compute nothing."""


class GlooChannel:
    """A channel to another process of the default process group (`runtime/links.py`)."""

    def __init__(self, peer: int, max_pending: int) -> None:
        """`peer`: its rank. `max_pending`: sends that need not have been received when another begins."""
        self._peer, self._max_pending = peer, max_pending
        self._pending: deque[tuple[Any, Any]] = deque()

    def send(self, rows: NDArray[np.float32]) -> None:
        """See `Channel`."""
        import torch

        with _lost_rank():
            while len(self._pending) >= self._max_pending:
                self._pending.popleft()[0].wait()
            values = torch.from_numpy(np.array(rows, np.float32, order="C"))  # the next step overwrites the rows
            self._pending.append((torch.distributed.isend(values, self._peer), values))

    def receive(self, rows: NDArray[np.float32]) -> None:
        """See `Channel`."""
        import torch

        values = torch.empty(rows.shape, dtype=torch.float32)
        with _lost_rank():
            torch.distributed.recv(values, self._peer)
        rows[...] = values.numpy()


@contextlib.contextmanager
def _lost_rank() -> Any:
    try:
        yield
    except RuntimeError as error:
        raise EngineDeadError(f"{RANK_LOST}: {error}") from error


def join(address: str, rank: int, num_stages: int) -> Links:
    """Join the process group, which waits for all stages, and return a rank's links. `address`: of rank 0."""
    import torch

    torch.distributed.init_process_group("gloo", address, timeout=TIMEOUT, rank=rank, world_size=num_stages)
    stage, _ = stage_of(rank, num_stages, 1)
    before: Channel | None = GlooChannel(stage, num_stages) if stage > 0 else None
    after: Channel | None = GlooChannel((stage + 2) % num_stages, num_stages) if stage < num_stages - 1 else None
    return Links(stage, num_stages, None, before, after)


class StageActor:
    """A stage in a process of Ray's. It returns failures, since Ray would pickle errors, and runs nothing after one."""

    _has_failed = False

    def load(self, start: bytes, address: str) -> bytes | None:
        """Load the stage of a `StartRank`. Returns a `Failure`, or None."""
        return self._try(self._load, msgspec.msgpack.decode(start, type=StartRank), address)

    def follow(self, step: bytes) -> bytes | None:
        """Run a `Step`. Returns a `Failure`, or None."""
        message = msgspec.msgpack.decode(step, type=Step)
        return self._try(self._worker.follow, message.output, message.yielded)

    def ping(self) -> None:
        """Return when earlier calls have: an error says that the actor is lost."""

    def _load(self, start: StartRank, address: str) -> None:
        from quire.runtime.worker import Worker

        links = join(address, start.rank, start.config.num_ranks)
        self._worker = Worker(start.config, start.open_checkpoint(), links=links)

    def _try(self, function: Any, *arguments: Any) -> bytes | None:
        if self._has_failed:
            return None
        try:
            function(*arguments)
        except Exception as error:
            self._has_failed = True
            if not isinstance(error, QuireError):
                error = EngineError(f"a stage failed with {type(error).__name__}: {error}")
            return msgspec.msgpack.encode(Failure.of(error))
        return None


class RayRanks(Ranks):
    """The actors of all stages but the last. Attributes: as `RankProcesses`."""

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        """Place the actors and start to load. Raises: ConfigError without `ray` or enough CPUs; EngineDeadError."""
        super().__init__()
        try:
            self._ray = ray = importlib.import_module("ray")
        except ImportError as error:
            raise ConfigError("--distributed-executor-backend ray needs Ray: pip install 'quire[ray]'") from error
        if not ray.is_initialized():
            # Without a cluster Ray starts one of this machine alone.
            address = "auto" if os.environ.get("RAY_ADDRESS") else None
            ray.init(address=address, logging_level="WARNING", log_to_driver=False)
        num_stages, num_cpus = config.num_ranks, config.threads_per_rank
        there = ray.cluster_resources().get("CPU", 0)
        if there < (num_stages - 1) * num_cpus:
            fits = 1 + int(there // num_cpus)
            raise ConfigError(
                f"{num_stages - 1} stages need {num_cpus} CPUs each, and the Ray cluster has {there:g}:"
                + (f" --pipeline-parallel-size {fits} fits" if fits > 1 else " more nodes, or OMP_NUM_THREADS=1")
            )
        self.cpus: list[int] = []
        kind = ray.remote(StageActor).options(num_cpus=num_cpus, scheduling_strategy="SPREAD")
        self._actors = [kind.remote() for _ in range(1, num_stages)]
        address, path = _free_address(ray.util.get_node_ip_address()), str(files.path.absolute())
        starts = [StartRank(rank, config, [], 0, path, files.kind, files.name) for rank in range(1, num_stages)]
        self._loading = [
            actor.load.remote(msgspec.msgpack.encode(start), address)
            for actor, start in zip(self._actors, starts, strict=True)
        ]
        self._steps: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            self.links = join(address, 0, num_stages)
        except Exception as error:
            self.stop()
            raise EngineDeadError(f"the stages could not be joined: {error}") from error

    def wait_until_loaded(self) -> None:
        """Raises: the error that loading raised in a stage; EngineDeadError if an actor ended."""
        for result in self._loading:
            if (failure := self._result(result)) is not None:
                raise failure
        threading.Thread(target=self._watch, name="quire-ray", daemon=True).start()

    def send(self, step: Step) -> None:
        """Send a step to all stages. Raises: EngineDeadError if one is lost."""
        self.check()
        data = msgspec.msgpack.encode(step)
        for actor in self._actors:
            self._steps.put(actor.follow.remote(data))

    def stop(self) -> None:
        """End the actors. A second call does nothing."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self._end_all()
        import torch

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _end_all(self) -> None:
        """See `Ranks`. A step that waits for values fails when their connection closes."""
        for actor in self._actors:
            self._ray.kill(actor)

    def _watch(self) -> None:
        """Notice failures of steps, and actors that end between steps."""
        pings = {actor.ping.remote(): actor for actor in self._actors}
        steps: list[Any] = []
        while not self._is_stopping and self._failure is None:
            while not self._steps.empty():
                steps.append(self._steps.get())
            waiting = [*steps, *pings]
            done, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=PING_S)
            for result in done:
                if (failure := self._result(result)) is not None:
                    if not self._is_stopping:
                        self.fail(failure)
                    return
                if (actor := pings.pop(result, None)) is not None:
                    pings[actor.ping.remote()] = actor
                else:
                    steps.remove(result)
            if len(done) == len(waiting):
                time.sleep(PING_S)

    def _result(self, result: Any) -> QuireError | None:
        try:
            failure = self._ray.get(result)
        except self._ray.exceptions.RayError as error:
            return EngineDeadError(f"a stage's actor was lost: {str(error).splitlines()[0]}")
        return None if failure is None else msgspec.msgpack.decode(failure, type=Failure).revive()


def _free_address(host: str) -> str:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"tcp://{host}:{probe.getsockname()[1]}"
