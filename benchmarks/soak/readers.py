"""L5: clients that read one byte a second, of every kind of answer. Next to read: `client.py`, `loads.py`."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from benchmarks.soak.client import CHAT, Manners, Seen, ask, chat_body, exchange
from benchmarks.soak.loads import HELLO, background, gathered, prompt_of
from benchmarks.soak.row import Row, at_percent
from benchmarks.soak.server import Server

MAX_KIB = 256.0
SLOW = Manners(bytes_per_s=1, receive_buffer_bytes=2048)
SETTLE_S = 2.0
"""Time for what an answer was made of to go."""
WATCHED_S = 10.0
Kind = tuple[str, Callable[[int], dict[str, Any] | None]]
"""Path and body of the request of a reader, by its number; None: a GET."""


def kinds(max_tokens: int) -> dict[str, Kind]:
    """Return the kinds of answers."""
    scores = {"logprobs": True, "top_logprobs": 5}
    most = {"logprobs": True, "top_logprobs": 20}
    story = "Tell me a long story. {}".format

    def chat(num_tokens: int = max_tokens, **fields: Any) -> Callable[[int], dict[str, Any]]:
        return lambda index: chat_body(story(index), num_tokens, **fields)

    def completion(**fields: Any) -> Callable[[int], dict[str, Any]]:
        prompt, body = prompt_of(1500), {"model": "soak", "temperature": 0, **fields}
        return lambda index: {**body, "prompt": f"{index} {prompt}", "max_tokens": 4}

    def words(index: int) -> dict[str, Any]:
        return {"model": "soak", "input": [f"{index} {number}" for number in range(8)]}

    response = {"model": "soak", "max_output_tokens": max_tokens, "temperature": 0, "top_logprobs": 20}
    message = {"model": "soak", "max_tokens": max_tokens, "temperature": 0, "stream": True}
    include = {"include": ["message.output_text.logprobs"]}
    return {
        "chat stream, 5 log-probabilities": (CHAT, chat(**scores)),
        "chat stream": (CHAT, chat(3 * max_tokens)),
        "chat, 20 log-probabilities": (CHAT, chat(stream=False, **most)),
        "completion, prompt log-probabilities": ("/v1/completions", completion(prompt_logprobs=20)),
        "completion stream, echo and log-probabilities": (
            "/v1/completions", completion(echo=True, logprobs=20, stream=True),
        ),
        "responses": ("/v1/responses", lambda index: {**response, **include, "input": story(index)}),
        "responses stream": (
            "/v1/responses", lambda index: {**response, **include, "input": story(index), "stream": True},
        ),
        "messages stream": (
            "/v1/messages", lambda index: {**message, "messages": [{"role": "user", "content": story(index)}]},
        ),
        "messages": (
            "/v1/messages",
            lambda index: {**message, "stream": False, "messages": [{"role": "user", "content": story(index)}]},
        ),
        "embeddings of 8 inputs": ("/v1/embeddings", words),
        "metrics": ("/metrics", lambda index: None),
        "description of the routes": ("/openapi.json", lambda index: None),
        "live view": ("/xray/events?op_period=1", lambda index: None),
    }  # fmt: skip


async def slow_readers(
    server: Server, *, num_slow: int = 16, num_normal: int = 4, max_tokens: int = 300, cut_s: float = 60.0
) -> Row:
    """L5: memory of the server's process per reader of each kind; other clients beside the first kind."""
    row = Row("L5", f"{num_slow} readers at 1 byte/s of each kind + {num_normal} normal")
    await ask(server.url, HELLO)
    for name, kind in kinds(max_tokens).items():
        await _measure(row, server, name, kind, num_slow)
    await server.seconds_until_idle()
    calm = await gathered(server, num_normal, 100)
    await _beside(row, server, kinds(max_tokens), num_slow, num_normal, calm, cut_s)
    return row


def _asked(server: Server, kind: Kind, index: int, manners: Manners) -> "asyncio.Future[Seen]":
    path, body_of = kind
    body = body_of(index)
    method, data = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
    return asyncio.ensure_future(exchange(server.url, method, path, data, manners, key=server.key))


async def _measure(row: Row, server: Server, name: str, kind: Kind, num_slow: int) -> None:
    is_view = name == "live view"
    for _ in range(2):
        # What Python takes for such answers once and keeps is no reader's.
        polite = Manners(hang_up_after_s=WATCHED_S / 2) if is_view else Manners()
        readers = [_asked(server, kind, index, polite) for index in range(num_slow)]
        if is_view:
            await gathered(server, 4, 50)
        bad = [item for item in await asyncio.gather(*readers) if item.status != 200]
        if bad:
            row.check(f"{name}: refused", f"{bad[0].status} {bad[0].text[:200]}", passes=False)
            return
    await server.seconds_until_idle()
    await asyncio.sleep(SETTLE_S)
    front_end = server.processes()[0]
    before_bytes = front_end.memory_info().rss
    async with background(*(_asked(server, kind, index, SLOW) for index in range(num_slow))):
        if is_view:
            await gathered(server, 4, 200)
        else:
            await asyncio.sleep(SETTLE_S)  # short answers may be made by then, and long ones have begun
        await _computed(server)
        await asyncio.sleep(SETTLE_S)
        per_kib = (front_end.memory_info().rss - before_bytes) / num_slow / 1024
    row.check(f"{name}: KiB per reader (≤ {MAX_KIB:g})", per_kib, passes=per_kib <= MAX_KIB)


async def _beside(
    row: Row, server: Server, known: dict[str, Kind], num_slow: int, num_normal: int, calm: list[Seen], cut_s: float
) -> None:
    num_files = server.num_files()
    kind = next(iter(known.values()))
    async with background(*(_asked(server, kind, index, SLOW) for index in range(num_slow))):
        while (await server.metrics()).value("quire_requests_running") < num_slow:
            await asyncio.sleep(0.05)
        # Their work ends long before they have read it: what is compared is the time after that.
        await _computed(server)
        seen = await gathered(server, num_normal, 100)
        left_s = await seconds_until_files(server, num_files + 2, cut_s + 15)
    calm_s, slow_s = (at_percent([gap for item in items for gap in item.gaps_s], 95) for items in (calm, seen))
    row.check("normal failed", sum(not item.is_good for item in seen), passes=all(item.is_good for item in seen))
    row.check("normal ITL p95 ÷ without (≤ 1.2)", slow_s / max(calm_s, 1e-9), passes=slow_s <= 1.2 * calm_s)
    row.check(f"cut off after s (≤ {cut_s + 15:g})", left_s, passes=left_s < float("inf"))


async def _computed(server: Server) -> None:
    """Wait until no request runs: one whose answer is unread stays admitted until its reader is cut off."""
    while (await server.metrics()).value("quire_requests_running"):
        await asyncio.sleep(0.2)


async def seconds_until_files(server: Server, num_files: int, limit_s: float) -> float:
    """Return the seconds until the server has closed its connections; clients still see the kernel's buffers."""
    start_s = asyncio.get_running_loop().time()
    while server.num_files() > num_files:
        if asyncio.get_running_loop().time() - start_s > limit_s:
            return float("inf")
        await asyncio.sleep(0.2)
    return asyncio.get_running_loop().time() - start_s
