import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire.server.gate import QUEUED_PATHS
from quire.server.keys import KeyRing
from tests.server.fake_engine import in_loop
from tests.server.served import CHAT, Served, serving
from tests.server.test_metrics import samples, value


@contextlib.asynccontextmanager
async def full(headers: dict[str, str] | None = None, **options: Any) -> AsyncIterator[Served]:
    """Start a server and fill it: one request runs slowly, one waits; both are answered in the end."""
    async with serving(scheduler={"max_num_seqs": 1}, max_queued_requests=1, **options) as served:
        served.executor.in_step = lambda step: time.sleep(0.1)  # each refusal waits 0.25 s for the rest of its body
        chats = [served.chat(headers=headers, max_tokens=100, ignore_eos=True) for _ in range(2)]
        tasks = [asyncio.create_task(chat) for chat in chats]
        async with asyncio.timeout(20):
            while served.server_requests() < 2:
                await asyncio.sleep(0.005)
        yield served
        served.executor.in_step = lambda step: None
        assert [answer.status for answer in await asyncio.gather(*tasks)] == [200, 200]


@in_loop
async def test_full_queue_refuses_before_the_body_is_read() -> None:
    async with full() as served:
        for path in sorted(QUEUED_PATHS):
            # The body is neither complete nor JSON.
            answer = await served.answer("POST", path, headers={"Content-Length": "1000"}, body=b"{no JSON")
            assert (answer.status, answer.code) == (429, "queue_full")
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["x-request-id"].startswith("req-")
        assert (await served.answer("GET", "/v1/models")).status == 200
        assert (await served.answer("POST", "/tokenize", body={"prompt": "hi"})).status == 200
        assert (await served.answer("POST", "/nowhere", body={})).status == 404
        found = await samples(served)
        assert value(found, "quire_http_requests_total", method="POST", route=CHAT, status="429") == 1
        assert value(found, "quire_refused_requests_total", reason="queue_full") == len(QUEUED_PATHS)


@in_loop
async def test_client_without_a_key_gets_401_though_the_queue_is_full() -> None:
    async with full({"Authorization": "Bearer k"}, keys=KeyRing({"k": None})) as served:
        assert (await served.chat()).status == 401
        assert (await served.chat(headers={"Authorization": "Bearer k"})).status == 429


def head(method: bytes, path: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join((method + b" " + path + b" HTTP/1.1", b"Host: localhost", *headers)) + b"\r\n\r\n"


@in_loop
async def test_refusal_has_the_headers_of_every_answer() -> None:
    page = "https://app.example"
    async with full(requests_per_minute=50, allowed_origins=(page,)) as served:
        answer = await served.chat(headers={"X-Request-Id": "mine-7", "Origin": page})
        assert (answer.status, answer.code) == (429, "queue_full")
        assert answer.json["error"]["type"] == "rate_limit_error"
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-request-id"] == "mine-7"
        assert answer.headers["access-control-allow-origin"] == page
        assert "retry-after" in answer.headers["access-control-expose-headers"]
        assert answer.headers["content-type"] == "application/json"
        assert int(answer.headers["content-length"]) == len(answer.body)
        assert "date" in answer.headers
        assert (await served.chat(headers={"Host": "evil.example"})).status == 403
        preflight = {"Origin": page, "Access-Control-Request-Method": "POST"}
        assert (await served.answer("OPTIONS", CHAT, headers=preflight)).status == 200
        assert (await served.answer("GET", CHAT)).status == 405


@in_loop
async def test_answers_to_pipelined_requests_keep_their_order() -> None:
    async with full() as served:
        version, refused = head(b"GET", b"/version"), head(b"POST", CHAT.encode(), b"Content-Length: 2") + b"{}"
        data = await served.raw(refused + version + refused + refused + head(b"GET", b"/version", b"Connection: close"))
        assert [piece[:3] for piece in data.split(b"HTTP/1.1 ")[1:]] == [b"429", b"200", b"429", b"429", b"200"]


@pytest.mark.parametrize("expects", [(), (b"Expect: 100-continue",)])
@in_loop
async def test_refusal_arrives_while_the_body_is_still_being_sent(expects: tuple[bytes, ...]) -> None:
    async with full() as served:
        reader, writer = await served.connect()
        writer.write(head(b"POST", CHAT.encode(), b"Content-Length: 2000000", *expects))
        async with asyncio.timeout(10):
            answer = await reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 429 ")
        writer.write(b"a" * 100_000)
        await writer.drain()
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
