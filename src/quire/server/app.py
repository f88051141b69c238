"""The HTTP application: routes, errors, life of the engine. Start here; `run.py` serves it.

One request's way: `routes/` → `front_end.py` (template, tokens, checks) → `generation.py` (engine) → `streaming.py`.
"""

from fastapi import FastAPI
from fastapi.routing import APIRoute

from quire import __version__
from quire.server.errors import install_error_handlers
from quire.server.routes import chat, completions, embeddings, health, metrics, models, openapi, responses, tokens
from quire.server.state import ServerState

MODULES = (health, metrics, models, chat, completions, responses, embeddings, tokens, openapi)


def make_app(state: ServerState) -> FastAPI:
    """The application around a server's state. The engine is started and stopped by whoever serves it."""
    app = FastAPI(
        title="Quire", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.state.quire = state
    routes = (route for module in MODULES for route in module.router.routes if isinstance(route, APIRoute))
    install_error_handlers(app, [route.path for route in routes if "{" not in route.path])
    for module in MODULES:
        app.include_router(module.router)
    return app
