"""Routes about the server itself."""

import asyncio
import json
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire import __version__
from quire.server.openapi import build_document
from quire.server.protocol.answers import ModelCard, ModelList
from quire.server.supervisor import MAX_SILENT_S, EngineState
from tests.server.fake_engine import MODEL, assert_error, in_loop, make_server, requests_to
from tests.server.served import serving


@in_loop
async def test_ready_server_answers_get_and_head() -> None:
    async with serving() as served:
        for path in ("/health/live", "/health/ready", "/health", "/ping"):
            assert (await served.answer("GET", path)).status == 200
            answer = await served.answer("HEAD", path)
            assert (answer.status, answer.body) == (200, b"")
        assert (await served.answer("GET", "/version")).json == {"version": __version__}
        answer = await served.answer("GET", "/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = {family.name for family in text_string_to_metric_families(answer.body.decode())}
        assert {"quire_requests_running", "quire_generation_tokens", "process_resident_memory_bytes"} <= families
        document = (await served.answer("GET", "/openapi.json")).json
        assert document == json.loads(json.dumps(build_document()))


@in_loop
async def test_only_the_served_model_exists() -> None:
    app, _ = make_server()
    async with requests_to(app) as client:
        listed = (await client.get("/v1/models")).json()
        one = (await client.get(f"/v1/models/{MODEL}")).json()
        assert_error(await client.get("/v1/models/some/other"), 404, "model_not_found", "model")
    assert ModelList.model_validate(listed).data == [ModelCard.model_validate(one)]
    assert (one["id"], one["max_model_len"], one["has_chat_template"]) == (MODEL, 128, True)


@in_loop
async def test_status_of_a_model_tells_a_replaced_engine_from_a_first_one() -> None:
    async with serving() as served:
        for state, shown in ((EngineState.RESTARTING, "restarting"), (EngineState.STARTING, "loading")):
            served.supervisor.state = state
            assert (await served.answer("GET", "/v1/models")).json["data"][0]["status"] == {"value": shown}


@pytest.mark.parametrize("state", [EngineState.STARTING, EngineState.RESTARTING, EngineState.STOPPED])
@in_loop
async def test_server_without_an_engine_is_live_and_not_ready(state: EngineState) -> None:
    async with serving() as served:
        served.supervisor.state = state
        assert (await served.answer("GET", "/health/live")).status == 200
        for path in ("/health/ready", "/health", "/ping"):
            answer = await served.answer("GET", path)
            assert (answer.status, answer.code) == (503, "engine_not_ready")
            assert int(answer.headers["retry-after"]) >= 1


@in_loop
async def test_silent_engine_is_not_ready_until_its_next_heartbeat() -> None:
    async with serving() as served:
        served.supervisor.the_client.last_heard_s -= MAX_SILENT_S
        answer = await served.answer("GET", "/health/ready")
        assert (answer.status, answer.code) == (503, "engine_not_answering")
        while (await served.answer("GET", "/health/ready")).status != 200:
            await asyncio.sleep(0.05)


@in_loop
async def test_hanging_step_ends_liveness_though_the_process_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.supervisor.MAX_STALL_S", 0.2)
    async with serving() as served:
        hanging = asyncio.Event()
        loop = asyncio.get_running_loop()

        def hang(step: int) -> None:
            while not hanging.is_set() and not loop.is_closed():
                time.sleep(0.02)

        served.executor.in_step = hang
        chat = asyncio.create_task(served.chat())
        assert (await served.answer("GET", "/health/live")).status == 200
        async with asyncio.timeout(20):
            while served.supervisor.stall_s() < 0.2:
                await asyncio.sleep(0.01)
        answer = await served.answer("GET", "/health/live")
        assert (answer.status, answer.code) == (503, "engine_stalled")
        assert (await served.answer("GET", "/health/ready")).status == 200, "heartbeats come beside a step"
        hanging.set()
        assert (await chat).status == 200
        assert (await served.answer("GET", "/health/live")).status == 200
