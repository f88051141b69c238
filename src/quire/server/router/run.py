"""Start of a router: in front of its own replicas, or of servers that run already.

Next to read: `routes.py`, `processes.py`, and `../run.py` for the life of a server.
"""

import asyncio
import os
import re
from collections.abc import Callable, Sequence

from quire.config import EngineOptions
from quire.errors import ConfigError, QuireError
from quire.server.gate import Gate
from quire.server.options import ServerOptions
from quire.server.registration import registered
from quire.server.router.fleet import Fleet, check_url
from quire.server.router.metrics import RouterMetrics
from quire.server.router.processes import LocalReplicas
from quire.server.router.routes import RouterState, make_router_app
from quire.server.run import Service, bind, prepare_process, url_of

UPSTREAM_VARIABLE = "QUIRE_UPSTREAM_API_KEY"
FIRST_CHECK_S = 3.0
"""Longest wait for the first answers of all replicas."""
_KEY = re.compile(r"[!-~]{1,512}")


class RemoteReplicas:
    """Servers that run already."""

    def __init__(self, fleet: Fleet, urls: Sequence[str], key: str | None) -> None:
        self._fleet, self._urls, self._key = fleet, urls, key

    async def start(self) -> None:
        """Ask all replicas for their health; return when all have answered, or not in time."""
        added = [self._fleet.add(url, url, self._key) for url in self._urls]
        await asyncio.wait(
            [asyncio.create_task(replica.was_checked.wait()) for replica in added], timeout=FIRST_CHECK_S
        )

    async def stop(self) -> None:
        """Stop watching them."""
        await self._fleet.stop()


def serve_replicas(
    engine: EngineOptions, options: ServerOptions, *, on_ready: Callable[[str], None] = lambda url: None
) -> None:
    """Start `engine.data_parallel_size` replicas and serve until SIGTERM or SIGINT. Raises: as `serve`."""
    if engine.device.startswith("cuda:"):
        raise ConfigError(f"device={engine.device!r} is one GPU: --device cuda gives each replica its own, or a share")

    def make(fleet: Fleet, on_lost: Callable[[QuireError], None]) -> LocalReplicas:
        return LocalReplicas(fleet, engine, options, on_lost)

    _run(options, options.model_name(engine), make, lambda url, num_ready: on_ready(url))


def route(
    urls: Sequence[str], options: ServerOptions, *, on_ready: Callable[[str, int], None] = lambda url, num_ready: None
) -> None:
    """Route requests to running servers until SIGTERM or SIGINT. `on_ready` gets the number that is ready.

    Raises: ConfigError.
    """
    checked = [check_url(url) for url in urls]
    for url in checked:
        if checked.count(url) > 1:
            raise ConfigError(f"the replica {url} is named twice: name it once")
    key = os.environ.get(UPSTREAM_VARIABLE)
    if key is not None and not _KEY.fullmatch(key):
        raise ConfigError(f"{UPSTREAM_VARIABLE} is no API key: a key has 1 to 512 visible ASCII characters, no spaces")
    _run(options, "router", lambda fleet, on_lost: RemoteReplicas(fleet, checked, key), on_ready, key)


def _run(
    options: ServerOptions, name: str,
    make: Callable[[Fleet, Callable[[QuireError], None]], LocalReplicas | RemoteReplicas],
    on_ready: Callable[[str, int], None], upstream_key: str | None = None,
) -> None:  # fmt: skip
    prepare_process(options)
    fleet = Fleet(options.router_policy, RouterMetrics(options.router_policy))

    def build(on_lost: Callable[[QuireError], None]) -> tuple[RouterState, Gate]:
        state = RouterState(options, fleet, make(fleet, on_lost), upstream_key)
        return state, Gate(make_router_app(state), state)

    with bind(options.host, options.port) as listener, registered(url_of(listener), name):
        asyncio.run(Service(listener, build).run(lambda url: on_ready(url, len(fleet.ready))))
