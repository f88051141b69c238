"""Ranks on the nodes of a Ray cluster, which Ray starts on this machine."""

import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from quire.errors import ConfigError, EngineDeadError
from quire.parallel.rank_messages import Step
from quire.parallel.tensor_parallel import RankExecutor, create_executor
from quire.scheduler.scheduler import Scheduler
from quire.types import ScheduledRequest, SchedulerOutput
from tests.parallel.test_executor import generate, make_request, prompt
from tests.runtime.tiny_llama import tiny_llama
from tests.runtime.tiny_model import run_to_end, tokens_of

RAY = {"distributed_executor_backend": "ray", "pipeline_parallel_size": 2, "block_size": 16}
both_sizes = pytest.mark.parametrize("size", [1, 2])


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray, connected to a cluster of two nodes."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # it would send them over the network
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'quire[ray]'")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 0})
    cluster.add_node(**{name: value for name, value in node.items() if name == "num_cpus"})
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    yield ray
    ray.shutdown()
    cluster.shutdown()


@both_sizes
def test_stages_on_nodes_give_the_tokens_of_one_worker_then_fail_with_a_lost_one(ray: Any, size: int) -> None:
    """With two ranks of a stage the lost one is on the engine's node."""
    config, checkpoint = tiny_llama(**RAY, tensor_parallel_size=size)
    executor = create_executor(config, checkpoint)
    assert isinstance(executor, RankExecutor)
    try:
        settings = replace(config.scheduler, max_in_flight=executor.max_in_flight)
        found, _ = run_to_end(Scheduler(settings), executor, [make_request(f"r{i}", prompt(i)) for i in range(4)])
        expected, _ = generate(*(make_request(f"r{i}", prompt(i)) for i in range(4)), block_size=16)
        assert {name: tokens_of(results) for name, results in found.items()} == expected
        is_told, told = threading.Event(), list[EngineDeadError]()
        executor.watch(lambda error: (told.append(error), is_told.set()))
        ray.kill(executor._processes._actors[0])  # type: ignore[union-attr]
        assert is_told.wait(60), "an idle engine must die with its stage"
        scheduler = Scheduler(settings)
        scheduler.add_request(make_request("late", prompt(1)))
        executor.submit(scheduler.schedule())
        with pytest.raises(EngineDeadError, match="a stage's actor was lost"):
            executor.collect()
    finally:
        executor.shutdown()


@both_sizes
def test_error_in_a_stage_ends_the_step_that_waits_for_it(ray: Any, size: int) -> None:
    executor = create_executor(*tiny_llama(**RAY, tensor_parallel_size=size))
    try:
        item = ScheduledRequest("stranger", 0, 1, 1, (), ())
        executor._processes.send(Step(SchedulerOutput(0, (), (item,), (), (), ())))  # type: ignore[attr-defined]
        scheduler = Scheduler(tiny_llama(**RAY)[0].scheduler)
        scheduler.add_request(make_request("r1", prompt(1)))
        executor.submit(scheduler.schedule())
        with pytest.raises(EngineDeadError, match="request 'stranger' was scheduled, but"):
            executor.collect()
    finally:
        executor.shutdown()


def test_clusters_without_enough_cpus_are_refused(ray: Any) -> None:
    config, checkpoint = tiny_llama(**RAY)
    config = replace(config, hardware=replace(config.hardware, num_threads=4))
    with pytest.raises(
        ConfigError, match=r"need 4 CPUs each, and the nodes of the Ray cluster have [02], [02]: larger nodes, or OMP"
    ):
        create_executor(config, checkpoint)


def test_missing_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs Ray: pip install .*'ray<"):
        create_executor(*tiny_llama(**RAY))
