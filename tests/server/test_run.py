"""The life of a real server: start, drain, second signal, an engine that dies."""

import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from benchmarks.server_process import children_of
from quire.config import EngineOptions
from quire.errors import ConfigError
from quire.server.options import ServerOptions
from quire.server.run import bind, serve
from tests.cli.tiny_directory import make_tiny_directory
from tests.processes import wait_for_end, wait_until
from tests.server.serving import LIMIT_S, RunningChat, Serving, serving

SLOW = {"QUIRE_FAULTS": "slow-step:ms=30"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_directory(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


def test_server_accepts_many_connections_then_drains_until_the_timeout(directory: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        server = Serving(directory, "--drain-timeout-s", "5", **SLOW)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    process = psutil.Process(server.process.pid)
    try:
        assert process.rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
        process.rlimit(psutil.RLIMIT_NOFILE, (512, 512))
        with ExitStack() as stack:
            address = ("127.0.0.1", urlsplit(server.url).port)
            for _ in range(1000):
                stack.enter_context(socket.create_connection(address, timeout=LIMIT_S))
            assert server.get("/health/ready") == 200
        assert process.num_fds() < 512
        chats = [RunningChat(server, 20) for _ in range(4)]
        endless = RunningChat(server, 2000)
        server.signal(signal.SIGTERM)
        server.wait_until("/health/ready", 503)
        assert server.get("/health/live") == 200
        status, body = server.chat(1)
        assert (status, body["error"]["code"]) == (503, "draining")
        for chat in chats:
            assert chat.events()[-1]["usage"]["completion_tokens"] == 20
        assert server.wait() == 0
        assert endless.events()[-1]["error"]["code"] == "engine_dead", "the time to drain is over"
    finally:
        server.kill()
    assert "open files" not in server.stderr
    assert "Traceback" not in server.stderr


def test_second_signal_ends_the_server_at_once(directory: Path) -> None:
    with serving(directory, **SLOW) as server:
        engine = server.engine()
        chats = [RunningChat(server, 2000) for _ in range(2)]
        server.signal(signal.SIGTERM)
        server.wait_until("/health/ready", 503)
        server.signal(signal.SIGINT)
        assert server.wait() == 0
        assert all("usage" not in chat.events()[-1] for chat in chats)
        wait_for_end(engine)


def test_killed_engine_is_replaced_until_the_fifth_death_within_a_minute(directory: Path) -> None:
    with serving(directory, **SLOW) as server:
        chats = [RunningChat(server, 2000) for _ in range(2)]
        killed = {server.engine().pid}
        server.engine().kill()
        for chat in chats:
            assert chat.events()[-1]["error"]["code"] == "engine_dead"
        server.wait_for_other_engine(*killed)
        assert server.chat(3)[1]["usage"]["completion_tokens"] == 3
        while server.process.poll() is None:  # from now on engines are killed while they load
            for engine in engines(server.process.pid):
                if engine.pid not in killed:
                    killed.add(engine.pid)
                    with suppress(psutil.NoSuchProcess):  # its server has just ended
                        engine.kill()
            time.sleep(0.01)
        assert server.wait() == 1
        assert len(killed) == 5
        assert server.stderr.count("killed by SIGKILL (9) (out of memory?); starting another") == 4
        assert "the 5th time within 60 s" in server.stderr
        assert "Traceback" not in server.stderr


def test_ranks_are_replaced_when_one_is_killed(directory: Path) -> None:
    with serving(directory, "--tensor-parallel-size=2", "--pipeline-parallel-size=2") as server:
        _, expected = server.chat(9)
        before = [server.engine(), *server.engine().children()]
        assert len(before) == 4
        chats = [RunningChat(server, 2000) for _ in range(2)]
        before[-1].kill()
        for chat in chats:
            error = chat.events()[-1]["error"]
            assert error["code"] == "engine_dead"
            assert "was killed by SIGKILL (9)" in error["message"]
        server.wait_for_other_engine(before[0].pid)
        wait_for_end(*before)
        assert server.chat(9)[1]["choices"] == expected["choices"]
        before = [server.engine(), *server.engine().children()]
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        wait_for_end(*before)
        assert "Traceback" not in server.stderr


def engines(server_pid: int) -> list[psutil.Process]:
    """Return the engine processes of a server."""
    return children_of(server_pid, "quire.engine.process.child")


@pytest.mark.parametrize("is_engine_killed", [False, True])
def test_server_that_is_still_loading_ends_with_a_reason(directory: Path, is_engine_killed: bool) -> None:
    command = [sys.executable, "-m", "quire", "serve", str(directory), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: engines(process.pid))
    if is_engine_killed:
        engines(process.pid)[0].kill()
    else:
        process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=LIMIT_S)
    assert "Traceback" not in stderr
    if is_engine_killed:
        assert process.returncode == 1
        assert "killed by SIGKILL (9) (out of memory?), while it was loading the model" in stderr
    else:
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 3, "no model 'nowhere'"),
        (["--kv-cache-memory-bytes", "1"], 4, "KV"),
        (["--models-memory-bytes", "1MiB"], 2, "--keep-alive 5m"),
        (["--models-memory-bytes", "1MiB", "b=smollm2"], 4, "more than the 1 MiB available on cpu (--models-memory"),
    ],
)
def test_server_that_cannot_start_prints_one_line(
    directory: Path, arguments: list[str], code: int, message: str
) -> None:
    model = [] if arguments == ["nowhere"] else [str(directory)]
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", *arguments, *model]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == code
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("host", "template", "message"),
    [
        ("192.0.2.1", None, "no address of this machine: choose another --host"),
        ("no.such.host.invalid", None, "is not an address"),
        ("127.0.0.1", "missing.jinja", "neither a Jinja template nor a readable file"),
        ("127.0.0.1", "{% for %}", "has an error in line 1"),
    ],
)
def test_options_that_cannot_work_are_config_errors(
    host: str, template: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        serve(EngineOptions(chat_template=template), ServerOptions(host=host, port=0, insecure=True))


def test_what_a_server_imports_is_no_part_of_later_collections() -> None:
    code = (
        "import gc\n"
        "from quire.server.options import ServerOptions\n"
        "from quire.server.run import prepare_process\n"
        "prepare_process(ServerOptions())\n"
        "print(gc.get_freeze_count() / (gc.get_freeze_count() + len(gc.get_objects())))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert float(result.stdout) > 0.95


def test_port_in_use_is_a_config_error() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{other.getsockname()[1]}"):
            bind("127.0.0.1", other.getsockname()[1])
