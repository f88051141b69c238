"""Media types and bodies that are wrong: an error of the client, never of the server; and large answers."""

import asyncio
import json
import threading
from typing import Any

import pytest
from starlette.requests import Request

from quire.engine.process.messages import RequestUpdate
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.validation import validate
from quire.server.request_record import ANONYMOUS, RECORD_KEY
from quire.server.routes.chat import prepare_chat
from quire.server.routes.exchange import LARGE_BYTES, answer
from tests.server.fake_engine import CHAT, MODEL, assert_error, in_loop, make_server, record_of, requests_to

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank",
         "/classify", "/tokenize", "/detokenize"]  # fmt: skip
BODIES = [
    b"", b"{", b"null", b"[]", b'"x"', b"\xff", b"[" * 100_000, b'{"model": "tiny", "model": "tiny"}', b'{"a": NaN}',
    b'{"model": "\\ud800"}', b'{"model": "\\u0000"}', b'{"a": 1e400}', b'{"n": ' + b"9" * 5000 + b"}",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_other_media_types_and_malformed_bodies_are_refused(path: str) -> None:
    app, engine = make_server()
    async with requests_to(app) as client:
        for media_type in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"):
            response = await client.post(path, content=b"{}", headers={"content-type": media_type})
            assert_error(response, 415, "unsupported_media_type")
        headers = {"content-type": "application/json"}
        for body in BODIES:
            response = await client.post(path, content=body, headers=headers)
            assert response.status_code == 400, body[:40]
            assert response.json()["error"]["code"] in ("invalid_json", "invalid_parameter")
    assert engine.submitted == []


@in_loop
async def test_large_body_is_checked_like_a_small_one() -> None:
    app, _ = make_server()
    async with requests_to(app) as client:
        response = await client.post("/tokenize", json={"prompt": "x", "unknown": "y" * LARGE_BYTES})
        assert_error(response, 400, "unknown_parameter", "unknown")


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}], ids=["small", "large"])
@in_loop
async def test_large_answer_is_written_in_a_thread(fields: dict[str, Any]) -> None:
    app, _ = make_server()
    threads: list[int] = []

    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    def write(results: list[RequestUpdate]) -> dict[str, int]:
        threads.append(threading.get_ident())
        return {"a": len(results)}

    job = await prepare_chat(app.state.quire, validate(ChatRequest, {**CHAT, **fields}), ANONYMOUS)
    found = await answer(Request({"type": "http", "app": app, RECORD_KEY: record_of()}, receive), job.requests, write)
    assert json.loads(bytes(found.body)) == {"a": 1}
    assert (threads[0] != threading.get_ident()) == bool(fields)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT["messages"]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/score", {"queries": "hi", "documents": "ho"}),
        ("/v1/rerank", {"query": "hi", "documents": ["ho"]}),
    ],
)
@in_loop
async def test_request_without_a_model_means_the_served_one(path: str, body: dict[str, Any]) -> None:
    app, _ = make_server()
    async with requests_to(app) as client:
        for model in ({}, {"model": None}, {"model": ""}, {"model": MODEL}):
            response = await client.post(path, json={**body, **model})
            assert (response.status_code, response.json()["model"]) == (200, MODEL)
        response = await client.post(path, json={**body, "model": "x" * 500})
    message = assert_error(response, 404, "model_not_found", "model")
    assert len(message) < 200
