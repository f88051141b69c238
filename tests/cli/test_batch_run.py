"""Many at once, busy servers, broken connections, and being interrupted."""

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quire.cli import batch_run
from quire.cli.batch_files import AnswerFile
from quire.cli.batch_requests import read_requests
from quire.cli.batch_run import BatchCounts, BatchRun
from quire.cli.server_address import ServerUnreachableError
from quire.cli.server_client import client_settings
from tests.cli.batch_inputs import by_id, read_lines, request, requests_of, write_lines
from tests.cli.stub_server import Answer, Handler, stub_server

ANSWER = {"id": "chatcmpl-1", "usage": {"completion_tokens": 5}}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "FIRST_WAIT_S", 0.01)


def run(tmp_path: Path, answer: Answer, *lines: Any, **options: Any) -> BatchCounts:
    source = write_lines(tmp_path / "in", *lines)
    with stub_server(answer) as server:
        return run_against(server.url, source, tmp_path / "out", **options)


def run_against(url: str, source: Path, target: Path, **options: Any) -> BatchCounts:
    counts = BatchCounts(len(list(read_requests(requests_of(source)))))
    settings = {"concurrency": 4, "max_retries": 3, **options}
    with AnswerFile(target) as answers:
        BatchRun(client_settings(url), answers, counts, **settings).run(read_requests(requests_of(source)))
    return counts


def test_all_are_answered_some_at_once(tmp_path: Path) -> None:
    lock, running, most = threading.Lock(), [0], [0]

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.02)
        with lock:
            running[0] -= 1
        handler.send_json(200, {**ANSWER, "model": body["model"]})

    lines = [request(str(index)) for index in range(12)]
    counts = run(tmp_path, answer, *lines, request("named", body={"model": "mine"}), concurrency=3, model="first")
    assert (counts.num_succeeded, counts.num_failed, counts.num_tokens, counts.num_done) == (13, 0, 65, 13)
    assert 2 <= most[0] <= 3
    found = by_id(tmp_path / "out")
    assert found["3"]["response"]["body"]["model"] == "first"
    assert found["named"]["response"]["body"]["model"] == "mine"
    assert found["3"]["response"]["request_id"] == "chatcmpl-1"
    assert found["3"]["error"] is None


def test_a_bad_line_and_a_refused_one_do_not_stop_the_rest(tmp_path: Path) -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        status = 400 if body.get("temperature") == 9 else 200
        handler.send_json(status, ANSWER if status == 200 else {"error": {"message": "no"}})

    counts = run(tmp_path, answer, "{", request("hot", body={"temperature": 9}), request("good"))
    assert (counts.num_succeeded, counts.num_failed, counts.num_invalid) == (1, 2, 2)
    found = by_id(tmp_path / "out")
    assert found[None]["error"]["message"].startswith("line 1: not JSON")
    assert found["hot"]["response"] == {"status_code": 400, "request_id": "", "body": {"error": {"message": "no"}}}
    assert found["good"]["response"]["status_code"] == 200


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_when_it_says(tmp_path: Path, status: int) -> None:
    times: list[float] = []

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        times.append(time.monotonic())
        if len(times) == 1:
            return handler.send_json(status, {"error": {}}, Retry_After="1")
        if len(times) == 2:
            return handler.send_json(status, {"error": {}})
        return handler.send_json(200, ANSWER)

    counts = run(tmp_path, answer, request("a"))
    assert (counts.num_succeeded, counts.num_retries) == (1, 2)
    assert times[1] - times[0] >= 1


def test_a_server_that_stays_busy_is_a_failure(tmp_path: Path) -> None:
    counts = run(tmp_path, lambda handler, body: handler.send_json(503, {"error": {}}), request("a"))
    assert (counts.num_failed, counts.num_retries) == (1, 3)
    assert by_id(tmp_path / "out")["a"]["response"]["status_code"] == 503


def test_connections_that_break(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("status", [200, 404, 502])
def test_an_answer_that_is_no_json(tmp_path: Path, status: int) -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        if body.get("user") == "page":
            send_page(handler, status)
        else:
            handler.send_json(200, ANSWER)

    lines = [request("a"), request("page", body={"user": "page"}), request("b")]
    counts = run(tmp_path, answer, *lines, concurrency=1)
    assert (counts.num_succeeded, counts.num_failed, counts.num_invalid) == (2, 1, 0)
    assert by_id(tmp_path / "out")["page"]["error"]["code"] == "not_json"


@pytest.mark.parametrize("status", [200, 404, 501])
def test_an_address_that_is_no_api_ends_it(tmp_path: Path, status: int) -> None:
    with pytest.raises(ServerUnreachableError, match=f"answers {status} without JSON: it is not a server of models"):
        run(tmp_path, lambda handler, body: send_page(handler, status), *(request(str(index)) for index in range(9)))
    assert read_lines(tmp_path / "out") == []


@pytest.mark.parametrize("status", [413, 500])
def test_a_first_request_alone_may_get_a_page(tmp_path: Path, status: int) -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        if body.get("user") == "page":
            send_page(handler, status)
        else:
            handler.send_json(200, ANSWER)

    counts = run(tmp_path, answer, request("page", body={"user": "page"}), request("b"), concurrency=1)
    assert (counts.num_succeeded, counts.num_failed) == (1, 1)


def test_a_server_that_goes_away_ends_it_and_a_second_run_goes_on(tmp_path: Path) -> None:
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
    assert (counts.num_skipped, counts.num_succeeded) == (num_before, 9 - num_before)
    assert set(by_id(target)) == {str(index) for index in range(9)}
