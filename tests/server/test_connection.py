"""Limits of a connection, over real sockets and with shortened times."""

import asyncio
import contextlib
import json
import re
import socket
import time

import psutil
import pytest

from quire.server import connection as limits
from quire.server.keys import KeyRing
from tests.server.fake_engine import in_loop, until
from tests.server.served import CHAT, Answer, Served, chat_body, quick, serving

HEAD = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
KEY = b"correct-horse-battery-staple"


def post(body: bytes, *headers: bytes, path: bytes = CHAT.encode()) -> bytes:
    lines = [b"POST " + path + b" HTTP/1.1", b"Host: localhost", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def many_headers(number: int, num_bytes: int) -> bytes:
    return HEAD + b"".join(b"X-%d: %s\r\n" % (index, b"a" * num_bytes) for index in range(number)) + b"\r\n"


CHUNKED = b"Transfer-Encoding: chunked"
REFUSED: dict[tuple[int, str], dict[str, bytes]] = {
    (400, "malformed_request"): {
        "no HTTP": b"NONSENSE\r\n\r\n",
        "space in a name": b"GET /version HTTP/1.1\r\nHost : localhost\r\n\r\n",
        "NUL": HEAD + b"X: a\x00b\r\n\r\n",
        "version": b"GET /version HTTP/9.9\r\nHost: localhost\r\n\r\n",
        "no host": b"GET /version HTTP/1.1\r\n\r\n",
        "two hosts": HEAD + b"Host: elsewhere\r\n\r\n",
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    }
    | {
        " and ".join(header.decode() for header in headers): post(b"2\r\n{}\r\n0\r\n\r\n", *headers)
        for headers in [
            (b"Content-Length: 2", CHUNKED),
            (CHUNKED, b"Content-Length: 2"),
            (b"Content-Length: 2", b"Content-Length: 3"),
            (b"Content-Length: 2", b"Content-Length: 2"),
            (CHUNKED, b"Transfer-Encoding: identity"),
            (b"Transfer-Encoding: gzip, chunked",),
            (b"Transfer-Encoding: xchunked",),
            (b"Content-Length: -1",),
            (b"Content-Length: 0x2",),
            (b"Content-Length: 99999999999999999999999",),
        ]
    },
    (431, "headers_too_large"): {
        "one long": many_headers(1, limits.MAX_HEADER_BYTES + 1),
        "too many": many_headers(limits.MAX_HEADERS, 1),
        "large together": many_headers(40, 1000),
        "without an end": HEAD + b"X: " + b"a" * (8 << 20),
    },
    (414, "url_too_long"): {"long": b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"},
    (400, "too_many_chunks"): {
        "tiny": post(b"1\r\na\r\n" * (limits.MAX_FRAMING_BYTES // 5), CHUNKED),
        "extension": post(b"1;" + b"a" * (4 << 20) + b"\r\na\r\n0\r\n\r\n", CHUNKED),
    },
}


@in_loop
async def test_invalid_and_oversized_requests_are_refused_in_openais_shape() -> None:
    async with serving() as served:
        for expected, requests in REFUSED.items():
            for name, data in requests.items():
                answer = Answer(await served.raw(data))
                assert (answer.status, answer.code) == expected, name
                assert answer.headers["content-type"] == "application/json"
                assert set(answer.json["error"]) == {"message", "type", "param", "code"}
        headers = {f"X-{number}": "a" * 200 for number in range(limits.MAX_HEADERS - 2)}
        assert (await served.answer("GET", "/version", headers=headers)).status == 200


@in_loop
async def test_chunked_body_is_read_and_its_trailers_are_no_headers() -> None:
    async with serving() as served:
        body = json.dumps(chat_body()).encode()
        pieces = [body[at : at + 7] for at in range(0, len(body), 7)]
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        end = b"0\r\nX-Request-Id: from-the-trailer\r\n\r\n"
        headers = (CHUNKED, b"Content-Type: application/json", b"Connection: close")
        answer = Answer(await served.raw(post(chunks + end, *headers)))
        assert (answer.status, answer.json["usage"]["completion_tokens"]) == (200, 4)
        assert answer.headers["x-request-id"] != "from-the-trailer"


@pytest.mark.parametrize(
    "data",
    [HEAD, b"GET /ver", post(b'{"mod', b"Content-Length: 100"), post(b"5\r\nab", b"Transfer-Encoding: chunked")],
    ids=["headers", "request line", "body", "chunk"],
)
@in_loop
async def test_request_that_never_ends_is_answered_408(data: bytes) -> None:
    async with serving(connection=quick(READ_TIMEOUT_S=0.3)) as served:
        answer = Answer(await served.raw(data))
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert served.server_requests() == 0


@in_loop
async def test_slow_input_does_not_prolong_the_time() -> None:
    async with serving(connection=quick(READ_TIMEOUT_S=0.5)) as served:
        for drop in (b"X: a\r\n", b"\r\n"):
            reader, writer = await served.connect()
            writer.write(HEAD if drop.startswith(b"X") else drop)
            received = asyncio.create_task(reader.read())
            for _ in range(200):
                if received.done():
                    break
                writer.write(drop)
                await asyncio.sleep(0.02)
            assert Answer(await received).status == 408
            writer.close()


@in_loop
async def test_stray_bytes_after_a_request_do_not_prevent_its_answer() -> None:
    async with serving(connection=quick(READ_TIMEOUT_S=0.1, KEEP_ALIVE_S=0.3)) as served:
        served.executor.in_step = lambda step: time.sleep(0.1)
        body = json.dumps(chat_body()).encode()
        length = b"Content-Length: %d" % len(body)
        answer = Answer(await served.raw(post(body, length, b"Content-Type: application/json") + b"\r\nGET"))
        assert answer.status == 200


@pytest.mark.parametrize(
    "tail", [b"POST /a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{", b"GET /version HT"]
)
@in_loop
async def test_pipelined_request_that_never_ends_is_answered_408(tail: bytes) -> None:
    async with serving(connection=quick(READ_TIMEOUT_S=0.2)) as served:
        data = await served.raw(HEAD + b"\r\n" + tail, timeout_s=10)
        assert data.count(b"HTTP/1.1 200 OK") == 1
        assert data.count(b"HTTP/1.1 408") == 1


@in_loop
async def test_idle_connection_is_closed() -> None:
    async with serving(connection=quick(KEEP_ALIVE_S=0.2)) as served:
        assert (await served.raw(HEAD + b"\r\n")).startswith(b"HTTP/1.1 200")


@in_loop
async def test_flood_of_pipelined_requests_is_cut() -> None:
    async with serving() as served:
        await served.raw((HEAD + b"\r\n") * 5000)
        assert (await served.answer("GET", "/version")).status == 200
        page = (await served.answer("GET", "/metrics")).body.decode()
        counted = re.findall(r"quire_http_requests_total{.*} (\d+)", page)
        assert 0 < sum(map(int, counted)) < 100


@in_loop
async def test_upgrade_is_answered_as_an_ordinary_request() -> None:
    async with serving() as served:
        data = HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + b"\x81\x85garbage"
        assert Answer(await served.raw(data)).status == 200


async def unread(served: Served, data: bytes) -> socket.socket:
    """Connect a client that sends requests and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", served.port))
    await loop.sock_sendall(client, data)
    return client


async def seconds_until_cut(served: Served, client: socket.socket, chunk_bytes: int, limit_s: float) -> float | None:
    """Read `chunk_bytes` every 20 ms. Returns: when the connection was reset; None within the limit."""
    start_s = time.monotonic()
    while time.monotonic() < start_s + limit_s:
        await asyncio.sleep(0.02)
        if client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return time.monotonic() - start_s
        try:
            client.recv(chunk_bytes)
        except BlockingIOError:
            continue
        except ConnectionError:
            return time.monotonic() - start_s
    return None


LARGE = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 8
"""Answers that the kernel's buffers do not hold."""


@in_loop
async def test_reader_of_finished_answers_is_cut_unless_it_makes_progress() -> None:
    async with serving(connection=quick(TAKE_TIMEOUT_S=0.4, KEEP_ALIVE_S=60)) as served:
        stuck, steady = await unread(served, LARGE), await unread(served, LARGE)
        times = await asyncio.gather(
            seconds_until_cut(served, stuck, 1, 20), seconds_until_cut(served, steady, 1 << 14, 1.5)
        )
        assert times[0] is not None
        assert times[1] is None
        stuck.close()
        steady.close()


@in_loop
async def test_reader_that_pauses_a_stream_is_cut_and_others_are_served() -> None:
    scheduler = {"max_model_len": 1024, "num_blocks": 4000, "max_num_seqs": 64}
    body = json.dumps(chat_body(stream=True, max_tokens=900, n=8, ignore_eos=True)).encode()
    request = post(body, b"Content-Length: %d" % len(body), b"Content-Type: application/json")
    async with serving(connection=quick(WRITE_TIMEOUT_S=1.0), scheduler=scheduler) as served:
        clients = [await unread(served, request) for _ in range(2)]
        for _ in range(5):
            answer = await served.chat(stream=True)
            assert (answer.status, answer.body[-14:]) == (200, b"data: [DONE]\n\n")
            here = served.server.server_state.connections
            assert max((item.transport.get_write_buffer_size() for item in here), default=0) < 128 << 10
        await until(lambda: not served.server.server_state.connections)
        await served.until_idle()
        for client in clients:
            assert client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            client.close()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Tell whether the server has closed a connection, after what it has sent."""
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(0.1):
            while await reader.read(1 << 16):
                pass
            return True
    return reader.exception() is not None


@in_loop
async def test_new_connection_replaces_the_oldest_without_a_head_then_without_a_body_then_an_idle_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits.Places, "PATIENCE_S", 0.0)
    async with serving(connection=quick(MAX_CONNECTIONS=4)) as served:
        here = served.server.server_state.connections
        starts = {
            "idle": HEAD + b"\r\n",
            "no body": post(b"{", b"Content-Length: 2"),
            "no head": HEAD,
            "nothing": b"",
        }
        pairs = {}
        for name, start in starts.items():
            pairs[name] = await served.connect()
            pairs[name][1].write(start)
            await until(lambda: len(here) == len(pairs))
            await asyncio.sleep(0.05)
        for number, name in enumerate(("no head", "nothing", "no body", "idle"), 1):
            reader, writer = await served.connect()
            writer.write(HEAD + b"\r\n")
            await reader.readuntil(b"\r\n\r\n")
            assert await is_closed(pairs.pop(name)[0]), number
            pairs[str(number)] = reader, writer
            assert [other for other, (left, _) in pairs.items() if await is_closed(left)] == []
        for _, writer in pairs.values():
            writer.close()


@in_loop
async def test_new_connection_replaces_an_idle_one_before_requests_that_have_just_begun() -> None:
    async with serving(connection=quick(MAX_CONNECTIONS=4)) as served:
        here = served.server.server_state.connections
        idle = await served.connect()
        idle[1].write(HEAD + b"\r\n")
        await idle[0].readuntil(b"\r\n\r\n")
        begun = [await served.connect() for _ in range(3)]
        await until(lambda: len(here) == 4)
        assert (await served.answer("GET", "/version")).status == 200
        assert await is_closed(idle[0])
        assert not any([await is_closed(reader) for reader, _ in begun])
        for _, writer in begun:
            writer.close()


@in_loop
async def test_last_places_are_for_probes_while_all_others_run_requests() -> None:
    async with serving(connection=quick(MAX_CONNECTIONS=8), scheduler={"max_num_seqs": 8}) as served:
        served.executor.in_step = lambda step: time.sleep(0.01)
        body = json.dumps(chat_body(stream=True, max_tokens=10_000, ignore_eos=True)).encode()
        streams = [await served.connect() for _ in range(7)]
        for reader, writer in streams:
            writer.write(post(body, b"Content-Length: %d" % len(body), b"Content-Type: application/json"))
            await reader.readuntil(b"\r\n\r\n")
        refused = await served.answer("GET", "/version")
        assert (refused.status, refused.code) == (503, "too_many_connections")
        assert (await served.answer("GET", "/health/live")).status == 200
        for _ in range(3):  # half requests in the place of a probe
            streams.append(await served.connect())
            streams[-1][1].write(HEAD)
            assert (await served.answer("GET", "/health/ready?verbose")).status == 200
        for _, writer in streams:
            writer.close()


@in_loop
async def test_limit_of_connections_follows_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (1024, 1024))
    async with serving() as served:
        _, writer = await served.connect()
        await until(lambda: bool(served.server.server_state.connections))
        (connection,) = served.server.server_state.connections
        assert connection._max_connections() == 1024 - limits.SPARE_FILES
        writer.close()


@in_loop
async def test_answers_are_sent_without_delay() -> None:
    async with serving() as served:
        _, writer = await served.connect()
        try:
            while not served.server.server_state.connections:
                await asyncio.sleep(0.005)
            (connection,) = served.server.server_state.connections
            accepted = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        finally:
            writer.close()


@in_loop
async def test_connections_that_come_and_go_leave_no_files_open() -> None:
    async with serving() as served:
        await served.answer("GET", "/version")
        before = psutil.Process().num_fds()
        for _ in range(10):
            pairs = await asyncio.gather(*(served.connect() for _ in range(25)))
            for at, (_, writer) in enumerate(pairs):
                if at % 2:
                    writer.write(b"GET /version HT")
                writer.close()
            assert (await served.answer("GET", "/version")).status == 200
        await until(lambda: not served.server.server_state.connections)
        assert psutil.Process().num_fds() <= before + 2


REFUSED_AT_THE_HEAD = {
    401: (b"Host: localhost",),
    403: (b"Host: elsewhere", b"Authorization: Bearer " + KEY),
    415: (b"Host: localhost", b"Authorization: Bearer " + KEY, b"Content-Encoding: gzip"),
}


def head_of(status: int, num_bytes: int, *more: bytes) -> bytes:
    """Return the head of a request that is refused before its body is read."""
    length = b"Content-Length: %d" % num_bytes
    return b"\r\n".join((b"POST /tokenize HTTP/1.1", *REFUSED_AT_THE_HEAD[status], length, *more)) + b"\r\n\r\n"


async def next_answer(reader: asyncio.StreamReader) -> Answer:
    """Read an answer and no more than it."""
    head = await reader.readuntil(b"\r\n\r\n")
    return Answer(head + await reader.readexactly(int(Answer(head).headers["content-length"])))


@pytest.mark.parametrize("status", REFUSED_AT_THE_HEAD)
@in_loop
async def test_refused_request_whose_body_follows_at_once_keeps_its_connection(status: int) -> None:
    async with serving(keys=KeyRing({KEY.decode(): "ci"}), connection=quick(REST_S=20.0)) as served:
        reader, writer = await served.connect()
        for num_bytes in (0, 10, 20_000):
            writer.write(head_of(status, num_bytes))
            await asyncio.sleep(0.03)
            writer.write(b"x" * num_bytes)
            answer = await next_answer(reader)
            assert (answer.status, answer.headers.get("connection")) == (status, None)
        writer.close()


@pytest.mark.parametrize("status", REFUSED_AT_THE_HEAD)
@pytest.mark.parametrize("sent", [b"", b"{", b"{" * (1 << 20)], ids=["nothing", "a byte", "much"])
@in_loop
async def test_refusal_of_a_body_that_is_not_there_says_that_the_connection_ends(status: int, sent: bytes) -> None:
    rest_s = 60.0 if len(sent) > limits.MAX_REST_BYTES else 0.1
    async with serving(keys=KeyRing({KEY.decode(): "ci"}), connection=quick(REST_S=rest_s)) as served:
        for more in ((), (b"Connection: close",)):
            # Read to the end: a connection closed with input unread would lose the answer.
            answer = Answer(await served.raw(head_of(status, 2 << 20, *more) + sent))
            assert (answer.status, answer.headers.get("connection")) == (status, "close")
            assert answer.code


@in_loop
async def test_refusal_of_a_body_that_is_yet_to_be_asked_for_says_at_once_that_the_connection_ends() -> None:
    async with serving(keys=KeyRing({KEY.decode(): "ci"}), connection=quick(REST_S=60.0)) as served:
        answer = Answer(await served.raw(head_of(401, 10, b"Expect: 100-continue")))
        assert (answer.status, answer.headers.get("connection")) == (401, "close")


@in_loop
async def test_bodies_without_a_key_take_no_memory() -> None:
    async with serving(keys=KeyRing({KEY.decode(): "ci"}), connection=quick(LINGER_S=60.0, REST_S=0.1)) as served:
        here = served.server.server_state.connections
        pairs = [await served.connect() for _ in range(8)]
        for reader, writer in pairs:
            writer.write(head_of(401, 4 << 20) + b"{" * (1 << 20))
            assert (await next_answer(reader)).status == 401
        for _, writer in pairs:
            async with asyncio.timeout(20):
                await writer.drain()
            writer.write(b"{" * (2 << 20))
        await until(lambda: not any(writer.transport.get_write_buffer_size() for _, writer in pairs))
        assert len(here) == len(pairs)
        assert sum(len(connection.cycle.body) for connection in here) == 0  # type: ignore[union-attr]
        for _, writer in pairs:
            writer.close()
