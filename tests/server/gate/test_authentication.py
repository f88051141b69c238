import asyncio

import pytest

from quire.server.caller import ANONYMOUS, SCOPE_KEY, Caller
from quire.server.gate.authentication import MAX_TOKEN_BYTES, Authentication, bearer_token
from quire.server.gate.checks import Checks
from quire.server.gate.keys import KeyRing
from tests.server.gate.test_gate import ask


async def tell_caller(scope, receive, send) -> None:
    caller = scope[SCOPE_KEY]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"caller", caller.client_id.encode())]})
    await send({"type": "http.response.body", "body": caller.cache_salt.encode()})


def token_of(*values: bytes) -> bytes | None:
    return bearer_token({"headers": [(b"authorization", value) for value in values]})


def test_the_token_of_one_header() -> None:
    assert token_of(b"Bearer abc") == b"abc"
    assert token_of(b"bearer   abc ") == b"abc"
    assert token_of() is token_of(b"Bearer a", b"Bearer a") is token_of(b"Basic abc") is token_of(b"Bearer") is None
    assert token_of(b"Bearer " + b"a" * (MAX_TOKEN_BYTES + 1)) is None


def test_each_key_is_a_caller_of_its_own() -> None:
    app = Checks(tell_caller, Authentication(KeyRing({"key-one": "ann", "key-two": None})))

    async def caller(key: bytes) -> tuple[str, bytes]:
        _, headers, salt = await ask(app, "GET", "/", [(b"authorization", b"Bearer " + key)])
        return headers["caller"], salt

    name, salt = asyncio.run(caller(b"key-one"))
    other_name, other_salt = asyncio.run(caller(b"key-two"))
    assert name == "ann"
    assert other_name.startswith("key-")
    assert salt != other_salt
    assert len(salt) == 32


@pytest.mark.parametrize("headers", [[], [(b"authorization", b"Bearer anything")]])
def test_without_keys_everybody_is_nobody(headers: list[tuple[bytes, bytes]]) -> None:
    _, found, salt = asyncio.run(ask(Checks(tell_caller, Authentication(KeyRing({}))), "GET", "/", headers))
    assert (found["caller"], salt) == (ANONYMOUS.client_id, b"")


def test_a_probe_with_a_key_is_known_by_it() -> None:
    app = Checks(tell_caller, Authentication(KeyRing({"k": "ann"})))
    assert asyncio.run(ask(app, "GET", "/health/live", []))[1]["caller"] == ANONYMOUS.client_id
    assert asyncio.run(ask(app, "GET", "/health/live", [(b"authorization", b"Bearer k")]))[1]["caller"] == "ann"


def test_callers_are_values() -> None:
    assert Caller("a", "b") == Caller("a", "b")
