"""`quire serve --data-parallel-size 2` with real replicas: one is killed under load, then the whole server."""

import os
import threading
from pathlib import Path

import psutil
import pytest

from benchmarks.server_process import children_of
from quire.runtime.hardware import cpus_of_ranks
from tests.cli.command_line import call, call_process
from tests.cli.tiny_directory import make_tiny_directory
from tests.processes import wait_for_end, wait_until
from tests.server.serving import LIMIT_S, RunningChat, Serving, serving

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two replicas need two cores")
SLOW = {"QUIRE_FAULTS": "slow-step:ms=10"}
NUM_CLIENTS, NUM_EACH = 6, 5
NUM_LONG = 500
"""Tokens of streams that must not end before a replica is killed, also on a busy machine."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_directory(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


def replicas(server: Serving) -> list[psutil.Process]:
    """Return the processes of the replicas."""
    return children_of(server.process.pid, "quire.server.router.child")


def test_killed_replica_loses_no_request_that_had_got_nothing_and_is_started_again(directory: Path) -> None:
    options = ("--data-parallel-size", "2", "--router-policy", "round-robin")
    with serving(directory, *options, **SLOW) as server:
        streams = [RunningChat(server, NUM_LONG) for _ in range(4)]  # two on each
        statuses: list[tuple[int, int]] = []

        def work() -> None:
            for _ in range(NUM_EACH):
                status, body = server.chat(10)  # not a stream: nothing is sent before its end
                statuses.append((status, body.get("usage", {}).get("completion_tokens", 0)))

        clients = [threading.Thread(target=work) for _ in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        wait_until(lambda: len(statuses) >= NUM_CLIENTS)
        first, second = replicas(server)
        engines = [process for item in (first, second) for process in item.children(recursive=True)]
        first.kill()
        for client in clients:
            client.join(LIMIT_S)
        assert statuses == [(200, 10)] * (NUM_CLIENTS * NUM_EACH)
        ends = [stream.events()[-1] for stream in streams]
        lost = [end for end in ends if "error" in end]
        assert {end["error"]["code"] for end in lost} == {"replica_lost"}, "their first events had been sent"
        assert all(end["usage"]["completion_tokens"] == NUM_LONG for end in ends if end not in lost)
        wait_until(lambda: len(server.request("/list_workers")[1]["workers"]) == 2 and
                 all(item["state"] == "ready" for item in server.request("/list_workers")[1]["workers"]))  # fmt: skip
        wait_until(lambda: "replica-0" in server.stderr)
        wait_until(lambda: "killed by SIGKILL (9) (out of memory?); starting another" in server.stderr)
        everything = [*engines, *replicas(server), *(child for item in replicas(server) for child in item.children())]
        assert {tuple(process.cpu_affinity()) for process in engines_of(server)} == set(shares())
        server.process.kill()
        wait_for_end(*everything)
        assert "Traceback" not in server.stderr


def engines_of(server: Serving) -> list[psutil.Process]:
    """Return the engine processes of all replicas."""
    return [item for replica in replicas(server) for item in children_of(replica.pid, "quire.engine.process.child")]


def shares() -> list[tuple[int, ...]]:
    return [tuple(cpus) for cpus in cpus_of_ranks(2)]


def test_replica_that_cannot_load_ends_the_server_with_its_error(directory: Path) -> None:
    result = call_process(
        "serve", str(directory), "--port", "0", "--data-parallel-size", "2", "--num-blocks-override", "1"
    )
    assert result.returncode == 4
    assert result.stderr.count("\n") == 1
    assert "error[" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [(["4096"], "--data-parallel-size"), (["2", "--device", "cuda:0"], "--device cuda gives each replica its own")],
)
def test_replicas_without_cores_or_gpus_are_refused(directory: Path, arguments: list[str], advice: str) -> None:
    result = call("serve", str(directory), "--port", "0", "--data-parallel-size", *arguments)
    assert result.exit_code == 2
    assert advice in result.stderr
