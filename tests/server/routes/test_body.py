"""Media types and bodies that are not what they should be: an error of the client's, never of the server's."""

import json
import threading

import pytest

from quire.server.routes.body import LARGE_BYTES, json_answer
from tests.server.fake_engine import CHAT, assert_error, in_loop, make_server, requests_to

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"]


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_only_json_is_read(path: str) -> None:
    app, engine = make_server()
    async with requests_to(app) as client:
        for media_type in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"):
            response = await client.post(path, content=b"{}", headers={"content-type": media_type})
            assert_error(response, 415, "unsupported_media_type")
        response = await client.post(
            path, content=b"{}", headers={"content-type": "application/json", "content-encoding": "gzip"}
        )
        assert_error(response, 415, "unsupported_media_type")
    assert engine.submitted == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b'"x"', b"\xff", b"[" * 100_000, b'{"model": "tiny", "model": "tiny"}', b'{"a": NaN}',
     b'{"model": "\\ud800"}', b'{"model": "\\u0000"}', b'{"a": 1e400}', b'{"n": ' + b"9" * 5000 + b"}"],
    ids=lambda body: repr(body[:12]),
)  # fmt: skip
@in_loop
async def test_bodies_that_are_no_requests(path: str, body: bytes) -> None:
    app, _ = make_server()
    async with requests_to(app) as client:
        response = await client.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["code"] in ("invalid_json", "invalid_parameter")


@in_loop
async def test_parameters_of_the_media_type_do_not_matter() -> None:
    app, _ = make_server()
    async with requests_to(app) as client:
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        response = await client.post(PATHS[0], content=json.dumps(CHAT).encode(), headers=headers)
    assert response.status_code == 200


@in_loop
async def test_a_large_body_is_read_the_same_way() -> None:
    app, _ = make_server()
    async with requests_to(app) as client:
        response = await client.post("/tokenize", json={"prompt": "x", "unknown": "y" * LARGE_BYTES})
        assert_error(response, 400, "unknown_parameter", "unknown")


@pytest.mark.parametrize("is_large", [True, False])
@in_loop
async def test_a_large_answer_is_written_beside_the_event_loop(is_large: bool) -> None:
    app, _ = make_server()
    threads: list[int] = []

    def write() -> dict[str, int]:
        threads.append(threading.get_ident())
        return {"a": 1}

    answer = await json_answer(app.state.quire.supervisor.front_end, write, is_large=is_large)
    assert json.loads(bytes(answer.body)) == {"a": 1}
    assert (threads[0] != threading.get_ident()) == is_large
