"""The live view's event stream, with a real server on real sockets."""

import asyncio
import json
import re
import threading
from typing import Any

import pytest

from quire.insight.trace import EngineTrace
from quire.server.keys import KeyRing
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
        watching = client.watch("anonymous")
        assert b"quire_trace" in await anext(watching)
        for _ in range(70):
            client._received_lines("anonymous", b"{}\n")  # more than it may leave unread
        assert len([data async for data in watching]) == 64
        assert (await server.chat()).status == 200


# --- Two keys -----------------------------------------------------------------------------------

KEYS = {"key-of-ann": "ann", "key-of-bob": "bob"}
ANN, BOB = ({"Authorization": f"Bearer {key}"} for key in KEYS)
OWN_ID = {"X-Request-Id": "chosen-by-ann"}


async def watch_as(
    server: Served, headers: dict[str, str]
) -> tuple[asyncio.StreamReader, list[dict[str, Any]], asyncio.StreamWriter]:
    """Watch with a key. Returns: the stream behind its header, the header, and what closes it."""
    reader, writer = await watch(server, "?op_period=1", headers=f"Authorization: {headers['Authorization']}\r\n")
    return reader, await read_lines(reader, "quire_trace"), writer


def numbers_in(lines: list[dict[str, Any]], name: str) -> list[list[Any]]:
    """Return the lists called `name` of all shares of steps."""
    return [share[name] for line in lines if line.get("kind") == "step" for share in line["requests"]]


@in_loop
async def test_watcher_gets_neither_tokens_nor_ids_nor_times_of_another_keys_requests() -> None:
    async with serving(next_token=saying("Hello"), keys=KeyRing(KEYS)) as server:
        reader, lines, writer = await watch_as(server, BOB)
        answer = await server.chat(headers=ANN | OWN_ID, text="a secret")
        assert answer.json["choices"][0]["message"]["content"] == "Hell"
        lines += await read_lines(reader, '"finish"')
        await server.chat(headers=BOB)
        while {"finish", "served"} - {line["kind"] for line in lines if str(line.get("id")).startswith("req-")}:
            lines += await read_lines(reader, '"')
        of_ann = [line for line in lines if line.get("id") and not line["id"].startswith("req-")]
        assert {line["id"] for line in of_ann} == {"r1"}
        assert not [line for line in of_ann if line["kind"] == "served"]
        told = json.dumps(lines)
        for secret in ("chosen-by-ann", answer.json["id"].split("-")[-1], "ann", "digest", "salt"):
            assert secret not in told
        assert numbers_in(lines, "new") == [[None]] * 8, "a count, of the own requests too"
        assert set(map(str, numbers_in(lines, "text"))) == {"None"}
        writer.close()


@in_loop
async def test_watchers_of_two_keys_each_see_their_own_ids_and_replay_the_same_state() -> None:
    async with serving(next_token=saying("Hello"), keys=KeyRing(KEYS)) as server:
        readers = [await watch_as(server, headers) for headers in (ANN, BOB)]
        chats = [server.chat(headers=ANN | OWN_ID, n=2, temperature=1), server.chat(headers=BOB)]
        await asyncio.gather(*chats)
        await server.until_idle()
        ids = []
        for reader, lines, writer in readers:
            for _ in range(3):  # two of one request, one of the other
                lines += await read_lines(reader, '"finish"')
            trace = EngineTrace.parse("".join(json.dumps(line) + "\n" for line in lines))
            assert trace.state_after(trace.steps[-1]).waiting == {}
            ids.append({line["id"] for line in lines if line.get("kind") == "finish"})
            writer.close()
        for found, own_id, num_own in zip(ids, ("chosen-by-ann.", "req-"), (2, 1), strict=True):
            own = {name for name in found if name.startswith(own_id)}
            assert len(own) == num_own
            assert len(found) == 3
            assert all(re.fullmatch(r"r\d+", name) for name in found - own)


@in_loop
async def test_header_names_running_and_waiting_requests_of_another_key() -> None:
    async with serving(scheduler={"max_num_seqs": 1}, keys=KeyRing(KEYS)) as server:
        client, go_on = server.supervisor.the_client, threading.Event()
        server.executor.in_step = lambda step: go_on.wait(20)
        chats = [asyncio.create_task(server.chat(headers=ANN | OWN_ID)) for _ in range(2)]
        await until(lambda: client.num_requests == 2)
        watching = asyncio.create_task(watch_as(server, BOB))
        await until(lambda: client.engine.watcher is not None or "_watch" in str(client.commands))
        go_on.set()
        reader, lines, writer = await watching
        (header,) = lines
        names = {item["id"] for item in header["requests"]} | header["waiting"].keys()
        assert names == {"r1", "r2"}
        await asyncio.gather(*chats)
        for _ in range(2):
            lines += await read_lines(reader, '"finish"')
        assert {line["id"] for line in lines if line.get("kind") == "finish"} == names, "names stay"
        assert "chosen-by-ann" not in json.dumps(lines)
        writer.close()


@in_loop
async def test_text_of_all_requests_is_shown_if_the_server_allows_it_and_still_no_ids() -> None:
    async with serving(next_token=saying("Hello"), keys=KeyRing(KEYS), xray_text=True) as server:
        reader, lines, writer = await watch_as(server, BOB)
        await server.chat(headers=ANN | OWN_ID)
        lines += await read_lines(reader, '"finish"')
        assert numbers_in(lines, "text") == [["H"], ["e"], ["l"], ["l"]]
        assert numbers_in(lines, "new") == [[ord(letter)] for letter in "Hell"]
        assert "chosen-by-ann" not in json.dumps(lines)
        writer.close()


@pytest.mark.parametrize("value", ["-1", "x", "1e9", "99999999999", "9" * 5000])
@in_loop
async def test_bad_op_period_or_interval_is_refused(value: str) -> None:
    async with serving() as server:
        for name in ("op_period", "op_interval_ms"):
            answer = await server.answer("GET", f"/xray/events?{name}={value}")
            assert answer.status == 400
            assert name in answer.json["error"]["message"]
