"""`RayRanks`: the stages before the last as actors of a Ray cluster; the last one is in the engine's process.

Steps travel as Ray's messages, hidden states by torch.distributed's gloo over TCP, between two calls of a stage's plan.
The ranks of a stage are on one node, where they share memory: two sums per layer over a network would take longer than
the layer. Those of the last stage are beside the engine. Each node needs the same version of Quire and the model's
files at the same path. Ray ends actors whose driver has died.
Next to read: `rank_processes.py`, which has the same methods for processes of this machine.
"""

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
from quire.extras import install_command
from quire.lazy_torch import require_torch
from quire.parallel.frames import SentError
from quire.parallel.rank_messages import StartRank, Step
from quire.parallel.rank_processes import Ranks
from quire.runtime.links import TIMEOUT, Channel, Links, RankMemory, lost_rank, spins_of, stage_of
from quire.weights.sources import ModelFiles

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

        with lost_rank():
            while len(self._pending) >= self._max_pending:
                self._pending.popleft()[0].wait()
            values = torch.from_numpy(np.array(rows, np.float32, order="C"))  # the next step overwrites the rows
            self._pending.append((torch.distributed.isend(values, self._peer), values))

    def receive(self, rows: NDArray[np.float32]) -> None:
        """See `Channel`."""
        import torch

        values = torch.empty(rows.shape, dtype=torch.float32)
        with lost_rank():
            torch.distributed.recv(values, self._peer)
        rows[...] = values.numpy()


def join(address: str, rank: int, config: EngineConfig, memory: RankMemory | None, num_spins: int) -> Links:
    """Join the process group, which waits for all ranks, and return a rank's links.

    `address`: of rank 0. `memory`: of the rank's stage; None if it has no other rank.
    """
    import torch

    num_stages, group_size = config.options.pipeline_parallel_size, config.options.tensor_parallel_size
    torch.distributed.init_process_group("gloo", address, timeout=TIMEOUT, rank=rank, world_size=config.num_ranks)
    stage, place = stage_of(rank, num_stages, group_size)

    def channel(other: int) -> Channel | None:
        peer = (other + 1) % num_stages * group_size + place
        return GlooChannel(peer, num_stages) if 0 <= other < num_stages else None

    exchange = None if memory is None else memory.links(place, num_spins).exchange
    return Links(stage, num_stages, exchange, channel(stage - 1), channel(stage + 1))


class RankActor:
    """A rank in a process of Ray's. It returns failures, since Ray would pickle errors, and runs nothing after one."""

    _has_failed = False
    _memory: RankMemory | None = None

    def share(self, start: bytes) -> str:
        """Make the memory of the rank's stage. Returns: its path."""
        self._memory = RankMemory.of(msgspec.msgpack.decode(start, type=StartRank).config, num_stages=1)
        return self._memory.path

    def load(self, start: bytes, address: str, path: str | None) -> bytes | None:
        """Load the share of a `StartRank`. `path`: of the memory of the stage. Returns a `SentError`, or None."""
        return self._try(self._load, msgspec.msgpack.decode(start, type=StartRank), address, path)

    def follow(self, step: bytes) -> bytes | None:
        """Run a `Step`. Returns a `SentError`, or None."""
        message = msgspec.msgpack.decode(step, type=Step)
        return self._try(self._worker.follow, message.output, message.yielded, message.wanted)

    def ping(self) -> None:
        """Return when earlier calls have: an error says that the actor is lost."""

    def _load(self, start: StartRank, address: str, path: str | None) -> None:
        from quire.runtime.worker import Worker

        if path is not None and self._memory is None:
            self._memory = RankMemory.of(start.config, os.open(path, os.O_RDWR), num_stages=1)
        links = join(address, start.rank, start.config, self._memory, start.num_spins)
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
            return msgspec.msgpack.encode(SentError.of(error))
        return None


class RayRanks(Ranks):
    """The actors of all ranks but rank 0. Attributes: as `RankProcesses`."""

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        """Place the actors and start to load. Raises: ConfigError without `ray` or enough CPUs; EngineDeadError."""
        super().__init__()
        try:
            self._ray = ray = importlib.import_module("ray")
            importlib.import_module("ray.util.scheduling_strategies")
        except ImportError as error:
            raise ConfigError(f"--distributed-executor-backend ray needs Ray: {install_command('ray')}") from error
        require_torch("--distributed-executor-backend ray")
        if not ray.is_initialized():
            # Without a cluster Ray starts one of this machine alone.
            address = "auto" if os.environ.get("RAY_ADDRESS") else None
            ray.init(address=address, logging_level="WARNING", log_to_driver=False)
        group_size = config.options.tensor_parallel_size
        _check_nodes(ray, config)
        self.cpus: list[int] = []
        self._memory = RankMemory.of(config, num_stages=1) if group_size > 1 else None
        self._bundles: list[Any] = []
        self._actors = [
            actor
            for stage in range(config.options.pipeline_parallel_size)
            for actor in self._start_actors(config, stage)
        ]
        address, path = _free_address(ray.util.get_node_ip_address()), str(files.path.absolute())
        num_spins = spins_of(group_size * config.threads_per_rank)
        starts = [
            msgspec.msgpack.encode(StartRank(rank, config, [], num_spins, path, files.kind, files.name))
            for rank in range(config.num_ranks)
        ]
        self._steps: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            memories = [None if self._memory is None else self._memory.path]
            for first in range(group_size, config.num_ranks, group_size):
                share = self._actors[first - 1].share
                memories.append(None if self._memory is None else ray.get(share.remote(starts[first])))
            self._loading = [
                actor.load.remote(starts[rank], address, memories[rank // group_size])
                for rank, actor in enumerate(self._actors, 1)
            ]
            self.links = join(address, 0, config, self._memory, num_spins)
        except Exception as error:
            self.stop()
            raise EngineDeadError(f"the stages could not be joined: {error}") from error

    def _start_actors(self, config: EngineConfig, index: int) -> list[Any]:
        """Start the actors of a stage on one node. `index`: 0: the last stage, whose ranks are on this node."""
        ray, group_size, num_cpus = self._ray, config.options.tensor_parallel_size, config.threads_per_rank
        kind = ray.remote(RankActor)
        if index == 0:  # rank 0 does not reserve its CPUs either
            here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            )
            return [kind.options(num_cpus=0, scheduling_strategy=here).remote() for _ in range(1, group_size)]
        where: Any = "SPREAD"
        if group_size > 1:
            self._bundles.append(ray.util.placement_group([{"CPU": num_cpus}] * group_size, strategy="STRICT_PACK"))
            where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._bundles[-1])
        return [kind.options(num_cpus=num_cpus, scheduling_strategy=where).remote() for _ in range(group_size)]

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
        for bundle in self._bundles:
            self._ray.util.remove_placement_group(bundle)
        if self._memory is not None:
            self._memory.give_up()

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
        return None if failure is None else msgspec.msgpack.decode(failure, type=SentError).revive()


def _check_nodes(ray: Any, config: EngineConfig) -> None:
    """Raises: ConfigError if the nodes do not have the CPUs of all stages but the last."""
    needed, num_stages = (
        config.threads_per_rank * config.options.tensor_parallel_size,
        config.options.pipeline_parallel_size,
    )
    there = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    fits = 1 + sum(int(num_cpus // needed) for num_cpus in there)
    if fits < num_stages:
        raise ConfigError(
            f"{num_stages - 1} stages need {needed} CPUs each, and the nodes of the Ray cluster have"
            f" {', '.join(f'{num_cpus:g}' for num_cpus in there)}:"
            + (f" --pipeline-parallel-size {fits} fits" if fits > 1 else " larger nodes, or OMP_NUM_THREADS=1")
        )


def _free_address(host: str) -> str:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"tcp://{host}:{probe.getsockname()[1]}"
