"""Memory of request bodies: its division among clients, and its return."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from quire.server import bodies
from quire.server.bodies import BodyMemory
from quire.server.errors import ApiError
from quire.server.keys import KeyRing
from tests.cli.tiny_directory import make_tiny_directory
from tests.processes import wait_until
from tests.server.fake_engine import in_loop, until
from tests.server.served import CHAT, Answer, chat_body, serving
from tests.server.serving import Serving

MIB = 1 << 20
BODY = 4 * MIB


def half_post(num_bytes: int, key: str | None = None) -> bytes:
    """Return a request whose body lacks two bytes."""
    lines = [f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"Content-Length: {num_bytes}", *([f"Authorization: Bearer {key}"] if key else [])]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + b" " * (num_bytes - 2)


def spaced(num_bytes: int) -> bytes:
    """Return the body of a chat of that size."""
    return json.dumps(chat_body()).encode().ljust(num_bytes)


@in_loop
async def test_one_client_gets_half_and_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "WAIT_S", 0.0)
    shared = BodyMemory(BODY)
    refusals: list[ApiError] = []
    with contextlib.ExitStack() as stack:

        async def fill(client_id: str) -> int:
            num_bytes = 0
            try:
                while True:
                    await stack.enter_context(shared.room_of(client_id)).take(BODY)
                    num_bytes += BODY
            except ApiError as error:
                refusals.append(error)
            return num_bytes

        assert await fill("greedy") == bodies.ALL_BYTES // 2
        for name in "abc":
            assert await fill(name) >= 2 * BODY
        stack.pop_all().close()
        assert await fill("later") == bodies.ALL_BYTES // 2, "all of it comes back"
    assert {(error.status, error.retry_after_s) for error in refusals} == {(429, 2)}


@in_loop
async def test_body_waits_for_room_and_a_client_that_leaves_meanwhile_takes_none() -> None:
    shared = BodyMemory(BODY)
    with shared.room_of("a") as first, shared.room_of("a") as second:
        await first.take(bodies.ALL_BYTES // 2)
        waiting = asyncio.create_task(second.take(BODY))
        with shared.room_of("a") as third:
            leaving = asyncio.create_task(third.take(BODY))
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.wait([leaving])
        assert not waiting.done()
        first.keep(bodies.ALL_BYTES // 2 - BODY)
        await waiting
        assert (second.num_bytes, third.num_bytes) == (BODY, 0)


@in_loop
async def test_bodies_of_one_key_fill_no_more_than_its_room_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "ALL_BYTES", 4 * MIB)
    monkeypatch.setattr(bodies, "WAIT_S", 0.2)
    keys = KeyRing({"a": "ann", "b": "bob"})
    async with serving(keys=keys, max_body_bytes=MIB // 2) as served:
        senders = [await served.connect() for _ in range(12)]
        for _, writer in senders:
            writer.write(half_post(MIB // 2, "a"))
        refused: list[Answer] = []

        async def see(reader: asyncio.StreamReader) -> None:
            refused.append(Answer(await reader.readuntil(b"\r\n\r\n") + await reader.readuntil(b"}")))

        tasks = [asyncio.create_task(see(reader)) for reader, _ in senders]
        await until(lambda: len(refused) == 8)  # four bodies are half of the memory
        assert {answer.status for answer in refused} == {429}
        assert {answer.headers["retry-after"] for answer in refused} == {"2"}
        small = await served.chat(headers={"Authorization": "Bearer a"})
        large = await served.answer("POST", CHAT, headers={"Authorization": "Bearer b"}, body=spaced(MIB // 3))
        assert (small.status, large.status) == (200, 200)
        for task in tasks:
            task.cancel()
        for _, writer in senders:
            writer.close()
        await until(lambda: not served.server.server_state.connections)
        large = await served.answer("POST", CHAT, headers={"Authorization": "Bearer a"}, body=spaced(MIB // 3))
        assert large.status == 200


@in_loop
async def test_chunked_body_holds_what_came_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "ALL_BYTES", 0)
    monkeypatch.setattr(bodies, "NUM_LARGEST", 2)
    async with serving(max_body_bytes=MIB) as served:
        data = spaced(64 << 10)
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (data[:40_000], data[40_000:]))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
        ask = head + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks + b"0\r\n\r\n"
        for data in await asyncio.gather(*(served.raw(ask) for _ in range(8))):
            assert Answer(data).status == 200


@in_loop
async def test_body_without_a_key_is_not_kept() -> None:
    async with serving(keys=KeyRing({"a": "ann"})) as served:
        reader, writer = await served.connect()
        writer.write(half_post(MIB))
        assert Answer(await reader.readuntil(b"}")).status == 401
        (connection,) = served.server.server_state.connections
        assert not connection.cycle.body  # type: ignore[union-attr]
        writer.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    serving = Serving(make_tiny_directory(tmp_path))
    try:
        yield serving
    finally:
        serving.kill()


def test_memory_of_large_bodies_is_bounded_and_returned(server: Serving) -> None:
    front_end = psutil.Process(server.process.pid)
    assert server.chat(2)[0] == 200
    before = front_end.memory_info().rss
    address = server.url.removeprefix("http://").split(":")
    clients = [socket.create_connection((address[0], int(address[1]))) for _ in range(60)]
    for client in clients:
        client.setblocking(False)
    unsent = {client: half_post(BODY) for client in clients}
    most = before

    def send_on() -> bool:
        nonlocal most
        for client, data in list(unsent.items()):
            with contextlib.suppress(BlockingIOError, ConnectionError):
                unsent[client] = data[client.send(data) :]
        most = max(most, front_end.memory_info().rss)
        return sum(not data for data in unsent.values()) >= 16

    wait_until(send_on, lambda: server.stderr)
    assert most - before < 160 * MIB
    for client in clients:
        client.close()
    wait_until(lambda: front_end.memory_info().rss - before < 24 * MIB, lambda: server.stderr)
