"""`quire batch` as a user runs it."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.cli import batch
from tests.cli.batch_inputs import by_id, read_lines, request, write_lines
from tests.cli.command_line import call, call_process, parsed
from tests.cli.stub_server import Handler, stub_server
from tests.cli.tiny_directory import make_tiny_directory
from tests.processes import wait_for_end

FAULTS = Path(__file__).parents[1] / "faults"


def answer(handler: Handler, body: dict[str, Any]) -> None:
    if not body:
        return handler.send_json(200, {"data": [{"id": "tiny"}]})
    status = {9: 400, 8: 500}.get(body.get("temperature", 1), 200)
    return handler.send_json(status, {"id": "x", "model": body.get("model"), "usage": {"completion_tokens": 2}})


def test_next_run_skips_answers_and_tries_failures_again(tmp_path: Path) -> None:
    source, target = write_lines(tmp_path / "in", request("a"), request("hot", body={"temperature": 8})), tmp_path / "o"
    with stub_server(answer) as server:
        arguments = ("batch", str(source), "-o", str(target), "--url", server.url)
        value = parsed(call(*arguments, "--json", "--model", "named"))
        assert (value["schema"], value["num_succeeded"], value["num_tokens"]) == ("quire.batch/1", 1, 2)
        failed = call(*arguments)
        assert failed.exit_code == 6
        assert "0 answers, 1 were there already, 1 failed: run the same command" in failed.stderr
        write_lines(source, request("a"), request("hot"))
        assert call(*arguments, "--model", "named").exit_code == 0
        again = call("batch", "-", *arguments[2:], stdin=source.read_text())
        assert (again.exit_code, again.stdout) == (0, "")
        assert "0 answers, 2 were there already" in again.stderr
        assert len([body for _, _, body in server.requests if body]) == 4
    found = by_id(target)
    assert [found[name]["response"]["body"]["model"] for name in ("a", "hot")] == ["named", "named"]


def test_request_that_changed_after_its_answer_is_an_error(tmp_path: Path) -> None:
    source, target = write_lines(tmp_path / "in", request("a"), request("b")), tmp_path / "out"
    with stub_server(answer) as server:
        arguments = ("batch", str(source), "-o", str(target), "--url", server.url)
        assert call(*arguments).exit_code == 0
        before = target.read_bytes()
        # The order of the fields and new lines do not matter.
        write_lines(source, request("new"), dict(reversed(request("a").items())), request("b"))
        assert call(*arguments).exit_code == 0
        assert target.read_bytes().startswith(before)
        before = target.read_bytes()
        write_lines(source, request("a"), request("new"), request("b", body={"messages": [1]}))
        changed = call(*arguments)
        assert changed.exit_code == 2
        assert "answers to other requests with the same custom_id: 'b' in line 3; choose another file" in changed.stderr
        assert target.read_bytes() == before


def test_finished_file_and_unsendable_lines_start_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.asynccontextmanager
    async def refuse(*arguments: object) -> Any:
        raise AssertionError("a server was started")
        yield

    monkeypatch.setattr(batch, "own_server", refuse)
    monkeypatch.setattr(batch, "resolve_source", lambda *_, **__: pytest.fail("a model was fetched"))
    source, target = write_lines(tmp_path / "in", request("a"), "{"), tmp_path / "out"
    response = {"status_code": 200, "request_id": "r", "body": {}}
    # An answer of another program has no digest, and is kept.
    write_lines(target, {"id": "batch_req_1", "custom_id": "a", "response": response, "error": None})
    result = call("batch", str(source), "-o", str(target))
    assert (result.exit_code, set(by_id(target))) == (6, {"a", None})
    write_lines(source, request("a"))
    result = call("batch", str(source), "-o", str(target))
    assert (result.exit_code, "1 were there already" in result.stderr) == (0, True)


def test_batch_without_an_address_starts_a_server_that_ends_with_it(tmp_path: Path) -> None:
    model = make_tiny_directory(tmp_path / "model", max_position_embeddings=4096)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True}
    long = request("long", body={**body, "max_tokens": 4000})
    source = write_lines(tmp_path / "in", request("a", body=body), "nonsense", long, request("b", body=body))
    target = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", "batch", str(source), "-o", str(target), "--model", str(model)],
        env={**os.environ, "PYTHONPATH": str(FAULTS), "QUIRE_FAULTS": "slow-step:ms=50"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    while not target.exists() or len(read_lines(target)) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children  # the engine
    process.kill()
    process.communicate()
    wait_for_end(*children)
    found = by_id(target)
    assert found["a"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert found["b"]["response"]["status_code"] == 200
    assert found[None]["error"]["code"] == "invalid_line"


def test_ctrl_c_leaves_a_file_that_the_next_run_completes(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", *(request(str(index)) for index in range(200)))
    target = tmp_path / "out"
    several, is_over = threading.Event(), threading.Event()

    def slow(handler: Handler, body: dict[str, Any]) -> None:
        if len(server.requests) > 20:
            several.set()
            is_over.wait(60)
        answer(handler, body)

    with stub_server(slow) as server:
        command = ["-m", "quire", "batch", str(source), "-o", str(target), "--url", server.url, "-c", "4"]
        command.append("--quiet")  # a slow machine has progress to report
        process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True)
        assert several.wait(60)
        os.kill(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        is_over.set()
        assert (process.returncode, stderr) == (130, "")
        num_before = len(read_lines(target))
        assert 0 < num_before < 200
        result = call("batch", str(source), "-o", str(target), "--url", server.url)
    assert f"{200 - num_before} answers, {num_before} were there already" in result.stderr
    assert len(by_id(target)) == 200


def test_wrong_lines_are_counted_apart(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    refused, failing = request("hot", body={"temperature": 9}), request("warm", body={"temperature": 8})
    write_lines(source, "{", refused, failing, request("wrong", url="/v2"), request("a"))
    with stub_server(answer) as server:
        result = call("batch", str(source), "-o", str(target), "--url", server.url)
        assert result.exit_code == 6
        assert "1 answer, 1 failed: run the same command to try it again, 3 lines are wrong" in result.stderr
        write_lines(source, "{", request("a"))
        result = call("batch", str(source), "-o", str(target), "--url", server.url)
        assert (result.exit_code, "run the same" in result.stderr) == (6, False)
        assert "1 line is wrong" in result.stderr
        value = parsed(call("batch", str(source), "-o", str(target), "--url", server.url, "--json"))
        assert (value["num_failed"], value["num_invalid"]) == (1, 1)


def test_batch_resumes_after_a_full_disk(tmp_path: Path) -> None:
    source, target = write_lines(tmp_path / "in", *(request(str(index)) for index in range(40))), tmp_path / "out"
    with stub_server(answer) as server:
        arguments = ("batch", str(source), "-o", str(target), "--url", server.url)
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # noqa: E731
        result = call_process(*arguments, preexec_fn=limit)
        assert (result.returncode, result.stdout) == (1, "")
        assert "error[output]" in result.stderr
        assert "the same command goes on" in result.stderr
        num_before = len(read_lines(target))
        assert 0 < num_before < 40
        assert f"{40 - num_before} answers, {num_before} were there already" in call(*arguments).stderr
    assert len(by_id(target)) == 40


def test_ctrl_c_while_the_own_server_starts_is_quiet(tmp_path: Path) -> None:
    model, source = make_tiny_directory(tmp_path / "model"), write_lines(tmp_path / "in", request("a"))
    # The engine's process says that it has begun, and is then slow.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\n"
        "if 'quire.engine.process.child' in sys.orig_argv:\n"
        f"    open({str(tmp_path / 'begun')!r}, 'w').close()\n"
        "    time.sleep(60)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", "batch", str(source), "-o", str(tmp_path / "out"), "--model", str(model)],
        env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    deadline_s = time.monotonic() + 60
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")
