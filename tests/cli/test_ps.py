"""`quire ps`: what it says of servers that run, of one that does not answer, and of none."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.cli.ps import format_duration, memory_bytes
from quire.server.registration import registered
from tests.cli.command_line import call, parsed
from tests.cli.metrics_page import page
from tests.cli.stub_server import Handler, stub_server


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def answer(handler: Handler, body: dict[str, Any]) -> None:
    if handler.path == "/health/ready":
        return handler.send_json(200, {})
    data = page(running=3, waiting=1).encode()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)
    return None


def test_nothing_runs() -> None:
    assert parsed(call("ps", "--json")) == {"schema": "quire.ps/1", "servers": []}
    result = call("ps")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no server runs here" in result.stderr


def test_a_server() -> None:
    with stub_server(answer) as server, registered(server.url, "tiny"):
        (row,) = parsed(call("ps", "--json"))["servers"]
        header, line = call("ps").stdout.splitlines()
    assert (row["pid"], row["model"], row["url"]) == (os.getpid(), "tiny", server.url)
    assert (row["state"], row["running"], row["waiting"]) == ("ready", 3, 1)
    assert row["memory_bytes"] > 10_000_000
    assert header.split()[:4] == ["PID", "MODEL", "URL", "STATE"]
    assert line.split()[:6] == [str(os.getpid()), "tiny", server.url, "ready", "3", "1"]


def test_a_server_that_needs_another_key_and_is_not_ready() -> None:
    def refuse(handler: Handler, body: dict[str, Any]) -> None:
        ready = handler.path == "/health/ready"
        handler.send_json(503 if ready else 401, {"error": {"message": "m", "code": "draining" if ready else "key"}})

    with stub_server(refuse) as server, registered(server.url, "tiny"):
        (row,) = parsed(call("ps", "--json"))["servers"]
    assert (row["state"], row["running"], row["waiting"]) == ("draining", None, None)


def test_a_server_that_does_not_answer() -> None:
    with stub_server(answer) as server:
        url = server.url
    with registered(url, "tiny"):
        assert parsed(call("ps", "--json"))["servers"][0]["state"] == "no answer"
        assert " – " in call("ps").stdout


def test_memory_counts_children() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    alone = psutil.Process().memory_info().rss
    assert memory_bytes(os.getpid()) > alone
    process.communicate()
    assert memory_bytes(process.pid) == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59, "59s"), (61, "1m01s"), (3700, "1h01m"), (9e4, "1d01h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
