"""The application has the routes of its description, and no others."""

from quire.server.openapi import ENDPOINTS
from tests.server.fake_engine import in_loop, make_server, requests_to

BODIES = {"/detokenize": {"tokens": []}, "/tokenize": {"prompt": "a"}}


@in_loop
async def test_every_described_route_answers() -> None:
    app, _ = make_server()
    async with requests_to(app) as client:
        for endpoint in ENDPOINTS:
            path = endpoint.path.replace("{model_id}", "tiny")
            response = await client.request(endpoint.method.upper(), path, json={} if endpoint.body else None)
            expected = 400 if endpoint.body else 200
            assert response.status_code == expected, (path, response.text)
            if endpoint.answer is not None and not endpoint.body:
                endpoint.answer.model_validate(response.json())


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


@in_loop
async def test_documentation_pages_of_fastapi_are_off() -> None:
    app, _ = make_server()
    async with requests_to(app) as client:
        for path in ("/docs", "/redoc"):
            assert (await client.get(path)).status_code == 404
