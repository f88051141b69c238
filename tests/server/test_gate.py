"""The gate: keys at every route (B7), hosts, origins, CORS, bodies, request ids."""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import ASGIApp

from quire.errors import ConfigError
from quire.server.gate import ADMIN_PATHS, MAX_TOKEN_BYTES, OPEN_PATHS, Gate, is_open
from quire.server.keys import ADMIN, KeyRing
from quire.server.models import Models
from quire.server.request_record import ANONYMOUS, RECORD_KEY
from quire.server.routes import make_app
from quire.server.supervisor import EngineState
from tests.server.fake_engine import in_loop, until
from tests.server.served import CHAT, ThreadedEngineClient, make_state, serving

KEY = "correct-horse-battery-staple"
CLIENT = ThreadedEngineClient()
STATE = make_state(CLIENT)
APP = make_app(STATE)
GATED = Gate(APP, STATE, KeyRing({KEY: "ci"}))


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
    "other header": [(b"api-key", KEY.encode())],
    "wrong, in Anthropic's header": [(b"x-api-key", b"wrong")],
    "Anthropic's header, doubled": [(b"x-api-key", KEY.encode())] * 2,
    "cookie": [(b"cookie", b"key=" + KEY.encode())],
    "host trick": [(b"host", b"localhost/health/live?")],
    "host of a probe": [(b"host", b"127.0.0.1/health/ready#")],
    "too long": [(b"authorization", b"Bearer " + b"a" * (MAX_TOKEN_BYTES + 1))],
    "forwarded path": [(b"x-original-url", b"/health/live"), (b"x-forwarded-prefix", b"/health/live")],
}


async def ask(
    app: ASGIApp, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes = b"{}", query: bytes = b""
) -> tuple[int, dict[str, str], bytes]:
    """Send one request straight into an ASGI application."""
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


def status(
    app: ASGIApp, *headers: tuple[bytes, bytes], method: str = "GET", path: str = "/", body: bytes = b"{}"
) -> int:
    return asyncio.run(ask(app, method, path, list(headers), body))[0]


async def tell(scope, receive, send) -> None:
    """Answer, as an application, with the caller and the body that it got."""
    caller = scope[RECORD_KEY].caller
    message = await receive()
    assert not message["more_body"]
    headers = [(b"caller", caller.client_id.encode()), (b"salt", caller.cache_salt.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": message["body"]})


def gate(app: ASGIApp = tell, keys: dict[str, str | None] | None = None, **options: object) -> Gate:
    return Gate(app, make_state(CLIENT, **options), KeyRing(keys or {}))


# --- Keys ---------------------------------------------------------------------------------------


SENDS_A_KEY = {"wrong", "prefix", "longer", "upper case", "unicode", "no UTF-8", "doubled key", "two keys",
               "lower-case scheme, wrong key", "wrong, in Anthropic's header"}  # fmt: skip


@pytest.mark.parametrize("case", WITHOUT_KEY)
@in_loop
async def test_no_route_answers_without_a_key(case: str) -> None:
    for method, path in ROUTES:
        if is_open(path):
            continue
        status, headers, body = await ask(GATED, method, path, WITHOUT_KEY[case])
        assert status == 401, (method, path)
        assert headers["www-authenticate"] == "Bearer"
        error = json.loads(body)["error"]
        code = error["details"]["error_code"] if path.startswith("/v1/messages") else error["code"]
        assert (error["type"], code) == ("authentication_error", "invalid_api_key")
        assert ("is not known" in error["message"]) == (case in SENDS_A_KEY)
        assert ("needs an API key" in error["message"]) == (case not in SENDS_A_KEY)
        assert not any(word in error["message"] for word in ("correct", "wrong", "horse"))


@pytest.mark.parametrize(
    "path",
    ["/page", "//page/app.js", "/PAGE/app.js", "/index.html", "/nowhere", "/v1",
     "/health/live/", "/health/live/../../metrics", "//health/live", "/HEALTH/LIVE", "/docs",
     "/openapi.json", "/health/live\x00", "/v1/models;/health/live"],
)  # fmt: skip
def test_no_other_path_answers_without_a_key(path: str) -> None:
    assert asyncio.run(ask(GATED, "GET", path, []))[0] == 401


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "DELETE", "TRACE", "PROPFIND"])
def test_no_other_method_answers_without_a_key(method: str) -> None:
    assert asyncio.run(ask(GATED, method, "/metrics", []))[0] == 401


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/ping"])
def test_probes_answer_without_a_key(path: str, method: str) -> None:
    assert path in OPEN_PATHS
    assert status(GATED, method=method, path=path) in (200, 503)  # ready: 503, no engine runs here


@pytest.mark.parametrize("scheme", [b"Bearer", b"bearer", b"BEARER"])
@in_loop
async def test_key_opens_every_route(scheme: bytes) -> None:
    for method, path in ROUTES:
        status, _, _ = await ask(GATED, method, path, [(b"authorization", scheme + b" " + KEY.encode())])
        assert status != 401, (method, path)


# --- Administrators -----------------------------------------------------------------------------

RIGHTS = {"key-a": "ann", "key-b": ADMIN, "key-c": None}


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
@pytest.mark.parametrize("method", ["POST", "GET"])
def test_only_an_administrators_key_changes_what_others_get(method: str, path: str) -> None:
    found = {}
    for options in ({}, {"any_client_is_admin": True}):
        app = gate(keys=RIGHTS, **options)
        found[bool(options)] = [
            status(app, (b"authorization", b"Bearer " + key.encode()), method=method, path=path) for key in RIGHTS
        ]
    assert found == {False: [403, 200, 403], True: [200] * 3}
    assert status(gate(), method=method, path=path) == 200, "the one user of a server on this machine"
    assert status(gate(host="0.0.0.0", insecure=True), method=method, path=path) == 403
    assert status(gate(keys=RIGHTS), method=method, path=path) == 401


@in_loop
async def test_refusal_names_the_key_and_the_option_that_give_the_right() -> None:
    _, _, body = await ask(gate(keys=RIGHTS), "POST", "/sleep", [(b"authorization", b"Bearer key-a")])
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == ("not_admin", "permission_error")
    assert all(part in error["message"] for part in ("/sleep", "--api-key-file", "'admin'", "--any-client-is-admin"))


@in_loop
async def test_keep_alive_that_unloads_a_model_sooner_needs_an_administrator() -> None:
    async with serving(keys=KeyRing(RIGHTS)) as server:
        server.app.state.models = Models([server.state], keep_alive_s=300)
        server.supervisor.state, server.state.holds_memory = EngineState.READY, True
        of_ann, of_admin = ({"Authorization": f"Bearer {key}"} for key in ("key-a", "key-b"))
        for keep_alive, code in ((0, 403), ("1m", 403), ("5m", 200), (-1, 200), (None, 200)):
            answer = await server.chat(headers=of_ann, keep_alive=keep_alive)
            assert answer.status == code, answer.body
            assert server.state.holds_memory
        assert (await server.chat(headers=of_admin, keep_alive=0)).status == 200
        await until(lambda: not server.state.holds_memory)


def test_websocket_is_closed_by_the_gate() -> None:
    sent = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    asyncio.run(GATED({"type": "websocket", "path": "/", "headers": []}, None, send))
    assert [message["type"] for message in sent] == ["websocket.close"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_public_address_needs_a_key_or_insecure(host: str) -> None:
    state = make_state(host=host)
    with pytest.raises(ConfigError, match=r"QUIRE_API_KEY.*--insecure"):
        Gate(APP, state, KeyRing({}))
    Gate(APP, state, KeyRing({KEY: None}))
    Gate(APP, make_state(host=host, insecure=True), KeyRing({}))


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", KEY)
    gated = Gate(APP, STATE)
    assert asyncio.run(ask(gated, "GET", "/version", []))[0] == 401
    assert asyncio.run(ask(gated, "GET", "/version", [(b"authorization", b"Bearer " + KEY.encode())]))[0] == 200


def test_each_key_is_a_caller_with_its_own_salt() -> None:
    app = gate(keys={"key-one": "ann", "key-two": None})

    def caller(*headers: tuple[bytes, bytes], path: str = "/") -> tuple[str, str]:
        found = asyncio.run(ask(app, "GET", path, list(headers)))[1]
        return found["caller"], found["salt"]

    name, salt = caller((b"authorization", b"Bearer key-one"))
    other_name, other_salt = caller((b"authorization", b"Bearer key-two"))
    assert (name, other_name[:4], len(salt), len(other_salt)) == ("ann", "key-", 32, 32)
    assert salt != other_salt
    assert caller(path="/ping") == (ANONYMOUS.client_id, "")
    assert caller((b"authorization", b"Bearer key-one"), path="/ping")[0] == "ann"
    assert caller((b"x-api-key", b"key-one")) == (name, salt)
    assert caller((b"authorization", b"Bearer key-one"), (b"x-api-key", b"key-two"))[0] == "ann"


# --- Hosts and origins --------------------------------------------------------------------------


def called_as(name: bytes, origin: bytes | None = None, **options: object) -> int:
    headers = [(b"host", name)] + ([] if origin is None else [(b"origin", origin)])
    return status(gate(insecure=True, **options), *headers, method="POST")


@pytest.mark.parametrize(
    "host", [b"localhost", b"LOCALHOST:8000", b"127.0.0.1", b"127.0.0.1:1", b"[::1]", b"[::1]:8000", b"127.9.9.9:80"]
)
def test_local_server_answers_to_names_of_this_machine(host: bytes) -> None:
    assert called_as(host) == 200


@pytest.mark.parametrize(
    "host",
    [b"evil.example", b"localhost.evil.example", b"localhost/v1/models?", b"localhost@evil.example", b"127.0.0.1.evil",
     b"", b"localhost:port", b"[::1", b"192.168.1.1", b"\xff", b"localhost#", b"0.0.0.0", b"localhost, evil"],
)  # fmt: skip
def test_local_server_refuses_other_host_names(host: bytes) -> None:
    assert called_as(host) == 403


def test_allowed_hosts_add_names_and_bound_those_of_a_public_server() -> None:
    assert called_as(b"box.lan:8000", allowed_hosts=("Box.lan",)) == 200
    assert called_as(b"other.lan", allowed_hosts=("Box.lan",)) == 403
    assert called_as(b"anything.example", host="0.0.0.0") == 200
    assert called_as(b"anything.example", host="0.0.0.0", allowed_hosts=("api.example",)) == 403
    assert called_as(b"api.example", host="0.0.0.0", allowed_hosts=("api.example",)) == 200


@pytest.mark.parametrize("origin", [b"http://evil.example", b"null", b"http://localhost:3000", b"", b"\xff"])
def test_pages_of_other_origins_are_refused(origin: bytes) -> None:
    assert called_as(b"localhost:8000", origin) == 403
    assert called_as(b"localhost:8000", origin, host="0.0.0.0") == 403


def test_pages_of_the_server_and_of_allowed_origins_may_call() -> None:
    assert called_as(b"localhost:8000", b"http://localhost:8000") == 200
    assert called_as(b"localhost:8000", b"https://localhost:8000") == 200
    assert called_as(b"localhost", b"https://app.example", allowed_origins=("https://App.example",)) == 200
    assert called_as(b"localhost", b"https://app.example.evil", allowed_origins=("https://app.example",)) == 403
    assert called_as(b"localhost", b"null", allowed_origins=("*",)) == 200


@pytest.mark.parametrize("site", [b"cross-site", b"same-site", b"", b"other"])
def test_requests_of_pages_of_other_sites_are_refused_beyond_the_page(site: bytes) -> None:
    """Their pictures, scripts, frames and links: browsers send no Origin with these."""
    app, header = gate(), (b"sec-fetch-site", site)
    paths = ("/xray/explain", "/xray/ranks", "/xray/events", "/metrics", "/v1/models", "/version", "/page")
    assert {status(app, header, method=method, path=path) for path in paths for method in ("GET", "HEAD")} == {403}
    assert {status(app, header, path=path) for path in ("/", "/page/app.js", "/health/live", "/ping")} == {200}
    assert status(app, header, (b"sec-fetch-site", b"none"), path="/metrics") == 403
    assert status(app, header, (b"origin", b"http://localhost"), path="/metrics") == 200
    assert status(app, header, (b"origin", b"https://a.example"), path="/metrics") == 403
    allowing = gate(allowed_origins=("https://a.example",))
    assert status(allowing, header, (b"origin", b"https://a.example"), path="/metrics") == 200
    assert status(allowing, header, path="/metrics") == 403
    assert status(gate(allowed_origins=("*",)), header, path="/metrics") == 200


@pytest.mark.parametrize("headers", [[], [(b"sec-fetch-site", b"same-origin")], [(b"sec-fetch-site", b"none")]])
def test_programs_and_the_page_itself_may_call(headers: list[tuple[bytes, bytes]]) -> None:
    for path in ("/xray/explain", "/metrics", "/"):
        assert status(gate(), *headers, path=path) == 200


# --- CORS ---------------------------------------------------------------------------------------

ORIGIN = b"https://app.example"
PREFLIGHT = [(b"origin", ORIGIN), (b"access-control-request-method", b"POST"),
             (b"access-control-request-headers", b"authorization")]  # fmt: skip


@pytest.mark.parametrize("origins", [("https://App.example",), ("*",)])
def test_page_of_an_allowed_origin_may_read_answers_and_refusals(origins: tuple[str, ...]) -> None:
    app = gate(keys={KEY: None}, allowed_origins=origins)
    for key, expected in ((KEY.encode(), 200), (b"wrong", 401)):
        code, headers, _ = asyncio.run(
            ask(app, "POST", "/tokenize", [(b"origin", ORIGIN), (b"authorization", b"Bearer " + key)])
        )
        assert (code, headers["access-control-allow-origin"] in (ORIGIN.decode(), "*")) == (expected, True)
        assert "retry-after" in headers["access-control-expose-headers"]


def test_preflight_needs_no_key_and_reaches_no_route() -> None:
    app = gate(keys={KEY: None}, allowed_origins=("https://app.example",))
    code, headers, _ = asyncio.run(ask(app, "OPTIONS", CHAT, PREFLIGHT))
    assert (code, headers["access-control-allow-headers"]) == (200, "authorization")
    assert "caller" not in headers


@pytest.mark.parametrize("options", [{}, {"allowed_origins": ("https://other.example",)}])
def test_other_origins_get_no_cors_headers(options: dict[str, Any]) -> None:
    for keys, code in (({KEY: None}, 401), ({}, 403)):
        found = asyncio.run(ask(gate(keys=keys, **options), "OPTIONS", CHAT, PREFLIGHT))
        assert found[0] == code
        assert not [name for name in found[1] if name.startswith("access-control")]


# --- Bodies -------------------------------------------------------------------------------------


def with_body(
    parts: list[bytes | None], headers: list[tuple[bytes, bytes]] | None = None
) -> tuple[int | None, list[bytes]]:
    """Send a body in parts; None: the client leaves. Returns: status, and the bodies that the application got."""
    bodies: list[bytes] = []
    sent: list[Any] = []
    messages: list[Any] = [
        {"type": "http.disconnect"} if part is None
        else {"type": "http.request", "body": part, "more_body": index + 1 < len(parts)}
        for index, part in enumerate(parts)
    ]  # fmt: skip

    async def app(scope, receive, send) -> None:
        bodies.append((await receive())["body"])
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"host", b"localhost"), *(headers or [])]}
    asyncio.run(gate(app, max_body_bytes=10)(scope, receive, send))
    return (sent[0]["status"] if sent else None), bodies


def test_application_gets_the_body_whole() -> None:
    assert with_body([b"abc", b"", b"defghij"])[1] == [b"abcdefghij"]


@pytest.mark.parametrize("parts", [[b"a" * 11], [b"a"] * 11, [b"a" * 10, b"b"]])
def test_body_over_the_limit_is_answered_413(parts: list[bytes | None]) -> None:
    assert with_body(parts) == (413, [])


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([(b"content-length", b"11")], 413), ([(b"content-length", b"9" * 30)], 413),
        ([(b"content-encoding", b"gzip")], 415), ([(b"content-encoding", b"identity, br")], 415),
    ],
)  # fmt: skip
def test_headers_alone_refuse_a_body(headers: list[tuple[bytes, bytes]], expected: int) -> None:
    assert with_body([], headers) == (expected, [])


def test_client_that_leaves_within_its_body_reaches_nothing() -> None:
    assert with_body([b"abc", None]) == (None, [])


# --- Request ids and exceptions -----------------------------------------------------------------


@pytest.mark.parametrize("given", [b"a", b"trace-1.2_3", b"x" * 128])
def test_plain_request_id_is_kept(given: bytes) -> None:
    assert asyncio.run(ask(gate(), "GET", "/", [(b"x-request-id", given)]))[1]["x-request-id"] == given.decode()


@pytest.mark.parametrize(
    "given",
    [[b""], [b"a b"], [b"x" * 129], [b"a\r\nSet-Cookie: b"], [b"\x1b[31m"], [b"\xc3\xa9"], [b"a/b"], [b"a", b"b"]],
)
def test_any_other_request_id_is_replaced(given: list[bytes]) -> None:
    found = asyncio.run(ask(gate(), "GET", "/", [(b"x-request-id", value) for value in given]))[1]["x-request-id"]
    assert (found[:4], len(found)) == ("req-", 36)


def test_exception_becomes_a_500_without_its_message() -> None:
    async def broken(scope, receive, send) -> None:
        raise ValueError("secrets at 0x7f00")

    code, headers, body = asyncio.run(ask(gate(broken), "GET", "/", []))
    assert (code, b"secrets" in body, "x-request-id" in headers) == (500, False, True)


def test_exception_within_an_answer_breaks_it_off() -> None:
    async def broken(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("too late")

    with pytest.raises(ValueError, match="too late"):
        asyncio.run(ask(gate(broken), "GET", "/", []))


@in_loop
async def test_draining_server_refuses_work_and_answers_probes() -> None:
    async with serving() as served:
        served.state.is_draining = True
        answer = await served.chat()
        assert (answer.status, answer.code) == (503, "draining")
        assert (answer.headers["retry-after"], answer.headers["connection"]) == ("30", "close")
        for path, expected in (("/health/live", 200), ("/health/ready", 503), ("/ping", 503), ("/metrics", 200)):
            assert (await served.answer("GET", path)).status == expected
