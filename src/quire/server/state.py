"""What the routes of one server share. Made by `app.py`, found by routes with `state_of`."""

from dataclasses import dataclass, field

from fastapi import Request

from quire.server.admission import Admission
from quire.server.options import ServerOptions
from quire.server.supervisor import Supervisor


@dataclass(slots=True)
class ServerState:
    """One server."""

    options: ServerOptions
    model_name: str
    supervisor: Supervisor
    admission: Admission = field(default_factory=Admission)


def state_of(request: Request) -> ServerState:
    """The server that a request came to."""
    state = request.app.state.quire
    assert isinstance(state, ServerState)
    return state
