"""`chat`, `top` and `batch` with a real `quire serve` and a tiny model."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.soak.server import Server, serving
from tests.cli.command_line import call, parsed
from tests.cli.tiny_directory import make_tiny_directory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_tiny_directory(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)
    with serving(str(model), environment={"QUIRE_FAULTS": "slow-step:ms=5"}) as running:
        yield running


def test_ctrl_c_ends_the_work_on_the_server_too(server: Server) -> None:
    command = [sys.executable, "-m", "quire", "chat", "hi", "--url", server.url, "--max-tokens", "1900", "--ignore-eos"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    value = parsed(call("top", "--url", server.url, "--once", "--json", "--interval-s", "0.3"))
    assert (value["model"], value["running"]) == ("soak", 1)
    assert value["generation_tokens_per_s"] > 0
    assert value["kv_usage_ratio"] > 0
    os.kill(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "[interrupted]" in stderr
    assert asyncio.run(server.seconds_until_idle()) < 60
    assert asyncio.run(server.metrics()).value("quire_requests_total", finish_reason="abort") == 1
