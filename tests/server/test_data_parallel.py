"""`quire serve --data-parallel-size 2` with real engines: one is killed under load, all are, then the whole server."""

import os
from pathlib import Path

import psutil
import pytest

from benchmarks.server_process import children_of
from quire.runtime.hardware import cpus_of_ranks
from tests.cli.command_line import call, call_process
from tests.cli.tiny_directory import make_tiny_directory
from tests.processes import wait_for_end, wait_until
from tests.server.serving import RunningChat, Serving, serving

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two engines need two cores")
SLOW = {"QUIRE_FAULTS": "slow-step:ms=10"}
NUM_LONG = 500
"""Tokens of streams that must not end before an engine is killed, also on a busy machine."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_directory(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


def engines(server: Serving) -> list[psutil.Process]:
    """Return the engines' processes, in the order of their shares."""
    found = children_of(server.process.pid, "quire.engine.process.child")
    return sorted(found, key=lambda process: process.cpu_affinity())


def test_killed_engine_ends_its_requests_only_and_is_replaced(directory: Path) -> None:
    with serving(directory, "--data-parallel-size", "2", **SLOW) as server:
        first, second = engines(server)
        assert [tuple(engine.cpu_affinity()) for engine in (first, second)] == [
            tuple(cpus) for cpus in cpus_of_ranks(2)
        ]
        streams = [RunningChat(server, NUM_LONG) for _ in range(4)]
        first.kill()
        wait_until(lambda: server.metric('quire_engine_deaths_total{engine="0"}') == 1)
        assert server.chat(3)[0] == 200, "the other engine answers"
        ends = [stream.events()[-1] for stream in streams]
        lost = [end for end in ends if "error" in end]
        assert 0 < len(lost) < 4
        assert {end["error"]["code"] for end in lost} == {"engine_dead"}
        assert all(end["usage"]["completion_tokens"] == NUM_LONG for end in ends if end not in lost)
        wait_until(lambda: len(engines(server)) == 2 and server.metric('quire_engine_up{engine="0"}') == 1)
        assert second in engines(server)
        assert first not in engines(server)
        assert "killed by SIGKILL (9) (out of memory?); starting another" in server.stderr
        everything = engines(server)
        server.process.kill()
        wait_for_end(*everything)
        assert "Traceback" not in server.stderr


def test_all_engines_killed_are_replaced_and_sleep_and_wake_together(directory: Path) -> None:
    with serving(directory, "--data-parallel-size", "2") as server:
        former = engines(server)
        for engine in former:
            engine.kill()
        wait_for_end(*former)
        server.wait_for_other_engine(*(engine.pid for engine in former))
        assert server.chat(3)[0] == 200
        wait_until(lambda: len(engines(server)) == 2)
        assert server.request("/sleep", {})[0] == 200
        assert engines(server) == []
        assert server.chat(3)[0] == 503
        assert server.request("/wake_up", {})[0] == 200
        assert len(engines(server)) == 2
        assert server.chat(3)[0] == 200


def test_engine_that_cannot_load_ends_the_server_with_its_error(directory: Path) -> None:
    result = call_process(
        "serve", str(directory), "--port", "0", "--data-parallel-size", "2", "--num-blocks-override", "1"
    )
    assert result.returncode == 4
    assert result.stderr.count("\n") == 1
    assert "error[" in result.stderr


@pytest.mark.parametrize("arguments", [["4096"], ["0"], ["2", "--keep-alive", "5m"], ["2", "--device", "cuda:0"]])
def test_engines_without_cores_or_gpus_are_refused(directory: Path, arguments: list[str]) -> None:
    result = call("serve", str(directory), "--port", "0", "--data-parallel-size", *arguments)
    assert result.exit_code == 2
    assert "data-parallel-size" in result.stderr or "data_parallel_size" in result.stderr or "cuda" in result.stderr
