"""The application has the routes of its description, and no others."""

from quire.server.openapi import ENDPOINTS
from tests.server.fake_engine import make_server

BODIES = {"/detokenize": {"tokens": []}, "/tokenize": {"prompt": "a"}}


def test_every_route_is_described() -> None:
    app, _ = make_server()
    described = {(endpoint.method.upper(), endpoint.path) for endpoint in ENDPOINTS}
    assert set(routes(app.routes)) <= described


def routes(items: object) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for item in items:  # type: ignore[attr-defined]
        inner = getattr(item, "original_router", None)
        if inner is not None:
            found += routes(inner.routes)
        else:
            found += [(method, item.path.replace(":path}", "}")) for method in item.methods - {"HEAD"}]
    return found
