"""The live view's event stream, with a real server on real sockets."""

import asyncio
import json
from typing import Any

import pytest

from quire.insight.trace import EngineTrace
from tests.engine.builders import saying
from tests.server.fake_engine import in_loop, until
from tests.server.served import Served, serving


async def watch(
    server: Served, query: str = "", *, headers: str = ""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await server.connect()
    writer.write(f"GET /xray/events{query} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n{headers}\r\n".encode())
    await writer.drain()
    return reader, writer


async def read_lines(reader: asyncio.StreamReader, until: str) -> list[dict[str, Any]]:
    """Event lines up to the first that contains `until`."""
    lines = []
    while True:
        data = await asyncio.wait_for(reader.readline(), 20)
        assert data, "the server closed the stream"
        row = data.decode().rstrip("\n")
        if row.startswith("data: "):
            lines.append(json.loads(row.removeprefix("data: ")))
            if until in row:
                return lines


@in_loop
async def test_stream_begins_with_a_header_and_replays_to_the_end_of_a_request() -> None:
    async with serving(next_token=saying("Hello")) as server:
        reader, writer = await watch(server)
        lines = await read_lines(reader, "quire_trace")
        assert (await server.chat()).status == 200
        lines += await read_lines(reader, '"finish"')
        trace = EngineTrace.parse("".join(json.dumps(line) + "\n" for line in lines))
        assert (
            sum(len(share["new"]) for step in trace.steps for share in step["requests"]) == 4
        )  # the largest that the chat asks for
        assert all(share["text"] is None for step in trace.steps for share in step["requests"])
        writer.close()
        await until(lambda: server.supervisor.the_client.engine.watcher is None)


@in_loop
async def test_stream_tells_the_servers_phases_of_a_request_under_the_engines_id() -> None:
    async with serving(next_token=saying("Hello")) as server:
        reader, writer = await watch(server)
        await read_lines(reader, "quire_trace")
        answer = await server.chat(headers={"X-Request-Id": "mine"})
        lines = await read_lines(reader, '"served"')
        served = lines[-1]
        assert answer.headers["x-request-id"] == "mine"
        assert served["id"].startswith("mine.")
        assert served["status"] == 200
        assert [name for name, _, _ in served["phases"]] == ["receive", "validate", "tokenise", "send"]
        times = [moment for _, start, end in served["phases"] for moment in (start, end)]
        assert times == sorted(times)
        arrive = next(line for line in lines if line["kind"] == "arrive")
        assert arrive["id"] == served["id"]
        assert times[5] <= arrive["t"] <= times[6]
        await server.answer("GET", "/v1/models")  # computes nothing, and is no line
        await server.chat()
        assert len([line for line in await read_lines(reader, '"served"') if line["kind"] == "served"]) == 1
        writer.close()


@in_loop
async def test_second_watcher_gets_a_header_of_its_own_and_the_first_one_reads_on() -> None:
    async with serving(next_token=saying("Hello")) as server:
        first, first_writer = await watch(server)
        await read_lines(first, "quire_trace")
        second, second_writer = await watch(server)
        await read_lines(second, "quire_trace")
        await server.chat()
        for reader in (first, second):
            assert (await read_lines(reader, '"finish"'))[-1]["num_output_tokens"] == 4
        for writer in (first_writer, second_writer):
            writer.close()


@in_loop
async def test_watcher_that_does_not_read_is_cut_off_and_others_are_serving() -> None:
    async with serving(next_token=saying("Hello")) as server:
        client = server.supervisor.the_client
        watching = client.watch()
        assert b"quire_trace" in await anext(watching)
        for _ in range(70):
            client._received_lines(b"{}\n")  # more than it may leave unread
        assert len([data async for data in watching]) == 64
        assert (await server.chat()).status == 200


@pytest.mark.parametrize("value", ["-1", "x", "1e9", "99999999999", "9" * 5000])
@in_loop
async def test_bad_op_period_or_interval_is_refused(value: str) -> None:
    async with serving() as server:
        for name in ("op_period", "op_interval_ms"):
            answer = await server.answer("GET", f"/xray/events?{name}={value}")
            assert answer.status == 400
            assert name in answer.json["error"]["message"]
