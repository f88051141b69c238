"""A recorded run can be replayed, schedule by schedule, without the model."""

import random
from pathlib import Path

import pytest

from quire.config import SchedulerConfig
from quire.errors import ConfigError, EngineError
from quire.types import RequestStatus, SchedulerOutput
from tests.fakes import FakeExecutor
from tests.scheduler.builders import VOCAB_SIZE, Driver, make_beam, make_config, make_pooling_request, make_request
from tests.scheduler.recording import RecordingScheduler, read_outputs, read_recording, replay


def record(path: Path, config: SchedulerConfig) -> list[SchedulerOutput]:
    """A run that uses every input: n, beams, pooling, stop rules, aborts, stop strings, a reset."""
    rng = random.Random(1)
    with RecordingScheduler(config, path, clock=lambda: 5.0) as scheduler:
        driver = Driver(config, scheduler)
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
                if step == 6:
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
        driver.add(make_request("last", range(31), 9))
        driver.run()
    return driver.outputs


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf"])
def test_replay_gives_the_identical_schedule(tmp_path: Path, policy: str) -> None:
    config = make_config(windows=(None, 6), num_blocks=28, max_num_batched_tokens=16, policy=policy)
    path = tmp_path / "steps.jsonl"
    outputs = record(path, config)
    assert any(output.preempted_ids for output in outputs)
    assert any(output.transfers for output in outputs)
    assert replay(path) == read_outputs(path) == outputs


def test_recorded_outputs_can_be_executed_again(tmp_path: Path) -> None:
    config = make_config(num_blocks=40, multi_step_decode=4)
    path = tmp_path / "steps.jsonl"
    record(path, config)
    executor = FakeExecutor(config, vocab_size=VOCAB_SIZE)
    executor.num_iterations = lambda most: most
    recorded = [item for item in read_recording(path) if type(item).__name__ == "UpdateRecord"]
    outputs = [output for output in read_outputs(path) if output.scheduled]
    assert max(item.max_new_tokens for output in outputs for item in output.scheduled) > 1
    for output, update in zip(outputs, recorded, strict=True):
        result = executor.execute(output)
        assert {item.request_id: item.token_ids for item in result.results} == update.token_ids  # type: ignore[union-attr]


def test_request_that_fails_in_a_later_iteration_fails_there_in_the_replay(tmp_path: Path) -> None:
    config = make_config(multi_step_decode=5)
    path = tmp_path / "steps.jsonl"
    with RecordingScheduler(config, path) as scheduler:
        driver = Driver(config, scheduler)
        driver.executor.num_iterations = lambda most: most
        driver.executor.fails = lambda name, num_tokens: name == "bad" and num_tokens == 11
        driver.add(make_request("bad", 8, 12), make_request("good", 8, 12))
        driver.run()
    assert driver.outputs[1].scheduled[0].max_new_tokens == 5
    assert replay(path) == driver.outputs


def test_the_first_other_schedule_is_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    record(path, make_config(num_blocks=40))
    lines = path.read_text().splitlines()
    at = next(index for index, line in enumerate(lines) if '"abort"' in line)
    path.write_text("\n".join(lines[:at] + lines[at + 1 :]))
    with pytest.raises(EngineError, match="is scheduled otherwise"):
        replay(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    record(path, make_config(num_blocks=40))
    text = path.read_text()
    for content, message in (
        ("", "is no scheduler recording"),
        (text[: len(text) // 2], "is not part of a scheduler recording"),
        ("\x00\n", "line 1"),
        (text.split("\n", 1)[1], "does not start with a config"),
        (text + text, "holds a second config"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            replay(path)
