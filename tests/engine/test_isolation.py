"""A request that makes the model raise fails alone; other requests get what they would have got without it."""

import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from quire.engine.beam_search import BeamSearch
from quire.engine.isolation import MAX_FAILED_ALONE, MAX_UNEXPLAINED
from quire.engine.llm_engine import LLMEngine
from quire.errors import EngineDeadError
from quire.events import EventKind
from quire.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
from quire.types import SchedulerOutput, StepResult
from tests.engine.builders import (
    ScriptedExecutor,
    assert_all_home,
    assert_forgotten,
    byte_tokenizer,
    finals,
    make_config,
    mixing,
    run,
)
from tests.scheduler.integrity import check_integrity
from tests.scheduler.recording import RecordingScheduler

MARK = 255
"""No script generates this token: it stands in prompts only."""
Params = SamplingParams | PoolingParams


class Fragile(ScriptedExecutor):
    """Raises when it computes a marked token, before it has taken anything of the step in, or after all of it."""

    def __init__(self, *arguments: Any, late: bool = True) -> None:
        super().__init__(*arguments)
        self.late = late
        self.steps: list[SchedulerOutput] = []
        self.lost: list[SchedulerOutput] = []
        self.also_raises: Callable[[SchedulerOutput], bool] = lambda output: False

    def _execute(self, output: SchedulerOutput) -> StepResult:
        self.steps.append(output)
        if self.lost and self.lost[-1] is self.steps[-2]:
            assert output.forgets_all
        known = {name: list(sequence.token_ids) for name, sequence in self._sequences.items()}
        result = super()._execute(output) if self.late else None
        known |= {new.request_id: list(new.token_ids) for new in output.new_requests}
        for item in output.scheduled:
            start = item.num_computed_tokens
            if MARK in known[item.request_id][start : start + item.num_tokens]:
                self.lost.append(output)
                raise ZeroDivisionError("a marked token")
        if self.also_raises(output):
            self.lost.append(output)
            raise MemoryError
        return result or super()._execute(output)


def make(*, late: bool = True, records: bool = False, **scheduler: Any) -> tuple[LLMEngine, Fragile]:
    config = make_config(**scheduler)
    executor = Fragile(config.scheduler, mixing, late=late)
    recorder = RecordingScheduler(config.scheduler) if records else None
    return LLMEngine(config, executor, byte_tokenizer(), scheduler=recorder), executor


def sampled(max_tokens: int = 8, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=3, logprobs=1, **params)


def undisturbed(requests: dict[str, tuple[list[int], Params]]) -> dict[str, Any]:
    """Return the tokens of each request in a roomy engine that never fails."""
    engine, _ = make(num_blocks=2000)
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    return finals(run(engine))


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, output in expected.items():
        assert found[name].outputs == output.outputs, name


# --- Any workload -----------------------------------------------------------------------------


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[int, str, list[int], Params]]:
    """(arrival step, name, prompt, params); names of requests that carry the mark begin with "bad"."""
    found: list[tuple[int, str, list[int], Params]] = []
    for index in range(draw(st.integers(2, 9))):
        prompt = [97 + at % 5 for at in range(draw(st.integers(1, 24)))] + [index]
        is_bad = draw(st.integers(0, 3)) == 0
        if is_bad:
            prompt[draw(st.integers(0, len(prompt) - 1))] = MARK
        params: Params = PoolingParams()
        if draw(st.integers(0, 4)):
            n = draw(st.sampled_from([1, 1, 1, 3]))
            params = sampled(draw(st.integers(1, 10)), n=n, stop=draw(st.sampled_from([None, ["a"]])))
        found.append((draw(st.integers(0, 20)), f"{'bad' if is_bad else 'good'}{index}", prompt, params))
    return found


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    workloads(), st.booleans(), st.integers(0, 2**16), st.sampled_from(["fcfs", "priority", "sjf", "fair"]),
    st.booleans(), st.integers(1, 3),
)  # fmt: skip
def test_exactly_the_marked_requests_fail(
    workload: list[tuple[int, str, list[int], Params]],
    late: bool,
    seed: int,
    policy: str,
    caches: bool,
    max_in_flight: int,
) -> None:
    engine, executor = make(
        late=late, num_blocks=26, max_num_seqs=5, max_num_batched_tokens=12, policy=policy,
        enable_prefix_caching=caches, max_in_flight=max_in_flight,
    )  # fmt: skip
    # Now and then a step of several is lost that no request is to blame for.
    chance = random.Random(seed)
    executor.also_raises = lambda output: len(output.scheduled) > 1 and chance.random() < 0.05
    # A request that is well shows before each arrival that the engine is.
    outputs: list[Any] = []
    for step in range(21):
        for arrival, name, prompt, params in workload:
            if arrival == step:
                engine.add_request(f"well {name}", [1, 2, 3], sampled(1))
                outputs += run(engine) if name.startswith("bad") else []
                engine.add_request(name, prompt, params)
        outputs += engine.step()
        check_integrity(engine.scheduler)
    ended = finals(outputs + run(engine))
    event(f"{len(executor.lost)} lost steps")
    bad = {name for name in ended if name.startswith("bad")}
    assert {name for name, output in ended.items() if "error" in reasons(output)} == bad
    for name in bad:
        assert "ZeroDivisionError" in errors(ended[name])[0]
    expected = undisturbed({name: item for _, name, *item in workload if name.startswith("good")})  # type: ignore[misc]
    assert_same(ended, expected)
    executor.also_raises = lambda output: False
    assert_all_home(engine)
    assert_forgotten(engine, executor)


def reasons(output: Any) -> list[str]:
    return [item.finish_reason for item in ([output] if hasattr(output.outputs, "embedding") else output.outputs)]


def errors(output: Any) -> list[str]:
    return [item.error for item in ([output] if hasattr(output.outputs, "embedding") else output.outputs)]


# --- One case each ----------------------------------------------------------------------------


def test_error_names_the_kind_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = make()
    engine.add_request("good", "hello", sampled())
    engine.step()
    engine.add_request("bad", [1, MARK], sampled())
    with caplog.at_level(logging.WARNING, "quire.engine"):
        ended = finals(run(engine))
    (bad,) = ended["bad"].outputs
    assert (bad.finish_reason, bad.token_ids, bad.text) == ("error", [], "")
    assert bad.error == (
        "the model failed on this request (ZeroDivisionError), also when it ran alone; the engine's log says more"
    )
    assert ended["bad"].metrics.finished_time_s is not None
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert all(record.exc_info for record in caplog.records)
    assert [item.data for item in engine.events.of(EventKind.LOST)] == [
        {"step_id": 2, "num_requests": 2, "error": "ZeroDivisionError"},
        {"step_id": 4, "num_requests": 1, "error": "ZeroDivisionError"},
    ]


def test_completions_of_one_request_count_once() -> None:
    """They are more than `MAX_FAILED_ALONE`, and fail where they are forked as well as before."""
    for prompt in ([MARK] + [1] * 20, [1] * 20 + [MARK]):
        engine, executor = make(max_num_batched_tokens=8)
        engine.add_request("bad", prompt, sampled(n=MAX_FAILED_ALONE + 2))
        assert reasons(finals(run(engine))["bad"]) == ["error"] * (MAX_FAILED_ALONE + 2)
        assert not engine.errored
        assert_all_home(engine)
        assert_forgotten(engine, executor)


def test_aborted_suspect_is_forgotten() -> None:
    engine, _ = make()
    for name in ("good", "bad"):
        engine.add_request(name, [1, MARK if name == "bad" else 2], sampled())
    engine.step()
    engine.abort_request("bad")
    assert {name: reasons(output) for name, output in finals(engine.step()).items()} == {"bad": ["abort"]}
    # Another request of that name is not suspected.
    engine.add_request("bad", [1, 2], sampled())
    assert {name: reasons(output) for name, output in finals(run(engine)).items()} == {
        "good": ["length"], "bad": ["length"],
    }  # fmt: skip
    assert_all_home(engine)


def test_beams() -> None:
    def search(engine: LLMEngine, prompt: list[int]) -> BeamSearch:
        found = BeamSearch(engine, "s", prompt, BeamSearchParams(beam_width=3, max_tokens=6))
        found.start()
        while found.output is None:
            engine.step()
            found.advance()
            check_integrity(engine.scheduler)
        assert_all_home(engine)
        return found

    expected = search(make()[0], [1, 2, 3]).output
    for unlucky in range(12):
        engine, executor = make(max_in_flight=1 + unlucky % 2)
        executor.also_raises = lambda output, at=unlucky // 2 + 1, executor=executor: executor.num_steps == at
        assert search(engine, [1, 2, 3]).output == expected
        assert len(executor.lost) == 1
    failed = search(make()[0], [1, MARK]).output
    assert failed is not None
    assert {sequence.finish_reason for sequence in failed.sequences} == {"error"}


# --- Fault of a request or of the engine ------------------------------------------------------------------------


def test_engine_that_fails_one_after_the_other_dies() -> None:
    engine, executor = make()
    executor.also_raises = lambda output: True
    for index in range(MAX_FAILED_ALONE):
        assert not engine.errored
        engine.add_request(str(index), [1, 2], sampled())
        run(engine)
    assert engine.errored


def test_bad_requests_with_good_ones_between_do_not_kill_it() -> None:
    engine, _ = make()
    for index in range(3 * MAX_FAILED_ALONE):
        engine.add_request("bad", [1, MARK], sampled())
        assert reasons(finals(run(engine))["bad"]) == ["error"]
        if index % MAX_FAILED_ALONE == 1:
            engine.add_request("good", [1, 2], sampled())
            assert reasons(finals(run(engine))["good"]) == ["length"]
    assert not engine.errored


def test_engine_that_fails_whenever_there_are_several_dies() -> None:
    engine, executor = make()
    executor.also_raises = lambda output: len(output.scheduled) > 1
    for name in ("a", "b"):
        engine.add_request(name, [1, 2], sampled(20))
    ended = finals(run(engine))
    assert len(executor.lost) == 1 + MAX_UNEXPLAINED
    assert engine.errored
    assert [len(output.outputs[0].token_ids) for output in ended.values()] == [MAX_UNEXPLAINED] * 2


def test_executor_that_is_gone_is_not_asked_again() -> None:
    engine, executor = make()

    def gone(step: int) -> None:
        raise EngineDeadError("the worker is gone")

    executor.in_step = gone
    engine.add_request("a", [1, 2], sampled())
    engine.add_request("b", [1, 2], sampled())
    run(engine)
    assert (engine.errored, executor.num_steps) == (True, 1)
