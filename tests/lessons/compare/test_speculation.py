"""Drafts beside none: the workloads' figures, from the real SmolLM2 in a few tokens."""

from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire_lessons.compare import run, speculation
from quire_lessons.compare.results import RunSettings
from quire_lessons.compare.speculation import NUM_ROUNDS, WORKLOADS, Record, json_tasks, prompt_of


def test_acceptance_counts_each_position_behind_right_ones() -> None:
    record = Record(drafts=[(3, 3), (3, 1), (1, 0), (2, 2)])
    assert record.acceptance() == [3 / 4, 2 / 3, 1.0]
    assert Record().acceptance() == []


def test_model_that_repeats_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="fake"):
        run("speculation", RunSettings(model="fake"))


def test_one_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 or more fit"):
        run("speculation", RunSettings(output_lens=(1,)))


def test_each_workload_has_prompts_of_its_own_and_json_has_schemas() -> None:
    for name in WORKLOADS:
        prompts = [prompt_of(name, number) for number in range(4)]
        assert len({text for text, _ in prompts}) == 4
        assert all((schema is not None) == (name == "JSON") for _, schema in prompts)
    assert len({tuple(schema["required"]) for _, schema in json_tasks()}) == 20


@pytest.mark.model
def test_comparison_has_a_row_per_workload_and_forced_tokens_of_json_are_right(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "EDIT_CHARACTERS", 800)  # a long one is in `test_ladder.py`
    comparison = run("speculation", RunSettings(output_lens=(24,)))
    assert [row[0] for row in comparison.rows] == list(WORKLOADS)
    assert comparison.outputs_equal == NUM_ROUNDS * len(WORKLOADS)
    of_json = comparison.rows[-1]
    assert of_json[4] > 1.2
    assert of_json[6] > 0.5
    assert [series.name for chart in comparison.charts for series in chart.series] == list(WORKLOADS)
