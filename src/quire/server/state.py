"""State that the routes of one server share. Routes get it with `state_of`."""

import os
from dataclasses import dataclass, field

from fastapi import Request

from quire.server.admission import Admission
from quire.server.announcements import Announcer
from quire.server.health import Health
from quire.server.metrics import Metrics
from quire.server.options import ServerOptions
from quire.server.supervisor import Supervisor
from quire.server.tracing import Tracer

STATE_KEY = "quire.state"
"""Key of the chosen model's state in the ASGI scope, once the body has been read."""


@dataclass(slots=True)
class ServerState:
    """A server and its model; of several models each has one. Requests without a model get the first.

    `first`: the state whose metrics and rate limits this one shares. `is_draining`: the server was told to stop and
    refuses new requests. `is_asleep`: the model sleeps, or will when its requests have ended. `is_on_demand`: requests
    load it.
    """

    options: ServerOptions
    model_name: str
    supervisor: Supervisor
    first: "ServerState | None" = None
    is_draining: bool = False
    is_asleep: bool = False
    is_on_demand: bool = False
    admission: Admission = field(init=False)
    announcer: Announcer = field(init=False)
    metrics: Metrics = field(init=False)
    health: Health = field(init=False)

    def __post_init__(self) -> None:
        rates = None if self.first is None else self.first.admission.rates
        self.admission = Admission(self.options, self.supervisor, tracer=Tracer.load(os.environ), rates=rates)
        self.announcer = Announcer(self.supervisor, self.admission)
        self.metrics = Metrics(self.options) if self.first is None else self.first.metrics
        self.metrics.add_model(self.model_name, self.supervisor, self.admission)
        self.health = Health(self.supervisor)


def state_of(request: Request) -> ServerState:
    """Return the state of the model that a request's body chose; the only model's or the first one's else."""
    state = request.scope.get(STATE_KEY) or request.app.state.quire
    assert isinstance(state, ServerState)
    return state
