"""The meter against loads whose numbers are known."""

import pytest

from quire.engine.process.child import update_of
from quire.engine.process.messages import Histogram, Statistics
from quire.engine.process.statistics import Meter
from quire.events import EventKind
from quire.sampling_params import SamplingParams
from tests.engine.builders import add_with_news, make_engine, run


def drive(engine, meter: Meter, *, check=lambda statistics: None, max_steps: int = 10_000) -> Statistics:
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            break
        check(meter.take([update_of(output) for output in engine.step()]))
    return meter.take([])


def add(engine, name: str, prompt: list[int], **params) -> None:
    add_with_news(
        engine, name, prompt, SamplingParams(**({"max_tokens": 5, "ignore_eos": True, "temperature": 0} | params))
    )


def count(statistics: Statistics, name: str) -> int:
    return sum(statistics.histograms[name].counts)


@pytest.mark.parametrize("streams", [True, False])
def test_known_load_gives_known_numbers(streams: bool) -> None:
    engine, _ = make_engine()
    meter = Meter(engine)
    for number in range(6):
        prompt = [number + 1] * 10
        params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0)
        add_with_news(engine, f"r{number}", prompt, params, streams=streams)
    seen = []
    found = drive(engine, meter, check=lambda item: seen.append((item.num_running, item.num_free_blocks)))
    assert (found.num_prompt_tokens, found.num_generated_tokens) == (60, 30)
    assert found.num_computed_tokens == 60 + 6 * 4
    assert found.num_finished == {"length": 6}
    assert (found.num_looked_up_tokens, found.num_cached_tokens, found.num_preemptions) == (60, 0, 0)
    assert (found.num_running, found.num_waiting, found.num_running_prompt_tokens) == (0, 0, 0)
    assert max(running for running, _ in seen) == 6
    assert min(free for _, free in seen) < found.num_blocks == found.num_free_blocks == 199
    assert found.num_cached_blocks == 6 * 3, "13 of 15 tokens are computed and fill 3 blocks of 4"
    assert found.num_steps == count(found, "step_prefill") + count(found, "step_decode")
    assert count(found, "time_to_first_token") == count(found, "queue") == count(found, "request") == 6
    assert count(found, "inter_token") == 6 * 4
    assert found.num_lost_events == 0


def test_each_completion_of_n_ends_once() -> None:
    engine, _ = make_engine()
    meter = Meter(engine)
    add(engine, "three", [1, 2, 3], n=3, temperature=1)
    found = drive(engine, meter)
    assert found.num_finished == {"length": 3}
    assert found.num_generated_tokens == 15
    assert (found.num_prompt_tokens, found.num_running_prompt_tokens) == (3, 0)
    assert (count(found, "step_prefill"), count(found, "step_decode")) == (1, 4), "siblings are no tokens"


def test_preemptions_count_and_their_prompts_do_not_count_twice() -> None:
    engine, _ = make_engine(num_blocks=16, max_model_len=60)
    meter = Meter(engine)
    for number in range(4):
        add(engine, f"r{number}", [number + 1] * 8, max_tokens=20)
    found = drive(engine, meter)
    assert found.num_preemptions > 0
    assert (found.num_prompt_tokens, found.num_looked_up_tokens) == (32, 32)
    assert found.num_finished == {"length": 4}
    assert found.num_generated_tokens == 80


def test_aborts_are_counted_and_leave_nothing() -> None:
    engine, _ = make_engine()
    meter = Meter(engine)
    add(engine, "gone", [1] * 9, max_tokens=50)
    meter.take([update_of(output) for output in engine.step()])
    engine.abort_request("gone")
    found = drive(engine, meter)
    assert found.num_finished == {"abort": 1}
    assert found.num_running_prompt_tokens == 0
    assert [meter._prompt_lens, meter._last_token_s] == [{}, {}]


def test_what_fell_out_of_the_log_is_counted_as_lost() -> None:
    engine, _ = make_engine(options={"max_num_events": 4})
    meter = Meter(engine)
    add(engine, "r", [1] * 9, max_tokens=10)
    run(engine)
    assert meter.take([]).num_lost_events == engine.events.num_recorded - 4


def test_bucket_includes_its_upper_bound() -> None:
    histogram = Histogram([0, 0, 0])
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.add((1.0, 2.0), value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 14.0)


def test_right_drafts_are_counted_by_their_position() -> None:
    engine, _ = make_engine()
    meter = Meter(engine)
    for step_id, drafts in enumerate((((3, 3), (2, 0)), (), ((4, 1),))):
        num_drafts, num_accepted = (sum(counts) for counts in zip(*drafts, strict=True)) if drafts else (0, 0)
        engine.events.record(
            EventKind.STEP, step_id=step_id, num_tokens=4, num_requests=1, num_iterations=1, has_prompts=False,
            duration_s=1.0, num_drafts=num_drafts, num_accepted=num_accepted, drafts=drafts,
        )  # fmt: skip
    found = drive(engine, meter)
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (3, 9, 4)
    assert found.num_accepted_at == [2, 1, 1]


def test_iterations_count_as_steps_and_their_tokens_as_if_they_came_evenly() -> None:
    engine, executor = make_engine(multi_step_decode=4)
    executor.num_iterations = lambda most: most
    add(engine, "a", [1] * 10, max_tokens=13)
    found = drive(engine, Meter(engine))
    assert [event.data["num_iterations"] for event in engine.events.of(EventKind.STEP)] == [1, 4, 4, 4]
    assert found.num_steps == 13
    assert (count(found, "step_prefill"), count(found, "step_decode")) == (1, 12)
    assert count(found, "inter_token") == 12
    assert found.num_computed_tokens == 10 + 12
