import asyncio
from typing import Any

from quire.server.errors import ApiError
from quire.server.gate.checks import Checks
from tests.server.gate.test_gate import ask


class Asked:
    """A check that refuses with a status, or nobody, and counts how often it was asked."""

    def __init__(self, status: int | None) -> None:
        self.status = status
        self.num_asked = 0

    def refusal(self, scope: Any) -> ApiError | None:
        self.num_asked += 1
        return None if self.status is None else ApiError(self.status, "no")


async def answer(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_the_first_refusal_is_the_answer_and_the_checks_behind_it_are_not_asked() -> None:
    first, second, third = Asked(None), Asked(401), Asked(429)
    assert asyncio.run(ask(Checks(answer, first, second, third), "GET", "/", []))[0] == 401
    assert (first.num_asked, second.num_asked, third.num_asked) == (1, 1, 0)


def test_whoever_has_passed_is_not_asked_again() -> None:
    check = Asked(None)
    checks = Checks(answer, check)
    scope: dict[str, object] = {}
    assert checks.refusal(scope) is None
    sent: list[Any] = []

    async def main() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        await checks(scope, None, send)  # type: ignore[arg-type]

    asyncio.run(main())
    assert sent[0]["status"] == 200
    assert check.num_asked == 1


def test_whoever_was_refused_is_asked_again() -> None:
    check = Asked(429)
    checks = Checks(answer, check)
    scope: dict[str, object] = {}
    assert checks.refusal(scope) is not None
    check.status = None
    assert checks.refusal(scope) is None
