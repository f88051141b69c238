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


@dataclass(slots=True)
class ServerState:
    """A server. `is_draining`: it was told to stop and refuses new requests."""

    options: ServerOptions
    model_name: str
    supervisor: Supervisor
    is_draining: bool = False
    admission: Admission = field(init=False)
    announcer: Announcer = field(init=False)
    metrics: Metrics = field(init=False)
    health: Health = field(init=False)

    def __post_init__(self) -> None:
        self.admission = Admission(self.options, self.supervisor, tracer=Tracer.load(os.environ))
        self.announcer = Announcer(self.supervisor, self.admission)
        self.metrics = Metrics(self.options, self.model_name, self.supervisor, self.admission)
        self.health = Health(self.supervisor)


def state_of(request: Request) -> ServerState:
    """Return the state of the server that got a request."""
    state = request.app.state.quire
    assert isinstance(state, ServerState)
    return state
