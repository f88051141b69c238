"""Static, dynamic and continuous batching: steps counted by hand, and outputs that must be equal."""

import math

import pytest

from quire.errors import ComparisonError, ConfigError
from quire.types import RequestResult, ScheduledRequest
from quire_lessons.compare import run
from quire_lessons.compare.batching import _drive_batches, _pads, num_pads
from quire_lessons.compare.results import RunSettings, TimedRequest
from quire_lessons.compare.rig import FakeExecutor, Rig, Run


def make_rig(slots: int = 2) -> Rig:
    options = {"max_num_seqs": slots, "max_model_len": 512, "block_size": 16, "num_blocks_override": 200}
    return Rig(RunSettings(), "fake", lambda *_: None, **options)


def drive(mode: str, jobs: list[TimedRequest], slots: int = 2) -> Run:
    rig = make_rig(slots)
    timers = {"static": math.inf, "dynamic": 3.0}
    return _drive_batches(rig, mode, jobs, timers[mode]) if mode in timers else rig.drive(mode, jobs)


def job(prompt_len: int, num_tokens: int, arrival: float = 0.0) -> TimedRequest:
    return TimedRequest(tuple(range(1, prompt_len + 1)), num_tokens, arrival)


def test_pads_of_a_100_token_prompt_that_joins_decodes_in_a_batch_of_8() -> None:
    assert num_pads([100] + [1] * 7) == (100 - 1) * (8 - 1) == 693
    assert num_pads([1, 1], num_rows=4) == 2
    assert num_pads([]) == 0


def test_static_batch_waits_for_its_slowest_member() -> None:
    jobs = [job(4, 2), job(4, 4), job(4, 2)]
    static, continuous = drive("static", jobs), drive("continuous", jobs)
    assert (static.makespan, static.started, static.ended) == (6, [0, 0, 4], [2, 4, 6])
    assert (continuous.makespan, continuous.started, continuous.ended) == (4, [0, 0, 2], [2, 4, 4])
    assert static.outputs == continuous.outputs


def test_static_batch_starts_when_full_or_when_no_request_will_come() -> None:
    run = drive("static", [job(4, 1), job(4, 1, 5), job(4, 1, 9)])
    assert run.started == [5, 5, 9]


def test_dynamic_batch_starts_when_full_or_when_its_timer_runs_out() -> None:
    run = drive("dynamic", [job(4, 1), job(4, 1, 10), job(4, 1, 11), job(4, 1, 20)])
    assert run.started == [3, 11, 11, 20]


def test_rows_of_ended_requests_count_as_pads_in_a_closed_batch() -> None:
    jobs = [job(10, 2), job(4, 4)]
    # Prefill pads 6, one full decode 0, two decodes beside an ended row.
    assert _pads(drive("static", jobs), is_closed=True) == 6 + 0 + 2
    assert _pads(drive("continuous", jobs), is_closed=False) == 6


@pytest.mark.parametrize("lengths", [((100, 200, 300), (1,)), ((1,), (100, 200, 300))])
def test_100_200_and_300_tokens_in_one_static_batch_are_two_thirds_of_it(
    lengths: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    """Prompts beside each other in one step, or outputs that end one after the other."""
    comparison = run("batching", RunSettings(prompt_lens=lengths[0], output_lens=lengths[1], slots=3))
    static = dict(zip((name for name, _ in comparison.columns), comparison.rows[0], strict=True))
    continuous = dict(zip([name for name, _ in comparison.columns], comparison.rows[2], strict=True))
    assert (continuous["pads"], continuous["not pads"]) == (0, 1.0)
    assert len({chart.x_most for chart in comparison.charts}) == 1
    assert static["pads"] == 300
    assert static["not pads"] == pytest.approx(2 / 3)
    if lengths[0] == (1,):
        assert (static["makespan"], static["slot use"]) == (300, pytest.approx(2 / 3))


def test_given_lengths_are_used_in_turn_and_arrive_at_once() -> None:
    comparison = run("batching", RunSettings(prompt_lens=(10, 20), output_lens=(4,), requests=5, slots=2))
    assert comparison.title == (
        "5 requests, 70 prompt and 20 output tokens, all there at once, 2 slots"
    )  # fmt: skip
    assert comparison.settings["rate"] is None


def test_default_load_keeps_continuous_slots_full_and_static_ones_empty() -> None:
    comparison = run("batching")
    static, _, continuous = comparison.rows
    assert continuous[2] > 0.95
    assert static[2] < 0.45
    assert static[1] > 2.4 * continuous[1]


def test_context_too_short_for_drawn_lengths_is_refused() -> None:
    for name in ("batching", "kv", "attention"):
        with pytest.raises(ConfigError, match="context=16: 32 or more fits"):
            run(name, RunSettings(context=16))
    with pytest.raises(ConfigError, match="prompt_lens has 0"):
        RunSettings(prompt_lens=(5, 0))


def test_wrong_output_of_one_mode_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FakeExecutor._sample

    def wrong_once(self: FakeExecutor, share: ScheduledRequest) -> RequestResult:
        result = right(self, share)
        if share.request_id == "3-continuous-2" and share.num_tokens > 1:
            return RequestResult(share.request_id, (result.token_ids[0] ^ 1,))
        return result

    monkeypatch.setattr(FakeExecutor, "_sample", wrong_once)
    with pytest.raises(ComparisonError, match="request 2 got different tokens from static and continuous"):
        run("batching", RunSettings(requests=8, slots=2, context=64))


def test_unknown_comparison_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'batching'"):
        run("batchin")
