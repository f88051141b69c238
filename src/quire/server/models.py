"""Models of one server: which of them are loaded, within a memory budget and as long as they are used.

A server of one model loads it at start and keeps it; `/sleep` ends its engine's process and `/wake_up` starts it. With
several models, or a keep-alive time, models are loaded on demand: a request holds a lease on its model, which is loaded
first if there is room. For room the model used least recently is unloaded, once it is idle.
Knows no HTTP beyond the errors. Next to read: `engines.py`.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from starlette.requests import Request

from quire.byte_sizes import format_bytes
from quire.config import EngineOptions
from quire.engine.process.sizes import BUDGET_SHARE, measure
from quire.errors import ConfigError, QuireError
from quire.server.engines import Engines
from quire.server.errors import ApiError, not_admin
from quire.server.generation import until_disconnect
from quire.server.options import DEFAULT_KEEP_ALIVE, ServerOptions, parse_keep_alive
from quire.server.request_record import LEASES_KEY, RequestRecord, record_of
from quire.server.state import ServerState, state_of

LOGGER = logging.getLogger("quire.server")
DRAIN_CHECK_S = 0.02
FIRST_USE_S = 1.0
"""Shortest time that a loaded model waits for its first request, also with a keep-alive time of 0."""
PATIENCE_S = 10.0
"""Time that a model waits for others to become idle. Then the one used least recently gets no further requests."""


class Models:
    """The models of a server by name. For one event loop."""

    def __init__(
        self, states: Sequence[ServerState], *, keep_alive_s: float | None = None, budget_bytes: float = math.inf
    ) -> None:
        """`states`: the first is the default. `keep_alive_s` None: one model, which stays loaded; else the time for
        which an idle model stays loaded."""
        self.by_name = {state.model_name: state for state in states}
        self.default = self.by_name[states[0].model_name]
        self.budget_bytes = budget_bytes
        self.keep_alive_s = keep_alive_s
        for state in states if self.is_on_demand else ():
            state.is_on_demand = True
            state.engines.rest()
        self._making_room = asyncio.Lock()
        self._sleeping = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def is_on_demand(self) -> bool:
        """True if models are loaded when a request needs them."""
        return self.keep_alive_s is not None

    @property
    def num_requests(self) -> int:
        """Completions in the server, those that wait for a model included."""
        return sum(model.admission.num_requests for model in self.by_name.values())

    @property
    def options(self) -> ServerOptions:
        """Return the server's options."""
        return self.default.options

    @property
    def is_draining(self) -> bool:
        """True once the server takes no more requests, of any model."""
        return self.default.is_draining

    @is_draining.setter
    def is_draining(self, value: bool) -> None:
        for model in self.by_name.values():
            model.is_draining = value

    def choose(self, name: str | None) -> tuple[ServerState, str | None]:
        """Return the model of a request's `model`, and the adapter if it names one. Raises: ApiError 404."""
        for model in self.by_name.values() if name and name not in self.by_name else ():
            if name in model.adapter_names:
                return model, name
        return self.find(name), None

    def find(self, name: str | None) -> ServerState:
        """Return a model, the default one without a name. Raises: ApiError 404 for a model that is not served."""
        model = self.by_name.get(name) if name else self.default
        if model is None:
            served = ", ".join(f'"{known}"' for known in self.by_name)
            message = f'the model "{(name or "")[:100]}" does not exist; this server has {served}'
            raise ApiError(404, message, code="model_not_found", param="model")
        return model

    # --- Life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the default model. Raises: the error of loading it; CapacityError if any model exceeds the budget."""
        if self.is_on_demand:
            await self._measure()
            await self._until_open(self.default)
        else:
            await self.default.engines.start()

    async def _measure(self) -> None:
        """Set the budget and the memory of each model, which then stays as measured."""
        chosen = self.default.options.models_memory_bytes
        if chosen is None and len(self.by_name) == 1:
            return  # it has the machine's memory, as a model that stays loaded
        all_engines = [model.engines for model in self.by_name.values()]
        sizes = await measure([engines.options for engines in all_engines], chosen)
        self.budget_bytes = sizes.budget_bytes
        for model, size in zip(self.by_name.values(), sizes.models, strict=True):
            model.num_bytes = size.num_bytes
            options = model.engines.options
            if options.num_blocks_override is None:
                model.engines.options = replace(options, kv_cache_memory_bytes=size.kv_bytes)
        reason = "chosen" if chosen else f"{BUDGET_SHARE:.0%} of the memory that was available at start"
        LOGGER.info("models_memory_bytes = %s: %s", format_bytes(sizes.budget_bytes), reason)

    async def stop(self) -> None:
        """End all engines, and all requests with them."""
        for model in self.by_name.values():
            if model.loading is not None:
                model.loading.cancel()
            if model.expiry is not None:
                model.expiry.cancel()
        await asyncio.gather(*(model.engines.stop() for model in self.by_name.values()))

    def note_lost(self, name: str, error: QuireError) -> None:
        """Take note that a model's engine died too often: the next request loads it anew."""
        LOGGER.error("%s: %s; the next request loads the model again", name, error.message)
        model = self.by_name[name]
        model.engines.rest()
        model.holds_memory = model.is_leaving = False
        self._note_change()

    # --- Sleep ----------------------------------------------------------------------------------

    async def sleep(self, model: ServerState, timeout_s: float) -> None:
        """Let running requests finish for `timeout_s`, then free the model's memory; does nothing if it sleeps.

        Raises: ApiError 503 while the model is being loaded.
        """
        if self.is_on_demand:
            if model.is_open:
                model.is_leaving = True
                await self._until_idle(model, timeout_s)
                if model.is_leaving:
                    await self._unload(model)
            return
        async with self._sleeping:
            if not model.is_asleep:
                _ = model.engines.client  # raises while there is none
                model.is_asleep = True
                await self._until_idle(model, timeout_s)
                await model.engines.sleep()

    async def wake_up(self, model: ServerState) -> None:
        """Load a model that sleeps; does nothing if it is awake. Raises: the error of loading it."""
        if self.is_on_demand:
            return await self._until_open(model)
        async with self._sleeping:
            if model.is_asleep:
                await model.engines.wake_up()
                model.is_asleep = False

    async def _until_idle(self, model: ServerState, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while loop.time() < deadline_s:
            if not (model.num_leases if self.is_on_demand else model.admission.num_requests):
                return
            await asyncio.sleep(DRAIN_CHECK_S)

    # --- Models on demand -----------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, model: ServerState, record: RequestRecord, keep_alive_s: float | None) -> AsyncIterator[None]:
        """Hold a loaded model while the body runs; load it first. `keep_alive_s` None: the server's.

        Raises: ApiError 429 while its queue is full, 503 if it was not loaded in time; the error of loading it.
        """
        if not model.is_open:
            timeout_s = model.options.queue_timeout_s
            with model.admission.wait(record):
                try:
                    async with asyncio.timeout(timeout_s or None):
                        await self._until_open(model)
                except TimeoutError:
                    message = f'the model "{model.model_name}" could not be loaded within {timeout_s:g} s: other '
                    raise ApiError(
                        503,
                        message + "models are in use, try again later",
                        code="queue_timeout",
                        retry_after_s=PATIENCE_S,
                    ) from None
        model.num_leases += 1
        if model.expiry is not None:
            model.expiry.cancel()
        try:
            yield
        finally:
            model.num_leases -= 1
            model.used_s = asyncio.get_running_loop().time()
            if not model.num_leases:
                self._rest(model, keep_alive_s)
                self._note_change()

    def _rest(self, model: ServerState, keep_alive_s: float | None) -> None:
        """Unload an idle model when its time is over."""
        rest_s = self.keep_alive_s if keep_alive_s is None else keep_alive_s
        assert rest_s is not None
        if model.is_leaving or (model.is_open and rest_s == 0):
            self._unload(model)
        elif model.is_open and rest_s < math.inf:
            model.expiry = asyncio.get_running_loop().call_later(rest_s, self._expire, model)

    def _expire(self, model: ServerState) -> None:
        if model.is_open and model.is_idle:
            self._unload(model)

    async def _until_open(self, model: ServerState) -> None:
        model.num_waiting += 1
        try:
            while not model.is_open:
                if model.loading is None:
                    model.loading = asyncio.create_task(self._load(model), name="quire-load")
                    model.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
                # Other requests wait for the same task: it goes on when one of them is cancelled.
                await asyncio.shield(model.loading)
        finally:
            model.num_waiting -= 1
            self._note_change()

    async def _load(self, model: ServerState) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with self._making_room:
                deadline_s = loop.time() + PATIENCE_S
                while model.holds_memory:
                    await self._changed.wait()
                while self._missing_bytes(model) > 0:
                    if not model.num_waiting:
                        return  # all clients are gone: nothing is unloaded for them
                    await self._make_room(deadline_s)
                model.holds_memory = True
            began_s = loop.time()
            try:
                await model.engines.wake_up()
            except BaseException:
                model.holds_memory = False
                raise
            size = f", at most {format_bytes(model.num_bytes)}" if model.num_bytes else ""
            LOGGER.info("loaded %s in %.2f s%s", model.model_name, loop.time() - began_s, size)
        finally:
            model.loading = None
            model.used_s = loop.time()
            self._note_change()
        assert self.keep_alive_s is not None
        self._rest(model, max(self.keep_alive_s, FIRST_USE_S))

    def _missing_bytes(self, model: ServerState) -> float:
        held = sum(other.num_bytes for other in self.by_name.values() if other.holds_memory)
        return held + model.num_bytes - self.budget_bytes

    async def _make_room(self, deadline_s: float) -> None:
        """Unload the idle model that was used least recently, or wait until something changes."""
        loaded = [model for model in self.by_name.values() if model.is_open and model.engines.is_ready]
        loaded.sort(key=lambda model: model.used_s)
        idle = [model for model in loaded if model.is_idle]
        if idle:
            await self._unload(idle[0])
            return
        time_left_s = deadline_s - asyncio.get_running_loop().time()
        if time_left_s <= 0 and loaded and not any(model.is_leaving for model in self.by_name.values()):
            loaded[0].is_leaving = True
        try:
            async with asyncio.timeout(time_left_s if time_left_s > 0 else None):
                await self._changed.wait()
        except TimeoutError:
            return

    def _unload(self, model: ServerState) -> asyncio.Task[None]:
        if model.unloading is None:
            model.is_leaving = True
            model.unloading = asyncio.create_task(self._end_engine(model), name="quire-unload")
        return model.unloading

    async def _end_engine(self, model: ServerState) -> None:
        if model.expiry is not None:
            model.expiry.cancel()
        try:
            await model.engines.sleep()
            LOGGER.info("unloaded %s", model.model_name)
        finally:
            model.holds_memory = model.is_leaving = False
            model.unloading = None
            self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def make_models(
    engine_options: Mapping[str, EngineOptions], options: ServerOptions, on_lost: Callable[[QuireError], None]
) -> Models:
    """Make the models of a server; `on_lost` is called when that of a server of one model cannot go on.

    Raises: ConfigError if a chat template cannot be read, for a budget without models on demand, or for several engines
    where one cannot have its share.
    """
    is_on_demand = len(engine_options) > 1 or options.keep_alive is not None
    if options.models_memory_bytes is not None and not is_on_demand:
        raise ConfigError("models_memory_bytes is for models on demand: name several models, or add --keep-alive 5m")
    for model_options in engine_options.values():
        _check_engines(model_options, is_on_demand=is_on_demand)
    states: list[ServerState] = []
    for name, model_options in engine_options.items():
        lost = partial(lambda name, error: models.note_lost(name, error), name) if is_on_demand else on_lost
        states.append(ServerState(options, name, Engines(model_options, lost), states[0] if states else None))
    keep_alive_s = parse_keep_alive(options.keep_alive or DEFAULT_KEEP_ALIVE) if is_on_demand else None
    models = Models(states, keep_alive_s=keep_alive_s)
    return models


def _check_engines(options: EngineOptions, *, is_on_demand: bool) -> None:
    """Raises: ConfigError if several engines cannot share the machine."""
    if options.data_parallel_size == 1:
        return
    if is_on_demand:
        raise ConfigError("--data-parallel-size is for one model that stays loaded: give one, no --keep-alive")
    if options.device.startswith("cuda:"):
        raise ConfigError(f"device={options.device!r} is one GPU: --device cuda gives each engine its own, or a share")


async def hold_model(request: Request, keep_alive: str | float | None) -> None:
    """Load the request's model if that is left to requests, and hold it until the answer has ended.

    `keep_alive`: the request's own, checked. Raises: as `Models.lease`; ClientDisconnected; ApiError 403 if it would
    unload the model sooner than other clients may expect.
    """
    model, models, record = state_of(request), models_of(request), record_of(request)
    if not model.is_on_demand or record.holds_model:
        return
    keep_alive_s = None if keep_alive is None else parse_keep_alive(keep_alive)
    if keep_alive_s is not None and keep_alive_s < (models.keep_alive_s or 0) and not record.is_admin:
        raise not_admin("a keep_alive that is shorter than the server's")
    lease = models.lease(model, record, keep_alive_s)
    holding = request.scope[LEASES_KEY].enter_async_context(lease)
    await (holding if model.is_open else until_disconnect(request.receive, holding))
    record.holds_model = True


def models_of(request: Request) -> Models:
    """Return the models of the server that got a request."""
    models = request.app.state.models
    assert isinstance(models, Models)
    return models
