"""A recorded run can be replayed, schedule by schedule, without the model."""

import random

import pytest

from quire.config import SchedulerConfig
from quire.types import RequestStatus
from tests.fakes import FakeExecutor
from tests.scheduler.builders import VOCAB_SIZE, Driver, make_beam, make_config, make_pooling_request, make_request
from tests.scheduler.recording import RECORDED, RecordingScheduler, replay


def record(config: SchedulerConfig) -> tuple[RecordingScheduler, Driver]:
    """Record a run that uses every input: n, beams, pooling, stop rules, aborts, stop strings, a reset, an error."""
    rng = random.Random(1)
    scheduler = RecordingScheduler(config, clock=lambda: 5.0)
    driver = Driver(config, scheduler)
    driver.executor.num_iterations = lambda most: most
    driver.executor.fails = lambda name, num_tokens: name == "bad" and num_tokens == 11
    driver.add(
        make_request("a", 13, 20, n=3, params={"logit_bias": {3: 1.5}, "stop": ["x"], "stop_token_ids": [2]}),
        make_request("b", range(30), 12, arrival_time_s=0.0, eos_token_ids=frozenset({1, 2}), priority=1),
        make_pooling_request("e", 9),
        make_beam("beam", 6),
        make_request("gone", 20, 20, client_id="c", hash_extras=("s",), bad_words_token_ids=((1,), (2, 3))),
    )
    for step in range(60):
        driver.step(lambda _, step=step: scheduler.abort(["gone", "nobody"]) and None if step == 4 else None)
        beam = scheduler.get("beam")
        if beam and beam.status is RequestStatus.RUNNING and beam.num_computed_tokens == beam.num_tokens:
            if step >= 6 and "fork" not in [name for name, *_ in scheduler.calls]:
                scheduler.fork("beam", child := make_beam("child", beam.prompt_token_ids))
                scheduler.append_token(child.request_id, 4)
            scheduler.append_token("beam", rng.randrange(9))
        if step == 8:
            driver.add(make_request("late", range(31), 5))
            scheduler.finish("a.1", RequestStatus.FINISHED_STOPPED, "END")
        if step == 30:
            scheduler.abort(["beam", "child"])
    assert not scheduler.has_unfinished
    assert scheduler.reset_prefix_cache()
    driver.add(make_request("last", range(31), 9), make_request("bad", 8, 12))
    driver.run()
    assert {name for name, *_ in scheduler.calls} == set(RECORDED)
    return scheduler, driver


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf", "fair"])
def test_replay_gives_the_identical_schedule(policy: str) -> None:
    config = make_config(windows=(None, 6), num_blocks=28, max_num_batched_tokens=16, policy=policy)
    scheduler, driver = record(config)
    assert any(output.preempted_ids for output in driver.outputs)
    assert any(output.transfers for output in driver.outputs)
    assert replay(scheduler) == scheduler.outputs == driver.outputs


def test_recorded_outputs_can_be_executed_again() -> None:
    config = make_config(num_blocks=40, multi_step_decode=4)
    scheduler, driver = record(config)
    executor = FakeExecutor(config, vocab_size=VOCAB_SIZE)
    executor.num_iterations, executor.fails = driver.executor.num_iterations, driver.executor.fails
    results = [arguments[1] for name, arguments, _ in scheduler.calls if name == "update"]
    outputs = [output for output in scheduler.outputs if output.scheduled]
    assert max(item.max_new_tokens for output in outputs for item in output.scheduled) > 1
    assert [executor.execute(output) for output in outputs] == results
    assert replay(scheduler) == scheduler.outputs
