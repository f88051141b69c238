import asyncio

import pytest

from quire.server.gate.body import BodyLimit
from quire.server.request_record import current_record
from tests.server.served import CHAT, Answer, chat_body, serving


class Recorder:
    """An application that reads its body to the end."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.next: str = ""

    async def __call__(self, scope, receive, send) -> None:
        message = await receive()
        self.bodies.append(message["body"])
        assert not message["more_body"]
        self.next = (await receive())["type"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def run(parts: list[bytes | None], headers: list[tuple[bytes, bytes]] | None = None) -> tuple[list[dict], Recorder]:
    """Give a body in parts; None: the client leaves."""
    sent: list[dict] = []
    app = Recorder()
    messages = [
        {"type": "http.disconnect"} if part is None
        else {"type": "http.request", "body": part, "more_body": index + 1 < len(parts)}
        for index, part in enumerate(parts)
    ]  # fmt: skip

    async def receive() -> dict:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": headers or []}
    asyncio.run(BodyLimit(app, 10)(scope, receive, send))
    return sent, app


def test_a_body_arrives_whole_whatever_its_parts() -> None:
    sent, app = run([b"abc", b"", b"defghij"])
    assert app.bodies == [b"abcdefghij"]
    assert app.next == "http.disconnect", "afterwards the application hears when the client leaves"
    assert sent[0]["status"] == 200


@pytest.mark.parametrize("parts", [[b"a" * 11], [b"a"] * 11, [b"a" * 10, b"b"]])
def test_a_byte_too_many_is_413_and_the_application_hears_nothing(parts: list[bytes]) -> None:
    sent, app = run(parts)
    assert sent[0]["status"] == 413
    assert app.bodies == []


@pytest.mark.parametrize("length", [b"11", b"9" * 30])
def test_an_announced_one_is_not_even_read(length: bytes) -> None:
    assert run([b"a" * 11], [(b"content-length", length)])[0][0]["status"] == 413


def test_a_client_that_leaves_reaches_nothing() -> None:
    assert run([b"abc", None])[1].bodies == []


@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"identity, gzip"])
def test_nothing_is_decompressed(encoding: bytes) -> None:
    assert run([b"a"], [(b"content-encoding", encoding)])[0][0]["status"] == 415


def test_over_the_wire() -> None:
    async def main() -> None:
        async with serving(max_body_bytes=1000) as served:
            answer = await served.chat(text="a" * 2000)
            assert (answer.status, answer.code) == (413, "body_too_large")
            chunk = b"%x\r\n%s\r\n" % (900, b"a" * 900)
            head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" % CHAT.encode()
            answer = Answer(await served.raw(head + chunk * 5000))
            assert (answer.status, answer.code) == (413, "body_too_large")
            assert (await served.answer("POST", CHAT, body=chat_body())).status == 200
        assert current_record() is None

    asyncio.run(main())
