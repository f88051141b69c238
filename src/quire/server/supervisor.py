"""Supervisor of one engine process: starts it, replaces it when it dies, gives up when it dies too often.

A platform should restart a server whose engine stalls. Knows no HTTP.
Next to read: `engines.py`, `../engine/process/client.py`.
"""

import asyncio
import enum
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

from quire.config import EngineConfig, EngineOptions
from quire.engine.process.client import EngineClient
from quire.errors import EngineDeadError, QuireError
from quire.server.errors import ApiError

LOGGER = logging.getLogger("quire.server")
MAX_DEATHS = 5
DEATHS_WITHIN_S = 60.0
MAX_STALL_S = 30.0
"""The engine hangs if it has requests and ends no step within this time."""
MAX_SILENT_S = 8.0
"""An engine that lives sends a message each second."""


class EngineState(enum.Enum):
    """State of the engine as the server sees it."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    ASLEEP = "asleep"
    STOPPED = "stopped"


class Supervisor:
    """Owner of one running engine.

    `prefix`: of what is told about this engine, one of several. `on_loaded` is awaited with its configuration before it
    takes requests. `on_stop` is called with the reason when no further one is started.
    """

    def __init__(
        self,
        options: EngineOptions,
        on_stop: Callable[[QuireError], None],
        on_loaded: Callable[[EngineConfig], Awaitable[None]],
        prefix: str = "",
    ) -> None:
        self.options = options
        self.prefix = prefix
        self.state = EngineState.STARTING
        self.num_deaths = 0
        self._on_stop, self._on_loaded = on_stop, on_loaded
        self._client: EngineClient | None = None
        self._was_loaded = False
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._task: asyncio.Task[None] | None = None
        self._died = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """True if the engine takes requests."""
        return self.state is EngineState.READY

    @property
    def is_asleep(self) -> bool:
        """True if the engine was ended and waits to be started again."""
        return self.state is EngineState.ASLEEP

    @property
    def client(self) -> EngineClient:
        """Return the running engine. Raises: ApiError 503 while there is none."""
        if self.is_asleep:
            raise asleep()
        if self._client is None or not self.is_ready:
            raise not_ready(f"{self.prefix}the engine is {self.state.value}")
        return self._client

    def tell_watchers(self, client_id: str, make_line: Callable[[], bytes]) -> None:
        """Send a line to the watchers of the engine's events that are this client, if there are some."""
        if self._client is not None:
            self._client.tell_watchers(client_id, make_line)

    def stall_s(self) -> float:
        """Return the seconds without a step while there are requests; 0 without requests or while the engine starts."""
        if self._client is None or not self.is_ready or not self._client.num_requests:
            return 0.0
        return max(0.0, time.monotonic() - self._client.progress_s)

    def silence_s(self) -> float:
        """Return the seconds since the engine's last message. Raises: as `client`."""
        return max(0.0, time.monotonic() - self.client.last_heard_s)

    async def start(self) -> None:
        """Start the first engine and the task that replaces it.

        Raises: the error of loading the model; EngineDeadError if the process ended meanwhile.
        """
        await self._launch()
        self._task = asyncio.create_task(self._watch(), name="quire-supervisor")

    async def stop(self, state: EngineState = EngineState.STOPPED) -> None:
        """End the engine, and all requests with it."""
        self.state = state
        if self._task is not None:
            self._task.cancel()
        if self._client is not None:
            await self._client.stop()

    async def _launch(self) -> None:
        self._died.clear()
        client = self._client = EngineClient(self._on_death)
        ready = await client.start(self.options, is_replacement=self._was_loaded)
        await self._on_loaded(ready.config)
        self._was_loaded = True
        if self.state in (EngineState.STARTING, EngineState.RESTARTING) and not self._died.is_set():
            self.state = EngineState.READY

    def _on_death(self, error: EngineDeadError) -> None:
        self.num_deaths += 1
        if self.state is EngineState.READY:
            self.state = EngineState.RESTARTING
        self._died.set()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._died.wait()
            self._deaths.append(loop.time())
            assert self._client is not None
            how = await self._client.describe_end()
            if len(self._deaths) == MAX_DEATHS and self._deaths[-1] - self._deaths[0] < DEATHS_WITHIN_S:
                self.state = EngineState.STOPPED
                message = f"{self.prefix}{how}, the {MAX_DEATHS}th time within {DEATHS_WITHIN_S:.0f} s: giving up"
                return self._on_stop(EngineDeadError(message))
            LOGGER.error("%s%s; starting another", self.prefix, how)
            try:
                await self._launch()
            except QuireError as error:
                LOGGER.error("%sthe engine does not start again: %s", self.prefix, error.message)
                self._died.set()
                await asyncio.sleep(1)


def asleep() -> ApiError:
    """Return the refusal of a request to a model that sleeps."""
    return ApiError(503, "the model is asleep: POST /wake_up loads it again", code="model_asleep")


def not_ready(what: str) -> ApiError:
    """Return the refusal of a request while no engine takes it."""
    return ApiError(503, f"{what}: try again in a moment", code="engine_not_ready", retry_after_s=2)
