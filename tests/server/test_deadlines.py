"""`deadline_s` of a request: it ends as by the server's own time limit, and the error names the field."""

import json
from typing import Any

import pytest

from tests.server.fake_engine import CHAT, MESSAGES, MODEL, in_loop, make_server, post, requests_to

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": MODEL, "input": "hi"},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 40},
    "/infill": {"model": MODEL, "input_prefix": "a", "input_suffix": "b"},
}
WITHOUT_FIM = [path for path in ROUTES if path != "/infill"]


def error_of(answer: dict[str, Any]) -> str:
    assert answer["error"]["type"] in ("server_error", "timeout_error")
    return str(answer["error"]["message"])


@pytest.mark.parametrize("path", WITHOUT_FIM)
@in_loop
async def test_request_that_is_not_complete_at_its_deadline_is_a_504(path: str) -> None:
    app, engine = make_server()
    real, late_s = engine.engine._clock, [0.0]
    engine.engine._clock = lambda: real() + late_s[0]
    engine.executor.in_step = lambda step: late_s.__setitem__(0, 2000.0 * (step == 3))
    answer = await post(app, path, {**ROUTES[path], "deadline_s": 1000, "ignore_eos": True})
    assert answer.status_code == 504
    assert "deadline_s" in error_of(answer.json())
    assert not engine.engine.has_unfinished_requests()
    late_s[0] = 0.0
    assert (await post(app, path, {**ROUTES[path], "deadline_s": 1000.5})).status_code == 200
    assert (await post(app, path, {**ROUTES[path], "deadline_s": None})).status_code == 200
    kept = [request.deadline_time_s for request in engine.submitted[1:]]
    assert kept == [engine.submitted[1].arrival_time_s + 1000.5, None]


@in_loop
async def test_stream_ends_with_the_error_of_its_deadline() -> None:
    app, engine = make_server()
    real = engine.engine._clock
    engine.engine._clock = lambda: real() + (2000 if engine.executor.num_steps >= 3 else 0)
    body = {**CHAT, "stream": True, "deadline_s": 1000, "ignore_eos": True}
    lines = (await post(app, "/v1/chat/completions", body)).text.splitlines()
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "deadline_s" in error_of(last)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("value", ["0", "-1", '"5"', "true", "1e300"])
@in_loop
async def test_deadline_that_is_no_positive_number_is_refused_by_name(path: str, value: str) -> None:
    app, engine = make_server()
    body = json.dumps({**ROUTES[path], "deadline_s": "HERE"}).replace('"HERE"', value)
    async with requests_to(app) as client:
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "deadline_s" in answer.text
    assert engine.submitted == []
