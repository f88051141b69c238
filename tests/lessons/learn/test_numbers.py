"""Number exercises: the engine's answer is right, each usual mistake is explained, units are read."""

import pytest

from quire.errors import ConfigError
from quire_lessons.learn.exercise import NumberExercise, Wrong, check_number, parse_number
from quire_lessons.learn.numbers import NUMBERS

EXPECTED = {
    "pairs": 3600, "rows": 23, "kv-bytes": 819_200, "fit": 7, "blocks": 13, "steps": 5, "padding": 66.667, "hit": 80,
    "rank-bytes": 40_960, "bits": 5, "balance": 295.2, "draft-tokens": 2.176, "price": 0.16964,
    "adapter-bytes": 16_777_216,
}  # fmt: skip
"""Answers worked out by hand."""


@pytest.mark.parametrize("item", NUMBERS, ids=lambda item: item.name)
def test_engine_computes_the_answer_and_mistakes_are_explained(item: NumberExercise) -> None:
    answer = item.compute()
    assert answer.value == pytest.approx(EXPECTED[item.name], rel=1e-4)
    check_number(item, f"{answer.value:.6g} {item.unit}")
    assert answer.mistakes
    for value, why in answer.mistakes.items():
        with pytest.raises(Wrong) as found:
            check_number(item, repr(value))
        assert found.value.text == why
        assert why.en != why.zh


def exercise(name: str) -> NumberExercise:
    return next(item for item in NUMBERS if item.name == name)


def test_count_must_be_exact_and_a_size_may_be_rounded() -> None:
    with pytest.raises(Wrong, match=r"Too small: 3599 is 1 times"):
        check_number(exercise("pairs"), "3599")
    check_number(exercise("kv-bytes"), "819 kB")
    check_number(exercise("kv-bytes"), "0.78 MiB")


def test_unit_slip_is_named() -> None:
    with pytest.raises(Wrong, match=r"1\.024"):
        check_number(exercise("kv-bytes"), "800 kB")
    with pytest.raises(Wrong, match=r"factor of 1024"):
        check_number(exercise("kv-bytes"), "800 B")
    with pytest.raises(Wrong, match=r"Too large"):
        check_number(exercise("kv-bytes"), "7 GB")


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [("800 KiB", "B", 819_200), ("1.5MB", "B", 1.5e6), ("3,600", "", 3600), ("67 %", "%", 67), ("1e3", "rows", 1000)],
)
def test_number_is_read_with_its_unit(text: str, unit: str, value: float) -> None:
    assert parse_number(text, unit) == value


@pytest.mark.parametrize(("text", "unit"), [("many", ""), ("5 GB", ""), ("5 steps", "B"), ("", "B"), ("5 %", "rows")])
def test_answer_that_is_no_number_of_the_unit_is_refused_with_an_example(text: str, unit: str) -> None:
    with pytest.raises(ConfigError, match=r"'(800 KiB|12.*)'"):
        parse_number(text, unit)
