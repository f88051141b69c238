"""The HTTP application: a file per group of routes, each with a `router`. `../run.py` serves it.

One request's way: a route → `front_end.py` (template, tokens, checks) → `generation.py` (engine) → `streaming.py`.
"""

from starlette.applications import Starlette

from quire.server.errors import install_error_handlers
from quire.server.models import Models
from quire.server.routes import (
    adapters,
    chat,
    completions,
    embeddings,
    infill,
    messages,
    page,
    responses,
    scores,
    sleep,
    status,
    tokens,
    xray,
)
from quire.server.routing import make_application
from quire.server.state import ServerState

MODULES = (
    status,
    chat,
    completions,
    infill,
    responses,
    messages,
    embeddings,
    scores,
    tokens,
    sleep,
    adapters,
    xray,
    page,
)


def make_app(state: ServerState, models: Models | None = None) -> Starlette:
    """Make the application of a server. `models`: of several, `state` being the first's.

    The caller starts and stops the engines.
    """
    routes = [route for module in MODULES for route in module.router.routes]
    app = make_application(routes)
    app.state.quire = state
    app.state.models = Models([state]) if models is None else models
    install_error_handlers(app, [route.path for route in routes if "{" not in route.path])
    return app
