"""The ladder: one workload, each rung with its figures, on a model of a few kilobytes."""

import builtins
import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.types import ScheduledRequest
from quire_lessons.compare import ladder, run
from quire_lessons.compare.ladder import CHUNK, SHARED_LEN, longest_pause, workload
from quire_lessons.compare.results import Comparison, RunSettings, TimedRequest
from quire_lessons.compare.rig import RecordedStep, Run
from tests.cli.tiny_directory import make_tiny_directory

RUNGS = (
    "naive recomputation", "KV cache", "static batch", "continuous batch", "paged memory", "chunked prefill",
    "prefix sharing", "native kernels", "4 bits",
)  # fmt: skip


@pytest.fixture(scope="module")
def climbed(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    directory = make_tiny_directory(tmp_path_factory.mktemp("ladder") / "tiny")
    return run("ladder", RunSettings(model=str(directory), prompt_lens=(40, 80), output_lens=(3, 9), requests=8))


def test_each_rung_has_its_factor_and_the_product_is_that_of_the_factors(climbed: Comparison) -> None:
    rows = climbed.rows[: len(RUNGS)]
    assert tuple(row[0] for row in rows) == RUNGS
    assert rows[0][2] is None
    for at, row in enumerate(rows):
        assert row[3] == pytest.approx(math.prod(other[2] for other in rows[1 : at + 1]))
        assert row[1] == pytest.approx(rows[0][1] * row[3])
    assert len(climbed.explanation) >= len(RUNGS)


def test_rungs_that_only_schedule_otherwise_give_the_same_tokens(climbed: Comparison) -> None:
    assert [row[6] for row in climbed.rows[1:8]] == [8] * 7


def test_paged_memory_holds_more_requests_than_reservations(climbed: Comparison) -> None:
    at_once = {row[0]: row[4] for row in climbed.rows}
    assert at_once["KV cache"] == 1
    assert at_once["static batch"] == at_once["continuous batch"] == ladder.MAX_SLOTS
    assert at_once["paged memory"] > ladder.MAX_SLOTS


def test_transformers_generate_stands_beside_it(climbed: Comparison) -> None:
    last = climbed.rows[-1]
    assert last[0] == "Transformers"
    assert last[1] > 0
    assert last[2] is None


def test_model_that_cannot_draft_has_a_sentence_in_place_of_the_last_rung(climbed: Comparison) -> None:
    assert "drafts" not in {row[0] for row in climbed.rows}
    assert any(sentence.startswith("drafts: not compared: ") for sentence in climbed.explanation)


@pytest.mark.model
def test_drafts_gain_on_a_text_that_repeats_and_change_no_token(smollm2_path: Path) -> None:
    drafts = ladder._drafts(RunSettings(), "smollm2", lambda *_: None)
    assert not isinstance(drafts, str)
    assert drafts["drafts"].answers == drafts["off"].answers
    assert drafts["drafts"].num_passes < 0.7 * drafts["off"].num_passes
    sentence = ladder._explain_drafts(drafts, 10.0)
    assert f"{10 * drafts['drafts'].rate / drafts['off'].rate:.3g}×" in sentence


def test_requests_that_would_take_too_long_are_left_out() -> None:
    samples = ladder._Samples([10, 110], [1.0, 11.0], [0.5, 1.5])
    assert samples.naive_s(TimedRequest((0,) * 60, 2)) == pytest.approx(6.0 + 6.1)
    job = TimedRequest((0,) * 60, 4)  # 6 s for the prompt, 1.5 s for each token at most: 72 s in all rungs
    assert samples.num_that_fit([job]) == 2
    assert samples.num_that_fit([job] * 8) == 2
    quick = ladder._Samples([10, 110], [0.1, 1.1], [0.05, 0.15])
    assert quick.num_that_fit([job] * 30) == 20


def test_without_pytorch_the_ladder_starts_with_native_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    directory = make_tiny_directory(tmp_path / "tiny")
    comparison = run("ladder", RunSettings(model=str(directory), prompt_lens=(20,), output_lens=(2,), requests=2))
    assert tuple(row[0] for row in comparison.rows) == tuple(name for name in RUNGS if name != "native kernels")
    assert "PyTorch is not installed" in comparison.explanation[-1]


def test_model_that_transformers_cannot_load_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_tiny_directory(tmp_path / "tiny")
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    found = ladder._transformers(str(directory), [])
    assert isinstance(found, str)
    assert found.startswith("Transformers' generate is not beside it")


def test_workload_has_a_common_beginning_and_some_long_prompts() -> None:
    jobs = workload(RunSettings(), 1000)
    assert [len(job.prompt) for job in jobs] == [len(job.prompt) for job in workload(RunSettings(), 2)]
    assert len({job.prompt[:SHARED_LEN] for job in jobs}) == 1
    assert len({job.prompt for job in jobs}) == len(jobs)
    assert sum(len(job.prompt) > CHUNK * 3 for job in jobs) == len(jobs) // ladder.LONG_PERIOD


def test_longest_pause_is_between_two_tokens_of_one_request() -> None:
    def step(start: float, seconds: float, *items: tuple[str, int]) -> RecordedStep:
        scheduled = tuple(ScheduledRequest(name, 0, 1, tokens, (), ()) for name, tokens in items)
        return RecordedStep(start, seconds, scheduled, 0, ())

    steps = [step(0, 1, ("a", 1)), step(1, 4, ("b", 0)), step(5, 1, ("a", 1), ("b", 1)), step(6, 2, ("b", 1))]
    assert longest_pause(Run([], [], [], steps)) == 5
    assert longest_pause(Run([], [], [], steps[2:])) == 2


def test_fake_model_has_no_work_to_measure() -> None:
    with pytest.raises(ConfigError, match="fake"):
        run("ladder", RunSettings(model="fake"))
