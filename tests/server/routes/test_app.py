"""The application has the routes of its description, those of the page, and no others."""

from quire.server.openapi import ENDPOINTS
from tests.server.fake_engine import make_server

OF_THE_PAGE = ("/page/", "/xray/", "/lab/")


def test_every_route_is_described() -> None:
    app, _ = make_server()
    described = {(endpoint.method.upper(), endpoint.path) for endpoint in ENDPOINTS}
    others = {path for method, path in routes(app.routes) if (method, path) not in described}
    assert {path for path in others if path != "/" and not path.startswith(OF_THE_PAGE)} == set()


def routes(items: object) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for item in items:  # type: ignore[attr-defined]
        inner = getattr(item, "original_router", None)
        if inner is not None:
            found += routes(inner.routes)
        else:
            found += [(method, item.path.replace(":path}", "}")) for method in item.methods - {"HEAD"}]
    return found
