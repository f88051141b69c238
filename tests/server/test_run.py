"""The life of a real server: start, drain, second signal, an engine that dies."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.server.run import bind
from tests.cli.tiny_directory import make_tiny_directory
from tests.server.serving import LIMIT_S, RunningChat, serving

SLOW = {"QUIRE_FAULTS": "slow-step:ms=30"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_directory(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


def test_it_answers_and_ends_in_order(directory: Path) -> None:
    with serving(directory, **SLOW) as server:
        assert server.get("/health/ready") == 200
        chats = [RunningChat(server, 60) for _ in range(4)]
        server.signal(signal.SIGTERM)
        server.wait_until("/health/ready", 503)
        assert server.get("/health/live") == 200
        status, body = server.chat(1)
        assert (status, body["error"]["code"]) == (503, "draining")
        for chat in chats:
            assert chat.events()[-1]["usage"]["completion_tokens"] == 60
        assert server.wait() == 0
        assert "Traceback" not in server.stderr


def test_the_drain_has_an_end(directory: Path) -> None:
    with serving(directory, "--drain-timeout-s", "0.2", **SLOW) as server:
        chats = [RunningChat(server, 2000) for _ in range(2)]
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        for chat in chats:
            assert chat.events()[-1]["error"]["code"] == "engine_dead"


def test_a_second_signal_ends_it_at_once(directory: Path) -> None:
    with serving(directory, **SLOW) as server:
        engine = server.engine()
        chats = [RunningChat(server, 2000) for _ in range(2)]
        server.signal(signal.SIGTERM)
        server.wait_until("/health/ready", 503)
        server.signal(signal.SIGINT)
        assert server.wait() == 0
        assert all("usage" not in chat.events()[-1] for chat in chats)
        assert not engine.is_running()


def test_an_engine_that_is_killed_is_replaced(directory: Path) -> None:
    with serving(directory, **SLOW) as server:
        for _ in range(2):
            chats = [RunningChat(server, 2000) for _ in range(2)]
            killed = server.engine()
            killed.kill()
            for chat in chats:
                assert chat.events()[-1]["error"]["code"] == "engine_dead"
            server.wait_until("/health/ready", 200)
            assert server.engine().pid != killed.pid
            assert server.chat(3)[1]["usage"]["completion_tokens"] == 3
        assert server.stderr.count("the engine process died") == 2


def test_a_crash_loop_ends_the_server_with_a_reason(directory: Path) -> None:
    with serving(directory) as server:
        for _ in range(4):
            server.engine().kill()
            server.wait_until("/health/ready", 503)
            server.wait_until("/health/ready", 200)
        server.engine().kill()
        assert server.wait() == 1
        assert "died 5 times within 60 s" in server.stderr
        assert "Traceback" not in server.stderr


def test_sigterm_while_the_model_loads(directory: Path) -> None:
    command = [sys.executable, "-m", "quire", "serve", str(directory), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    time.sleep(0.8)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode in (0, 143)
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--port", "99999"], 2, "not in 0 … 65535"),
        (["--host", "192.0.2.1"], 2, "no address of this machine: choose another --host"),
        (["nowhere"], 3, "no model 'nowhere'"),
        (["--bad"], 2, "No such option"),
        (["--chat-template", "missing.jinja"], 2, "neither a Jinja template nor a readable file"),
        (["--chat-template", "{% for %}"], 2, "has an error in line 1"),
        (["--kv-cache-memory-bytes", "1"], 4, "KV"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(directory: Path, arguments: list[str], code: int, message: str) -> None:
    model = [] if arguments == ["nowhere"] else [str(directory)]
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", *arguments, *model]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == code
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_port_in_use_is_said_at_once() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{other.getsockname()[1]}"):
            bind("127.0.0.1", other.getsockname()[1])


def test_a_host_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        bind("no.such.host.invalid", 0)
