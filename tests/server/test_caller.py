from starlette.requests import Request

from quire.server.caller import ANONYMOUS, SCOPE_KEY, Caller, caller_of


def test_the_caller_is_the_gates() -> None:
    scope = {"type": "http", "headers": [(b"x-client-id", b"root")]}
    assert caller_of(Request(scope)) is ANONYMOUS
    caller = Caller("ann", "salt")
    assert caller_of(Request(scope | {SCOPE_KEY: caller})) is caller
