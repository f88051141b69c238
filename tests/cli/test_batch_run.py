"""Concurrent requests, busy servers, broken connections and servers that go away."""

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quire.cli import batch_run
from quire.cli.batch_run import AnswerFile, BatchCounts, BatchRun, read_requests
from quire.cli.server_client import ServerUnreachableError, client_settings
from tests.cli.batch_inputs import by_id, read_lines, request, write_lines
from tests.cli.stub_server import Answer, Handler, stub_server

ANSWER = {"id": "chatcmpl-1", "usage": {"completion_tokens": 5}}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "FIRST_WAIT_S", 0.01)


def run(tmp_path: Path, answer: Answer, *lines: Any, **options: Any) -> BatchCounts:
    source = write_lines(tmp_path / "in", *lines)
    with stub_server(answer) as server:
        return run_against(server.url, source, tmp_path / "out", **options)


def run_against(url: str, source: Path, target: Path, *, concurrency: int = 4, model: str | None = None) -> BatchCounts:
    requests = read_requests(source)
    counts = BatchCounts(len(requests))
    with AnswerFile(target) as answers:
        pending = [request for request in requests if request.custom_id not in answers.done]
        run = BatchRun(answers, counts, concurrency, max_retries=3)
        asyncio.run(run.send(pending, client_settings(url), model))
    return counts


def test_requests_are_answered_concurrently(tmp_path: Path) -> None:
    # Three requests must be there at once, or the barrier breaks; a fourth would wait for ever.
    together = threading.Barrier(3, timeout=30)

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        if body["model"] == "first":
            together.wait()
        handler.send_json(200, {**ANSWER, "model": body["model"]})

    lines = [request(str(index)) for index in range(12)]
    counts = run(tmp_path, answer, *lines, request("named", body={"model": "mine"}), concurrency=3, model="first")
    assert (counts.num_succeeded, counts.num_failed, counts.num_tokens, counts.num_done) == (13, 0, 65, 13)
    found = by_id(tmp_path / "out")
    assert found["3"]["response"]["body"]["model"] == "first"
    assert found["named"]["response"]["body"]["model"] == "mine"
    assert found["3"]["response"]["request_id"] == "chatcmpl-1"
    assert found["3"]["error"] is None


@pytest.mark.parametrize("status", [429, 503])
def test_busy_server_is_asked_again_a_few_times_after_its_retry_after(
    tmp_path: Path, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        if not waits:
            return handler.send_json(status, {"error": {}}, Retry_After="7")
        return handler.send_json(200 if len(waits) == 2 else status, ANSWER)

    monkeypatch.setattr(batch_run.asyncio, "sleep", note)
    counts = run(tmp_path, answer, request("a"))
    assert (counts.num_succeeded, counts.num_retries) == (1, 2)
    assert 7 <= waits[0] <= 8.4
    assert waits[1] < 1

    with stub_server(lambda handler, body: handler.send_json(status, {"error": {}})) as server:
        counts = run_against(server.url, write_lines(tmp_path / "in", request("b")), tmp_path / "other")
    assert (counts.num_failed, counts.num_retries) == (1, 3)
    assert by_id(tmp_path / "other")["b"]["response"]["status_code"] == status


def test_broken_connections_are_retried_a_few_times(tmp_path: Path) -> None:
    asked: Counter[str] = Counter()

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        asked[body["user"]] += 1
        if body["user"] == "always" or asked[body["user"]] == 1:
            handler.close_connection = True
        else:
            handler.send_json(200, ANSWER)

    lines = [request(name, body={"user": name}) for name in ("once", "always")]
    counts = run(tmp_path, answer, *lines)
    assert (counts.num_succeeded, counts.num_failed) == (1, 1)
    assert by_id(tmp_path / "out")["always"]["error"]["code"] == "connection_broken"
    assert asked == {"once": 2, "always": batch_run.MAX_BROKEN}


def send_page(handler: Handler, status: int) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", "2")
    handler.end_headers()
    handler.wfile.write(b"hi")


@pytest.mark.parametrize(("status", "is_first"), [(200, False), (404, False), (502, False), (413, True), (500, True)])
def test_answer_without_json_fails_its_request(tmp_path: Path, status: int, is_first: bool) -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        if body.get("user") == "page":
            send_page(handler, status)
        else:
            handler.send_json(200, ANSWER)

    lines = [request("a"), request("page", body={"user": "page"}), request("b")]
    counts = run(tmp_path, answer, *(reversed(lines[:2]) if is_first else lines[:2]), lines[2], concurrency=1)
    assert (counts.num_succeeded, counts.num_failed, counts.num_invalid) == (2, 1, 0)
    assert by_id(tmp_path / "out")["page"]["error"]["code"] == "not_json"


@pytest.mark.parametrize("status", [200, 404, 501])
def test_address_without_an_api_ends_the_batch(tmp_path: Path, status: int) -> None:
    with pytest.raises(ServerUnreachableError, match=f"answers {status} without JSON: it is not a server of models"):
        run(tmp_path, lambda handler, body: send_page(handler, status), *(request(str(index)) for index in range(9)))
    assert read_lines(tmp_path / "out") == []


def test_server_that_goes_away_ends_the_batch_and_the_next_run_resumes(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", *(request(str(index)) for index in range(9)))
    target = tmp_path / "out"
    num_answered = 0

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        nonlocal num_answered
        num_answered += 1
        handler.send_json(200, ANSWER)
        if num_answered == 4:
            handler.close_connection = True
            handler.server.socket.close()

    with stub_server(answer) as server, pytest.raises(ServerUnreachableError, match="the same command goes on"):
        run_against(server.url, source, target, concurrency=1)
    num_before = len(read_lines(target))
    assert 0 < num_before < 9
    with stub_server(lambda handler, body: handler.send_json(200, ANSWER)) as server:
        counts = run_against(server.url, source, target)
        assert len(server.requests) == 9 - num_before
    assert counts.num_succeeded == 9 - num_before
    assert set(by_id(target)) == {str(index) for index in range(9)}
