import asyncio

import pytest

from quire.server.gate.checks import Checks
from quire.server.gate.hosts import KnownHosts, is_loopback_address
from quire.server.options import ServerOptions
from tests.server.gate.test_gate import ask


async def answer(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def status(host_header: bytes, origin: bytes | None = None, **options: object) -> int:
    headers = [(b"host", host_header)] + ([] if origin is None else [(b"origin", origin)])
    return asyncio.run(ask(Checks(answer, KnownHosts(ServerOptions(**options))), "POST", "/", headers))[0]


@pytest.mark.parametrize(
    "host", [b"localhost", b"LOCALHOST:8000", b"127.0.0.1", b"127.0.0.1:1", b"[::1]", b"[::1]:8000", b"127.9.9.9:80"]
)
def test_this_machine_may_be_called_by_its_own_names(host: bytes) -> None:
    assert status(host) == 200


@pytest.mark.parametrize(
    "host",
    [b"evil.example", b"localhost.evil.example", b"localhost/v1/models?", b"localhost@evil.example", b"127.0.0.1.evil",
     b"", b"localhost:port", b"[::1", b"192.168.1.1", b"\xff", b"localhost#", b"0.0.0.0", b"localhost, evil"],
)  # fmt: skip
def test_other_names_are_a_rebound_page(host: bytes) -> None:
    assert status(host) == 403


def test_names_can_be_allowed() -> None:
    assert status(b"box.lan:8000", allowed_hosts=("Box.lan",)) == 200
    assert status(b"other.lan", allowed_hosts=("Box.lan",)) == 403


def test_a_public_server_is_called_by_any_name_unless_some_are_chosen() -> None:
    assert status(b"anything.example", host="0.0.0.0") == 200
    assert status(b"anything.example", host="0.0.0.0", allowed_hosts=("api.example",)) == 403
    assert status(b"api.example", host="0.0.0.0", allowed_hosts=("api.example",)) == 200


@pytest.mark.parametrize("origin", [b"http://evil.example", b"null", b"http://localhost:3000", b"", b"\xff"])
def test_pages_from_elsewhere_are_refused(origin: bytes) -> None:
    assert status(b"localhost:8000", origin) == 403
    assert status(b"localhost:8000", origin, host="0.0.0.0") == 403


@pytest.mark.parametrize("origin", [b"http://localhost:8000", b"https://localhost:8000"])
def test_its_own_page_is_not(origin: bytes) -> None:
    assert status(b"localhost:8000", origin) == 200


def test_origins_can_be_allowed() -> None:
    assert status(b"localhost", b"https://app.example", allowed_origins=("https://app.example",)) == 200
    assert status(b"localhost", b"https://app.example.evil", allowed_origins=("https://app.example",)) == 403
    assert status(b"localhost", b"null", allowed_origins=("*",)) == 200


def test_loopback_addresses() -> None:
    assert is_loopback_address("127.0.0.1")
    assert is_loopback_address("[::1]")
    assert not is_loopback_address("localhost")
