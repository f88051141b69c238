"""The whole gate in front of the whole application: every route, every way of not having a key (B7)."""

import asyncio
import json

import pytest
from starlette.types import ASGIApp

from quire.errors import ConfigError
from quire.server.app import make_app
from quire.server.gate import wrap
from quire.server.gate.headers import OPEN_PATHS
from quire.server.gate.keys import KeyRing
from tests.server.served import ThreadedEngineClient, make_state

KEY = "correct-horse-battery-staple"
STATE = make_state(ThreadedEngineClient())
APP = make_app(STATE)
GATED = wrap(APP, STATE, KeyRing({KEY: "ci"}))


def all_routes() -> list[tuple[str, str]]:
    """(method, path) of everything the application answers, found as the application itself finds it."""
    found: set[tuple[str, str]] = set()

    def look(routes: list[object]) -> None:
        for route in routes:
            inner = getattr(route, "routes", None) or getattr(getattr(route, "original_router", None), "routes", None)
            if inner:
                look(inner)
            if getattr(route, "path", None) and getattr(route, "methods", None):
                found.update((method, route.path) for method in route.methods)  # type: ignore[attr-defined]

    look(APP.routes)  # type: ignore[arg-type]
    return sorted(found)


ROUTES = all_routes()
WITHOUT_KEY: dict[str, list[tuple[bytes, bytes]]] = {
    "none": [],
    "wrong": [(b"authorization", b"Bearer wrong")],
    "prefix": [(b"authorization", b"Bearer " + KEY[:-1].encode())],
    "longer": [(b"authorization", b"Bearer " + KEY.encode() + b"x")],
    "upper case": [(b"authorization", b"Bearer " + KEY.upper().encode())],
    "empty": [(b"authorization", b"Bearer ")],
    "empty header": [(b"authorization", b"")],
    "unicode": [(b"authorization", "Bearer ключ\u2028".encode())],
    "no UTF-8": [(b"authorization", b"Bearer \xff\xfe\x00")],
    "doubled header": [(b"authorization", b"Bearer " + KEY.encode())] * 2,
    "doubled key": [(b"authorization", f"Bearer {KEY} {KEY}".encode())],
    "two keys": [(b"authorization", f"Bearer {KEY}, Bearer {KEY}".encode())],
    "lower-case scheme, wrong key": [(b"authorization", b"bearer wrong")],
    "other scheme": [(b"authorization", b"Basic " + KEY.encode())],
    "no scheme": [(b"authorization", KEY.encode())],
    "other header": [(b"x-api-key", KEY.encode())],
    "cookie": [(b"cookie", b"key=" + KEY.encode())],
    "host trick": [(b"host", b"localhost/health/live?")],
    "host of a probe": [(b"host", b"127.0.0.1/health/ready#")],
    "forwarded path": [(b"x-original-url", b"/health/live"), (b"x-forwarded-prefix", b"/health/live")],
}


async def ask(
    app: ASGIApp, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes = b"{}", query: bytes = b""
) -> tuple[int, dict[str, str], bytes]:
    """One request, straight into an ASGI application."""
    messages = []
    given = headers if any(name == b"host" for name, _ in headers) else [(b"host", b"localhost"), *headers]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": query, "root_path": "", "headers": given,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
    }  # fmt: skip
    sent = False

    async def receive() -> dict[str, object]:
        nonlocal sent
        if sent:
            await asyncio.sleep(60)
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, object]) -> None:
        messages.append(message)

    await app(scope, receive, send)
    found = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
    return messages[0]["status"], found, b"".join(message.get("body", b"") for message in messages[1:])


def test_the_routes_are_found() -> None:
    assert {("GET", "/health/live"), ("GET", "/metrics"), ("POST", "/v1/chat/completions")} <= set(ROUTES)


SENDS_A_KEY = {"wrong", "prefix", "longer", "upper case", "unicode", "no UTF-8", "doubled key", "two keys",
               "lower-case scheme, wrong key"}  # fmt: skip


@pytest.mark.parametrize("case", WITHOUT_KEY)
def test_a_wrong_key_and_none_are_told_apart_and_no_key_is_echoed(case: str) -> None:
    _, _, body = asyncio.run(ask(GATED, "GET", "/v1/models", WITHOUT_KEY[case]))
    error = json.loads(body)["error"]
    assert error["code"] == "invalid_api_key"
    assert ("is not known" in error["message"]) == (case in SENDS_A_KEY)
    assert ("needs an API key" in error["message"]) == (case not in SENDS_A_KEY)
    assert not any(word in error["message"] for word in ("correct", "wrong", "horse"))


def test_only_callers_with_a_key_are_told_their_limits() -> None:
    state = make_state(ThreadedEngineClient(), requests_per_minute=5)
    gated = wrap(make_app(state), state, KeyRing({KEY: "ci"}))
    for key, status, is_told in ((b"wrong", 401, False), (KEY.encode(), 200, True)):
        answer = asyncio.run(ask(gated, "GET", "/v1/models", [(b"authorization", b"Bearer " + key)]))
        assert (answer[0], "x-ratelimit-limit-requests" in answer[1]) == (status, is_told)


@pytest.mark.parametrize("case", WITHOUT_KEY)
def test_no_route_answers_without_a_key(case: str) -> None:
    async def main() -> None:
        for method, path in ROUTES:
            if path in OPEN_PATHS:
                continue
            status, headers, body = await ask(GATED, method, path, WITHOUT_KEY[case])
            assert status == 401, (method, path)
            assert headers["www-authenticate"] == "Bearer"
            assert json.loads(body)["error"]["type"] == "authentication_error"

    asyncio.run(main())


@pytest.mark.parametrize(
    "path",
    ["/", "/nowhere", "/v1", "/health/live/", "/health/live/../../metrics", "//health/live", "/HEALTH/LIVE", "/docs",
     "/openapi.json", "/health/live\x00", "/v1/models;/health/live"],
)  # fmt: skip
def test_no_other_path_does_either(path: str) -> None:
    assert asyncio.run(ask(GATED, "GET", path, []))[0] == 401


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "DELETE", "TRACE", "PROPFIND"])
def test_no_other_method_does_either(method: str) -> None:
    assert asyncio.run(ask(GATED, method, "/metrics", []))[0] == 401


def test_a_query_does_not_open_anything() -> None:
    assert asyncio.run(ask(GATED, "GET", "/metrics", [], query=b"/health/live"))[0] == 401


def test_the_open_paths_are_the_two_probes() -> None:
    assert {"/health/live", "/health/ready"} == OPEN_PATHS
    assert asyncio.run(ask(GATED, "GET", "/health/live", []))[0] == 200


@pytest.mark.parametrize("scheme", [b"Bearer", b"bearer", b"BEARER"])
def test_the_key_opens_every_route(scheme: bytes) -> None:
    async def main() -> None:
        for method, path in ROUTES:
            status, _, _ = await ask(GATED, method, path, [(b"authorization", scheme + b" " + KEY.encode())])
            assert status != 401, (method, path)

    asyncio.run(main())


def test_a_websocket_is_closed_before_the_application_hears_of_it() -> None:
    sent = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    asyncio.run(GATED({"type": "websocket", "path": "/", "headers": []}, None, send))
    assert [message["type"] for message in sent] == ["websocket.close"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_a_public_address_needs_a_key_or_the_word_insecure(host: str) -> None:
    state = make_state(host=host)
    with pytest.raises(ConfigError, match=r"QUIRE_API_KEY.*--insecure"):
        wrap(APP, state, KeyRing({}))
    wrap(APP, state, KeyRing({KEY: None}))
    wrap(APP, make_state(host=host, insecure=True), KeyRing({}))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_this_machine_alone_needs_none(host: str) -> None:
    wrap(APP, make_state(host=host), KeyRing({}))


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", KEY)
    gated = wrap(APP, STATE)
    assert asyncio.run(ask(gated, "GET", "/version", []))[0] == 401
    assert asyncio.run(ask(gated, "GET", "/version", [(b"authorization", b"Bearer " + KEY.encode())]))[0] == 200
