from starlette.requests import Request

from quire.server.caller import ANONYMOUS, SCOPE_KEY, Caller, caller_of


def test_the_caller_is_the_gates() -> None:
    scope = {"type": "http", "headers": [(b"x-client-id", b"root")]}
    assert caller_of(Request(scope)) is ANONYMOUS
    caller = Caller("ann", "salt")
    assert caller_of(Request(scope | {SCOPE_KEY: caller})) is caller


def test_a_request_is_its_callers_and_its_salt_only_adds_to_the_keys() -> None:
    caller = Caller("ann", "key's ")
    assert caller.identity(None) == {"priority": 0, "client_id": "ann", "cache_salt": "key's "}
    assert caller.identity(-3, "own") == {"priority": -3, "client_id": "ann", "cache_salt": "key's own"}
