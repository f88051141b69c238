"""Server-sent events, and disconnects."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.streaming import TextEvent, event
from tests.engine.builders import assert_all_home
from tests.server.fake_engine import CHAT, in_loop, make_server, until

Message = dict[str, Any]


class Exchange:
    """A request without a server. `gone` disconnects the client; while `reads` is cleared, streams block in `send`."""

    def __init__(self, body: bytes = b"") -> None:
        self.sent: list[Message] = []
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.is_blocked = False
        self._requests = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive(self) -> Message:
        if self._requests:
            return self._requests.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if message.get("more_body"):
            self.is_blocked = not self.reads.is_set()
            await self.reads.wait()


def post(path: str) -> Message:
    return {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http", "root_path": "",
        "asgi": {"version": "3.0"},
    }  # fmt: skip


@given(st.text())
def test_text_event_equals_the_event_with_this_text(text: str) -> None:
    def event_with(text: str) -> bytes:
        return event({"id": "x", "choices": [{"delta": {"content": text}}]}, "name")

    assert TextEvent(event_with).encode(text) == event_with(text)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("moment", ["before the first step", "while it generates", "while send waits"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": "tiny", "prompt": ["a", "b", "c"], "n": 2, "max_tokens": 100}),
        ("/v1/responses", {"model": "tiny", "input": "a"}),
    ],
)
@in_loop
async def test_disconnect_aborts_the_requests(path: str, body: Message, moment: str, streams: bool) -> None:
    app, engine = make_server()
    engine.gate.clear()
    exchange = Exchange(json.dumps({**body, "stream": streams}).encode())
    if moment == "while send waits":
        exchange.reads.clear()
    task = asyncio.create_task(app(post(path), exchange.receive, exchange.send))
    num_prompts = 3 if path == "/v1/completions" else 1
    await until(lambda: len(engine.submitted) == num_prompts)
    if moment != "before the first step":
        engine.num_ahead = 5
        engine.gate.set()
        await until(lambda: engine.num_ahead == 0)
        engine.gate.clear()
    exchange.gone.set()
    await task
    assert engine.num_requests == 0
    assert sorted(engine.aborted) == sorted(request.request_id for request in engine.submitted)
    engine.gate.set()
    await until(lambda: not engine.engine.has_unfinished_requests())
    assert_all_home(engine.engine)
    assert app.state.quire.admission.num_requests == 0
