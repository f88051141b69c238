"""Table of routes for Starlette, filled by decorators.

FastAPI would take 0.2 s of processor time to import, a quarter of a server's start, and its parsing of parameters and
bodies has no use here: a route reads its `Request`. Next to read: `routes/__init__.py`.
"""

from collections.abc import Awaitable, Callable, Collection

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Handler = Callable[[Request], Awaitable[Response]]


class RouteTable:
    """Routes by path and methods, in the order in which they are tried."""

    def __init__(self) -> None:
        self.routes: list[Route] = []

    def get(self, path: str) -> Callable[[Handler], Handler]:
        """Return a decorator that answers GET requests."""
        return self.route(path, ["GET"])

    def post(self, path: str) -> Callable[[Handler], Handler]:
        """Return a decorator that answers POST requests."""
        return self.route(path, ["POST"])

    def route(self, path: str, methods: Collection[str]) -> Callable[[Handler], Handler]:
        """Return a decorator that answers requests of these methods."""

        def add(handler: Handler) -> Handler:
            route = Route(path, handler, methods=methods)
            route.methods = set(methods)  # Starlette adds HEAD to GET
            self.routes.append(route)
            return handler

        return add


def make_application(routes: Collection[Route]) -> Starlette:
    """Return the application of these routes. A path with another slash at its end is another path."""
    app = Starlette(routes=[*routes])
    app.router.redirect_slashes = False
    return app


async def body_of(request: Request) -> bytes:
    """Return the body. Unlike Starlette's `body`, it keeps nothing for as long as the answer takes."""
    return b"".join([piece async for piece in request.stream() if piece])
