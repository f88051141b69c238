import itertools
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import (
    DuplicateRequestError,
    EngineDeadError,
    EngineError,
    MemoryCapacityError,
    PromptError,
    QueueFullError,
)
from quire.events import EventKind
from quire.outputs import RequestOutput
from quire.sampling_params import PoolingParams, SamplingParams
from tests.engine.builders import (
    EOS,
    assert_all_home,
    assert_forgotten,
    finals,
    make_engine,
    mixing,
    run,
    saying,
)
from tests.scheduler.integrity import check_integrity


def test_one_request_from_prompt_to_end() -> None:
    engine, _ = make_engine(saying("hello"))
    engine.add_request("a", "say hello", SamplingParams())
    outputs = run(engine)
    assert [output.outputs[0].text for output in outputs] == ["h", "he", "hel", "hell", "hello", "hello"]
    assert [output.outputs[0].token_ids for output in outputs][1] == list(b"he")
    last = outputs[-1]
    assert isinstance(last, RequestOutput)
    assert last.finished
    assert last.prompt == "say hello"
    assert last.outputs[0].finish_reason == "stop"
    assert last.outputs[0].stop_reason is None
    assert last.outputs[0].token_ids == [*b"hello", EOS]
    assert_all_home(engine)


def test_outputs_given_away_do_not_change() -> None:
    engine, _ = make_engine()
    engine.add_request("a", "p", SamplingParams(max_tokens=5, logprobs=1))
    outputs = run(engine)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4, 5]
    assert [len(output.outputs[0].logprobs) for output in outputs] == [1, 2, 3, 4, 5]


def test_metrics_are_times_in_order() -> None:
    engine, _ = make_engine()
    ticks = itertools.count(1)
    engine._clock = lambda: float(next(ticks))
    engine.add_request("a", "p", SamplingParams(max_tokens=3), arrival_time_s=0.5)
    metrics = finals(run(engine))["a"].metrics
    assert metrics.arrival_time_s == 0.5
    assert metrics.first_scheduled_time_s < metrics.first_token_time_s
    assert metrics.first_token_time_s < metrics.last_token_time_s <= metrics.finished_time_s
    assert metrics.time_to_first_token_s == metrics.first_token_time_s - 0.5
    assert metrics.num_preemptions == 0


def test_step_events_add_up() -> None:
    engine, _ = make_engine()
    engine.add_request("a", [3] * 5, SamplingParams(max_tokens=3))
    run(engine)
    steps = [event.data for event in engine.events.of(EventKind.STEP)]
    assert [step["num_tokens"] for step in steps] == [5, 1, 1]
    assert all(step["num_requests"] == 1 for step in steps)
    for step in steps:
        parts = step["schedule_s"] + step["execute_s"] + step["output_s"]
        assert step["duration_s"] == pytest.approx(parts)


def test_steps_end_when_their_results_are_made_not_when_they_are_noted() -> None:
    engine, _ = make_engine()
    watched_s = []
    engine.watch(lambda *_: watched_s.append(time.monotonic()))
    engine.add_request("a", [3] * 5, SamplingParams(max_tokens=3))
    run(engine)
    assert all(event.time_s <= at for event, at in zip(engine.events.of(EventKind.STEP), watched_s, strict=True))


def test_next_step_is_submitted_before_the_oldest_is_collected() -> None:
    engine, executor = make_engine(max_in_flight=2)
    engine.add_request("a", "p", SamplingParams(max_tokens=4, ignore_eos=True))
    in_flight: list[int] = []
    executor.in_step = lambda step: in_flight.append(len(executor._submitted))
    run(engine)
    assert in_flight == [1, 1, 1, 0]  # beside the step that is computed; none follows the last token


@pytest.mark.parametrize(("ms_per_token", "expected"), [(1, 25), (50, 12)])
def test_prompts_get_more_of_a_step_where_the_machine_is_fast(ms_per_token: int, expected: int) -> None:
    engine, _ = make_engine(prefill_tokens_per_decode=2, max_num_batched_tokens=64)
    engine._clock = lambda: 0.0
    engine._pace.note(100, 0.1 * ms_per_token, has_prompts=True)
    engine.add_request("generates", [1], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    engine.add_request("prompt", [2] * 60, SamplingParams(max_tokens=1))
    engine.step()
    assert engine.events.of(EventKind.STEP)[-1].data["num_tokens"] == expected


# --- Mistakes ---------------------------------------------------------------------------------


def test_refused_request_leaves_nothing() -> None:
    engine, _ = make_engine(num_blocks=8, max_num_waiting=1)
    with pytest.raises(PromptError):
        engine.add_request("a", "", SamplingParams())
    with pytest.raises(MemoryCapacityError):
        engine.add_request("a", [1] * 100, SamplingParams())
    engine.add_request("a", [1], SamplingParams(max_tokens=1))
    with pytest.raises(QueueFullError):
        engine.add_request("b", [1], SamplingParams())
    run(engine)
    engine.add_request("b", [1], SamplingParams(max_tokens=1))
    assert set(finals(run(engine))) == {"b"}
    assert_all_home(engine)


def test_ids_are_unique_while_running_and_free_afterwards() -> None:
    engine, _ = make_engine()
    engine.add_request("a", "p", SamplingParams(n=2, max_tokens=3))
    for taken in ("a", "a/1"):
        with pytest.raises(DuplicateRequestError, match=taken):
            engine.add_request(taken, "p", SamplingParams())
    engine.step()
    for _ in range(3):
        run(engine)
        engine.add_request("a", "p", SamplingParams(n=2, max_tokens=3))
    run(engine)
    assert_all_home(engine)


# --- Aborts -----------------------------------------------------------------------------------


def test_aborted_request_keeps_its_text() -> None:
    engine, _ = make_engine(saying("hello"))
    engine.add_request("a", "p", SamplingParams(stop="lots"))
    engine.step()
    engine.step()
    assert engine.step()[0].outputs[0].text == "he", "the l may become a stop string"
    engine.abort_request("a")
    output = finals(run(engine))["a"]
    assert output.outputs[0].text == "hel"
    assert output.outputs[0].token_ids == list(b"hel")
    assert output.metrics.finished_time_s is not None


Action = tuple[str, Any]
actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(1, 4))),
        st.tuples(st.just("pool"), st.integers(1, 30)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("step"), st.integers(1, 4)),
    ),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(actions, st.integers(1, 3))
def test_any_interleaving_ends_each_request_once(history: list[Action], max_in_flight: int) -> None:
    engine, executor = make_engine(
        next_token=lambda known, prompt_len, seed: EOS if sum(known) % 7 == 0 else mixing(known, prompt_len, seed),
        num_blocks=24, max_num_seqs=6, max_num_batched_tokens=16, max_in_flight=max_in_flight,
    )  # fmt: skip
    outputs: list[Any] = []
    ids: list[str] = []
    for kind, value in history:
        if kind == "add":
            prompt_len, max_tokens, n = value
            ids.append(str(len(ids)))
            params = SamplingParams(n=n, max_tokens=max_tokens, stop=["ab", "c"])
            try:
                engine.add_request(ids[-1], [97] * prompt_len, params)
            except MemoryCapacityError:
                ids.pop()
        elif kind == "pool":
            ids.append(str(len(ids)))
            engine.add_request(ids[-1], [97] * value, PoolingParams())
        elif kind == "abort":
            engine.abort_request(str(value))
        else:
            for _ in range(value):
                outputs += engine.step()
        check_integrity(engine.scheduler)
    outputs += run(engine)
    assert set(finals(outputs)) == set(ids)
    assert_all_home(engine)
    assert_forgotten(engine, executor)


# --- Failures ---------------------------------------------------------------------------------


def test_when_the_executor_always_fails_every_request_ends_with_error() -> None:
    engine, executor = make_engine()
    engine.add_request("one", "p", SamplingParams())
    engine.add_request("many", "p", SamplingParams(n=2))
    engine.add_request("pool", "p" * 100, PoolingParams())
    engine.add_request("last", "p", SamplingParams())
    outputs = engine.step()
    engine.abort_request("one")

    def fail(step: int) -> None:
        raise ZeroDivisionError("kernel")

    executor.in_step = fail
    ended = finals(outputs + run(engine))
    assert set(ended) == {"one", "many", "pool", "last"}
    assert ended["one"].outputs[0].finish_reason == "abort"
    assert [completion.finish_reason for completion in ended["many"].outputs] == ["error", "error"]
    assert ended["pool"].finish_reason == "error"
    assert engine.errored
    assert_all_home(engine)
    for call in (engine.step, engine.check_health, lambda: engine.add_request("x", "p", SamplingParams())):
        with pytest.raises(EngineDeadError, match="ZeroDivisionError: kernel") as caught:
            call()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    engine.shutdown()
    assert executor.is_shut_down


def test_interrupted_step_ends_everything_and_leaves_the_engine_usable() -> None:
    engine, executor = make_engine()
    engine.add_request("a", [1] * 10, SamplingParams())

    def interrupt(step: int) -> None:
        raise KeyboardInterrupt

    executor.in_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    executor.in_step = lambda step: None
    assert finals(run(engine))["a"].outputs[0].finish_reason == "abort"
    engine.add_request("a", [1] * 10, SamplingParams(max_tokens=2))
    assert finals(run(engine))["a"].outputs[0].finish_reason == "length"
    assert_all_home(engine)


def test_scheduler_that_is_stuck_is_an_error_not_a_hang() -> None:
    engine, _ = make_engine()
    engine.add_request("a", "p", SamplingParams())
    engine.scheduler._planner._admit_waiting = lambda plan: None  # type: ignore[method-assign]
    output = finals(run(engine))["a"]
    assert output.outputs[0].finish_reason == "error"
    assert isinstance(engine.dead_error.__cause__, EngineError)


def test_salt_that_is_not_unicode_is_taken() -> None:
    engine, _ = make_engine()
    engine.add_request("a", "hello, hello", SamplingParams(max_tokens=10), cache_salt="\ud800")
    assert finals(run(engine))["a"].outputs[0].finish_reason == "length"


def test_shutdown_returns_the_last_outputs() -> None:
    engine, executor = make_engine()
    engine.add_request("a", "p", SamplingParams())
    engine.step()
    (output,) = engine.shutdown()
    assert output.outputs[0].finish_reason == "abort"
    assert executor.is_shut_down
    assert engine.shutdown() == []
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.step()
