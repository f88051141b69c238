"""The HTTP application of a router: its own health, metrics and replicas; every other request goes to a replica.

`/add_worker`, `/remove_worker` and `/list_workers` are those of vLLM's router. Next to read: `proxy.py`.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import ConfigError, nearest
from quire.server.errors import ApiError, JsonResponse, install_error_handlers
from quire.server.metrics import CONTENT_TYPE
from quire.server.options import ServerOptions
from quire.server.request_record import record_of
from quire.server.router.adapters import change_adapters
from quire.server.router.fleet import Fleet, check_url, unknown_model
from quire.server.router.metrics import RouterMetrics
from quire.server.router.proxy import Forwarding, RouterAdmission
from quire.server.router.replica import LOAD_PATH, UNLOAD_PATH
from quire.server.routing import RouteTable, body_of, make_application

if TYPE_CHECKING:
    from quire.server.router.processes import LocalReplicas
    from quire.server.router.run import RemoteReplicas

PROBE_METHODS = ["GET", "HEAD"]
ALL_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
router = RouteTable()


@dataclass(slots=True)
class RouterState:
    """A router. `backend` starts and stops its replicas; `upstream_key` is the API key that it sends them."""

    options: ServerOptions
    fleet: Fleet
    backend: "LocalReplicas | RemoteReplicas"
    upstream_key: str | None = None
    is_draining: bool = False
    is_asleep: bool = False
    is_on_demand: bool = False
    admission: RouterAdmission = field(init=False)

    def __post_init__(self) -> None:
        self.admission = RouterAdmission(self.options)

    @property
    def metrics(self) -> RouterMetrics:
        """Return the metrics."""
        return self.fleet.metrics

    @property
    def num_requests(self) -> int:
        """Return the number of requests in the router."""
        return self.admission.num_requests


def make_router_app(state: RouterState) -> Starlette:
    """Make the application of a router."""
    app = make_application(router.routes)
    app.state.quire = state
    install_error_handlers(app)
    return app


def _state(request: Request) -> RouterState:
    state = request.app.state.quire
    assert isinstance(state, RouterState)
    return state


@router.route("/health/live", PROBE_METHODS)
async def live(request: Request) -> Response:
    """Answer 200 while the router runs."""
    return JsonResponse({"status": "live"})


@router.route("/health/ready", PROBE_METHODS)
@router.route("/health", PROBE_METHODS)
@router.route("/ping", PROBE_METHODS)
async def ready(request: Request) -> Response:
    """Answer 200 while a replica takes requests."""
    state = _state(request)
    if state.is_draining:
        raise ApiError(503, "the router is shutting down", code="draining", retry_after_s=2)
    if not state.fleet.ready:
        raise state.fleet.unavailable()
    return JsonResponse({"status": "ready"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return all metrics in Prometheus's text format."""
    return Response(_state(request).metrics.render(), headers={"content-type": CONTENT_TYPE})


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Return the models of all replicas."""
    return JsonResponse({"object": "list", "data": [*_cards(request).values()]})


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request) -> Response:
    """Return one model."""
    cards, name = _cards(request), request.path_params["model_id"]
    if name not in cards:
        raise unknown_model(name, cards)
    return JsonResponse(cards[name])


def _cards(request: Request) -> dict[str, Any]:
    """Return the models by name, each as the first replica that has it describes it. Raises: ApiError 503."""
    fleet = _state(request).fleet
    if not fleet.ready:
        raise fleet.unavailable()
    cards: dict[str, Any] = {}
    for replica in fleet.ready:
        cards |= {name: card for name, card in replica.models.items() if name not in cards}
    return cards


@router.get("/list_workers")
async def list_workers(request: Request) -> Response:
    """Return the replicas, and their states."""
    replicas = _state(request).fleet.replicas
    workers = [
        {
            "name": replica.name,
            "url": replica.url,
            "state": replica.state.value,
            "reason": replica.reason,
            "models": sorted(replica.models),
            "in_flight": replica.num_in_flight,
            "running": replica.load.num_running,
            "waiting": replica.load.num_waiting,
            "queued_tokens": replica.load.num_queued_tokens,
            "cached_blocks": len(replica.digests),
        }
        for replica in replicas
    ]
    return JsonResponse({"urls": [replica.url for replica in replicas], "workers": workers})


@router.post("/add_worker")
async def add_worker(request: Request) -> Response:
    """Add the replica at the query's `url`; it gets requests once it is ready."""
    state, url = _state(request), _url(request)
    try:
        state.fleet.add(check_url(url), url, state.upstream_key)
    except ConfigError as error:
        raise ApiError(400, error.message, code="invalid_parameter", param="url") from None
    return JsonResponse({"status": "added", "url": url})


@router.post("/remove_worker")
async def remove_worker(request: Request) -> Response:
    """Send the replica at the query's `url` no further requests; it is forgotten when its running ones have ended."""
    state, url = _state(request), _url(request)
    replica = next((replica for replica in state.fleet.replicas if replica.name == url), None)
    if replica is None:
        names = [replica.name for replica in state.fleet.replicas if not replica.is_local]
        message = f"no replica was added as {url[:200]!r}{nearest(url, names)}"
        raise ApiError(404, message, code="unknown_replica", param="url")
    state.fleet.retire(replica)
    return JsonResponse({"status": "removed", "url": url, "in_flight": replica.num_in_flight})


def _url(request: Request) -> str:
    url = request.query_params.get("url", "").rstrip("/")
    if not url:
        raise ApiError(400, "name the replica: POST /add_worker?url=http://host:port", param="url")
    return url


@router.route("/replica/{path:path}", ALL_METHODS)
async def replica_route(request: Request) -> Response:
    """Refuse: what replicas tell a router is about all callers."""
    raise ApiError(404, "a router has no /replica routes: ask its replicas", code="route_not_found")


@router.route("/sleep", ALL_METHODS)
@router.route("/wake_up", ALL_METHODS)
@router.route("/is_sleeping", ALL_METHODS)
async def sleep_routes(request: Request) -> Response:
    """Refuse: one of the replicas would sleep, and requests would still be sent to it."""
    raise ApiError(404, "a router does not sleep: ask each of its replicas", code="route_not_found")


@router.post(LOAD_PATH)
@router.post(UNLOAD_PATH)
async def adapter_routes(request: Request) -> Response:
    """Load or unload an adapter on all replicas."""
    return await change_adapters(_state(request).fleet, request.scope["path"], await body_of(request))


@router.route("/{path:path}", ALL_METHODS)
async def forward(request: Request) -> Response:
    """Pass the request on to a replica."""
    state = _state(request)
    if not {".", ".."}.isdisjoint(request.scope["path"].split("/")):
        # What stands before a replica may resolve them, and ask it for what only routers may see.
        raise ApiError(404, "no route has . or .. in its path", code="route_not_found")
    return Forwarding(state.fleet, state.admission, record_of(request), request.scope, await body_of(request))
