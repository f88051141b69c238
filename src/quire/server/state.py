"""State that the routes of one server share. Routes get it with `state_of`."""

import asyncio
import os
from dataclasses import dataclass, field

from starlette.requests import Request

from quire.server.admission import Admission
from quire.server.engines import Engines
from quire.server.metrics import Metrics
from quire.server.options import ServerOptions
from quire.server.prefix_breaks import PrefixBreaks
from quire.server.tracing import Tracer
from quire.server.work import WorkPools

STATE_KEY = "quire.state"
"""Key of the chosen model's state in the ASGI scope, once the body has been read."""


@dataclass(slots=True, eq=False)
class ServerState:
    """A server and its model; of several models each has one. Requests without a model get the first.

    `first`: the state whose metrics, rate limits and threads this one shares. `is_draining`: the server was told to
    stop and refuses new requests. `is_asleep`: the model sleeps, or will when its requests have ended. `is_on_demand`:
    requests load it.

    Of a model on demand: `num_bytes`: memory that its engine may use. `num_leases`: requests that use it.
    `num_waiting`: requests that wait for it to be loaded. `holds_memory`: it is loaded, or is being loaded or unloaded.
    `is_leaving`: it is unloaded when its last request ends. `used_s`: end of its last request, by the loop's clock.
    """

    options: ServerOptions
    model_name: str
    engines: Engines
    first: "ServerState | None" = None
    is_draining: bool = False
    is_asleep: bool = False
    is_on_demand: bool = False
    num_bytes: int = 0
    num_leases: int = 0
    num_waiting: int = 0
    holds_memory: bool = False
    is_leaving: bool = False
    used_s: float = 0.0
    loading: asyncio.Task[None] | None = None
    unloading: asyncio.Task[None] | None = None
    expiry: asyncio.TimerHandle | None = None
    admission: Admission = field(init=False)
    metrics: Metrics = field(init=False)
    work: WorkPools = field(init=False)
    prefix_breaks: PrefixBreaks = field(default_factory=PrefixBreaks, init=False)

    def __post_init__(self) -> None:
        rates = None if self.first is None else self.first.admission.rates
        self.admission = Admission(self.options, self.engines, tracer=Tracer.load(os.environ), rates=rates)
        self.metrics = Metrics(self.options) if self.first is None else self.first.metrics
        self.work = WorkPools() if self.first is None else self.first.work
        self.metrics.add_model(self.model_name, self.engines, self.admission, self.prefix_breaks)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of the adapters that requests may choose; those of the options while the model was never loaded."""
        if self.engines.has_front_end:
            return self.engines.front_end.input_processor.adapters.names
        return tuple(item.partition("=")[0] for item in self.engines.options.lora)

    @property
    def is_idle(self) -> bool:
        """True if no request uses the model, or is about to."""
        return not self.num_leases and not self.num_waiting

    @property
    def is_open(self) -> bool:
        """True if requests may use the model: it is loaded, or its engine is being replaced."""
        return self.holds_memory and not self.is_leaving and self.loading is None

    @property
    def status(self) -> str:
        """State of the model as `/v1/models` shows it: llama.cpp's words, and "restarting" after its engine died."""
        if self.is_asleep:
            return "sleeping"
        if self.engines.is_ready:
            return "loaded"
        if self.engines.is_restarting:
            return "restarting"
        return "unloaded" if self.engines.is_asleep else "loading"


def state_of(request: Request) -> ServerState:
    """Return the state of the model that a request's body chose; the only model's or the first one's else."""
    state = request.scope.get(STATE_KEY) or request.app.state.quire
    assert isinstance(state, ServerState)
    return state
