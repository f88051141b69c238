"""`/v1/responses` as events."""

import json
from typing import Any

from quire.server.protocol.responses import ResponseEvent
from tests.engine.builders import saying
from tests.server.fake_engine import MODEL, assert_error, events, in_loop, make_server, requests_to

PATH = "/v1/responses"
ORDER = [
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta", "response.output_text.done", "response.content_part.done",
    "response.output_item.done",
]  # fmt: skip


async def stream(fields: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    app, engine = make_server(next_token=saying("Hello wörld"), **settings)
    async with requests_to(app) as client:
        response = await client.post(PATH, json={"model": MODEL, "stream": True, **fields})
    assert response.status_code == 200, response.text
    found = []
    for name, data in events(response.text):
        content = json.loads(data)
        ResponseEvent.model_validate(content)
        assert name == content["type"]
        found.append(content)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert engine.num_requests == 0
    return found


@in_loop
async def test_events_come_in_openais_order() -> None:
    found = await stream({"input": "hi"})
    kinds = [event["type"] for event in found]
    assert list(dict.fromkeys(kinds)) == [*ORDER, "response.completed"]
    assert [kinds.count(kind) for kind in ORDER] == [1, 1, 1, 1, 11, 1, 1, 1]
    deltas = "".join(event["delta"] for event in found if event["type"] == ORDER[4])
    last = found[-1]["response"]
    assert deltas == found[-4]["text"] == last["output"][0]["content"][0]["text"] == "Hello wörld"
    assert last["usage"]["output_tokens"] == 13
    assert found[0]["response"]["status"] == "in_progress"
    assert found[0]["response"]["usage"] is None
    item_ids = {event["item_id"] for event in found if event.get("item_id")} | {last["output"][0]["id"]}
    assert len(item_ids) == 1


@in_loop
async def test_an_incomplete_stream_says_so() -> None:
    found = await stream({"input": "hi", "max_output_tokens": 1})
    assert found[-1]["type"] == "response.incomplete"
    assert found[-1]["response"]["status"] == "incomplete"


@in_loop
async def test_log_probabilities_are_those_of_the_whole_text() -> None:
    found = await stream({"input": "hi", "top_logprobs": 1, "max_output_tokens": 2})
    (item,) = found[-1]["response"]["output"]
    logprobs = item["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == ["H", "e"]
    assert [event["logprobs"][0] for event in found if event["type"] == ORDER[4]] == logprobs


@in_loop
async def test_an_error_is_an_answer_before_the_first_event_and_an_event_after_it() -> None:
    app, engine = make_server(next_token=saying("Hello"))
    engine.executor.in_step = lambda step: engine.die() if step == 3 else None
    async with requests_to(app) as client:
        response = await client.post(PATH, json={"model": MODEL, "input": "hi", "stream": True})
        assert response.status_code == 200
        *_, (name, data) = events(response.text)
        response = await client.post(PATH, json={"model": MODEL, "input": "hi", "stream": True})
        assert_error(response, 503, "engine_dead")
    last = json.loads(data)
    assert (name, last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "engine_dead"
    ResponseEvent.model_validate(last)
