"""`LocalReplicas`: the replicas of `quire serve --data-parallel-size N`, each an ordinary server in its own process.

A replica listens on a loopback port with a random key that only the router has. It ends when its socket to this process
closes, however that happens, and its engine with it. One that dies is started again. Next to read: `child.py`.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import msgspec

from quire.config import EngineOptions
from quire.engine.process.client import describe_status
from quire.engine.process.messages import Refused
from quire.errors import EngineDeadError, QuireError
from quire.server.options import ServerOptions
from quire.server.router.fleet import Fleet
from quire.server.router.replica import Replica
from quire.server.supervisor import DEATHS_WITHIN_S, MAX_DEATHS

LOGGER = logging.getLogger("quire.router")
END_S = 8.0
"""Time that a replica may take to end: its engine has five seconds to end a step."""
MAX_MESSAGE_BYTES = 16 << 20


class StartReplica(msgspec.Struct, tag="start"):
    """The only message to a replica's process. `key`: the API key that the router will send."""

    engine: EngineOptions
    options: ServerOptions
    key: str


class Serving(msgspec.Struct, tag="serving", array_like=True):
    """The replica is ready at this address."""

    url: str


FromReplica = Serving | Refused


class _Process:
    """Process of a replica, and our end of its socket."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls, message: StartReplica) -> "_Process":
        """Start a process. Raises: OSError if memory or files are short."""
        ours, theirs = socket.socketpair()
        with theirs:
            # With a session of its own it gets no interrupt that is typed at the terminal.
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "quire.server.router.child", str(theirs.fileno()),
                pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_MESSAGE_BYTES)
        writer.write(msgspec.json.encode(message) + b"\n")
        return cls(process, reader, writer)

    async def url(self) -> str:
        """Return its address once it is ready. Raises: the error of loading the model; EngineDeadError if it ended."""
        with contextlib.suppress(ConnectionError):
            if line := await self._reader.readline():
                message = msgspec.json.decode(line, type=FromReplica)
                if isinstance(message, Serving):
                    return message.url
                raise message.failure.revive()
        raise EngineDeadError(f"{await self.end()}, while it was loading the model")

    async def end(self) -> str:
        """Wait until it has ended. Returns: a sentence that says how."""
        with contextlib.suppress(ConnectionError):
            await self._reader.read()
        return f"the replica's process {describe_status(await self._process.wait())}"

    async def stop(self) -> None:
        """End it, and its engine."""
        self._writer.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), END_S)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class LocalReplicas:
    """The processes of all replicas. It calls `on_lost` with the reason when one dies too often."""

    def __init__(
        self, fleet: Fleet, engine: EngineOptions, options: ServerOptions, on_lost: Callable[[QuireError], None]
    ) -> None:
        self._fleet = fleet
        self._on_lost = on_lost
        self._key = secrets.token_hex(32)
        self._messages = [
            StartReplica(share_of(engine, rank), options_of_replica(engine, options), self._key)
            for rank in range(engine.data_parallel_size)
        ]
        self._processes: dict[int, _Process] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all replicas; return when all are ready. Raises: the error of the first that cannot start."""
        loop = asyncio.get_running_loop()
        started: list[asyncio.Future[None]] = []
        for rank in range(len(self._messages)):
            replica = self._fleet.add(f"replica-{rank}", "", self._key)
            started.append(loop.create_future())
            self._tasks.append(asyncio.create_task(self._keep(rank, replica, started[-1]), name=f"quire-{rank}"))
        await asyncio.gather(*started)

    async def stop(self) -> None:
        """End all replicas, and all requests with them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._fleet.stop()
        await asyncio.gather(*(process.stop() for process in self._processes.values()))

    async def _keep(self, rank: int, replica: Replica, started: "asyncio.Future[None]") -> None:
        """Start a replica, and another whenever one dies."""
        deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        loop = asyncio.get_running_loop()
        while True:
            try:
                how = await self._run(rank, replica, started)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                if not started.done():
                    return started.set_exception(error)
                how = str(error)
            deaths.append(loop.time())
            if len(deaths) == MAX_DEATHS and deaths[-1] - deaths[0] < DEATHS_WITHIN_S:
                message = f"{replica.name}: {how}, the {MAX_DEATHS}th time within {DEATHS_WITHIN_S:.0f} s: giving up"
                return self._on_lost(EngineDeadError(message))
            LOGGER.error("%s: %s; starting another", replica.name, how)

    async def _run(self, rank: int, replica: Replica, started: "asyncio.Future[None]") -> str:
        """Run one process of a replica to its end. Returns: how it ended. Raises: as `_Process.url`."""
        process = self._processes[rank] = await _Process.start(self._messages[rank])
        replica.connect(await process.url())
        await replica.check()
        if not started.done():
            started.set_result(None)
        how = await process.end()
        replica.note_end(how)
        return how


def share_of(engine: EngineOptions, rank: int) -> EngineOptions:
    """Return the options of a replica's engine: KV memory that was chosen is divided, other memory by the engine."""
    num_replicas = engine.data_parallel_size
    changes = {
        name: max(1, value // num_replicas)
        for name in ("kv_cache_memory_bytes", "num_blocks_override")
        if (value := getattr(engine, name)) is not None
    }
    return replace(engine, data_parallel_rank=rank, **changes)


def options_of_replica(engine: EngineOptions, options: ServerOptions) -> ServerOptions:
    """Return the options of a replica's server: the router has checked keys, hosts and limits of keys."""
    return replace(
        options, host="127.0.0.1", port=0, served_model_name=options.model_name(engine), api_key_file=None,
        requests_per_minute=None, tokens_per_minute=None, allowed_hosts=(), allowed_origins=(),
    )  # fmt: skip
