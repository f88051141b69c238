"""Answers of a server over real sockets: where their framing ends them, and what a slow reader holds back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx2
import pytest

from quire_workshop.load_client import MAX_HELD_BYTES, Upstream, UpstreamAnswer
from tests.server.fake_engine import in_loop

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
ENDLESS = b"HTTP/1.1 200 OK\r\n\r\nabc"


def response(status: int, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@contextlib.asynccontextmanager
async def answering(data: bytes, closes: bool = False) -> AsyncIterator[tuple[Upstream, list[bytes]]]:
    """Start a server that answers each request with these bytes; yields its `Upstream`, and the heads that it gets."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info("peername")[1]
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                heads.append(b"%d %b" % (port, head))
                writer.write(data)
                await writer.drain()
                if closes:
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None)
    try:
        yield upstream, heads
    finally:
        upstream.close()
        server.close()


async def whole(answer: UpstreamAnswer) -> bytes:
    with contextlib.closing(answer):
        parts = [await answer.read()]
        while not answer.is_read:
            parts.append(await answer.read())
        return b"".join(parts)


@pytest.mark.parametrize(
    ("data", "closes", "body", "is_kept"),
    [
        (response(200, b"abc"), False, b"abc", True),
        (CHUNKED + b"2\r\nde\r\n0\r\nX: y\r\n\r\n", False, b"abcde", True),
        (b"HTTP/1.1 103 X\r\nLink: z\r\n\r\n" + response(200, b"abc"), False, b"abc", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", False, b"", True),
        (response(200, b"abc", "Connection: close"), True, b"abc", False),
        (response(200, b"abc") + b"HTTP/1.1 200 OK\r\n\r\n", False, b"abc", False),
        (ENDLESS, True, b"abc", False),
        (CHUNKED, True, None, False),
        (response(200, b"abc")[:-1], True, None, False),
        (b"220 smtp.example.org\r\n", False, None, False),
    ],
    ids=["length", "chunks", "status 103", "empty", "close", "two", "no length", "cut chunks", "cut", "not HTTP"],
)
@in_loop
async def test_answer_ends_where_its_framing_says(data: bytes, closes: bool, body: bytes | None, is_kept: bool) -> None:
    async with answering(data, closes) as (upstream, heads):
        for _ in range(2):
            answer = await upstream.begin("GET", b"/x?y", [], b"")
            if body is None:
                with pytest.raises(httpx2.RemoteProtocolError):
                    await whole(answer)
            else:
                assert await whole(answer) == body
                assert (b"link", b"z") not in answer.headers
                assert (b"x", b"y") not in answer.headers
        assert (len({head.split()[0] for head in heads}) == 1) == is_kept


@in_loop
async def test_answer_to_head_has_no_body() -> None:
    async with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n") as (upstream, _):
        for _ in range(2):
            answer = await upstream.begin("HEAD", b"/", [], b"")
            assert (await whole(answer), dict(answer.headers)) == (b"", {b"content-length": b"100"})


@in_loop
async def test_slow_reader_holds_the_server_back() -> None:
    body = bytes(64 << 20)
    async with answering(response(200, body)) as (upstream, _):
        answer = await upstream.begin("GET", b"/", [], b"")
        await asyncio.sleep(0.1)
        first = await answer.read()
        assert len(first) < MAX_HELD_BYTES + (1 << 20), "the kernel and the server hold the rest"
        assert first + await whole(answer) == body
