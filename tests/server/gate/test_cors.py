import asyncio

import pytest

from quire.server.gate import wrap
from quire.server.gate.cors import Cors
from quire.server.gate.keys import KeyRing
from tests.server.gate.test_gate import APP, KEY, ask
from tests.server.served import make_state

ORIGIN = b"https://app.example"
PREFLIGHT = [(b"origin", ORIGIN), (b"access-control-request-method", b"POST")]


async def answer(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def headers_of(app: object, headers: list[tuple[bytes, bytes]], method: str = "GET") -> tuple[int, dict[str, str]]:
    return asyncio.run(ask(app, method, "/v1/chat/completions", headers))[:2]


def test_a_chosen_origin_may_read() -> None:
    status, headers = headers_of(Cors(answer, ["https://App.example"]), [(b"origin", ORIGIN)])
    assert status == 200
    assert headers["access-control-allow-origin"] == ORIGIN.decode()
    assert headers["vary"] == "Origin"


@pytest.mark.parametrize("origin", [b"https://other.example", b"null", b"https://app.example:444"])
def test_others_may_not(origin: bytes) -> None:
    assert (
        "access-control-allow-origin" not in headers_of(Cors(answer, ["https://app.example"]), [(b"origin", origin)])[1]
    )


def test_a_preflight_needs_no_key_and_reaches_nothing() -> None:
    gated = wrap(APP, make_state(allowed_origins=("https://app.example",)), KeyRing({KEY: None}))
    status, headers = headers_of(gated, [*PREFLIGHT, (b"access-control-request-headers", b"authorization")], "OPTIONS")
    assert status == 204
    assert headers["access-control-allow-headers"] == "authorization"
    assert headers_of(gated, [(b"origin", ORIGIN)], "POST")[0] == 401


def test_odd_header_names_are_not_repeated() -> None:
    asked = [*PREFLIGHT, (b"access-control-request-headers", b"a: b\x0b")]
    assert "access-control-allow-headers" not in headers_of(Cors(answer, ["*"]), asked, "OPTIONS")[1]


def test_it_is_off_unless_origins_are_chosen() -> None:
    gated = wrap(APP, make_state(), KeyRing({KEY: None}))
    status, headers = headers_of(gated, PREFLIGHT, "OPTIONS")
    assert status == 401
    assert not [name for name in headers if name.startswith("access-control")]
