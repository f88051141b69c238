"""The cases of the rows: as many as the table promises, and what they expect."""

import random

import pytest
from jsonschema import Draft202012Validator

from benchmarks.soak.inputs import api, hostile_forms, keys, logs, numbers, schema_maker, templates
from benchmarks.soak.inputs.template_cases import ESCAPES, LARGE, NOT_NEEDED, WORK
from benchmarks.soak.inputs.wire_cases import HUGE, make_case


def test_there_are_as_many_as_promised() -> None:
    assert len(list(numbers.cells())) >= 600
    assert len(hostile_forms.ALL) >= 200
    assert len(list(logs.requests())) >= 200
    assert len((*ESCAPES, *NOT_NEEDED, *WORK, *LARGE)) + len(list(templates.chats())) >= 60
    assert len(keys.wrong_headers("k" * 8)) == 8
    assert {path for _, path in keys.routes()} >= {"/v1/chat/completions", "/metrics", "/health", "/nowhere"}
    assert sum(count for *_, count in api.runs(10_000)) >= 10_000


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (0, 200),
        (2, 200),
        (-0.5, 400),
        (2.5, 400),
        ("NaN", 400),
        ("1", 400),
        (True, 400),
        (None, 200),
        ([], 400),
        (1.5, 200),
    ],
)
def test_what_a_number_takes(value: object, status: int) -> None:
    cell = numbers.Cell(numbers.CHAT, numbers.SAMPLING[0], value)
    assert cell.expected() == (status, None if status == 200 or value == "NaN" else "temperature")
    assert b'"temperature": ' in cell.body()
    assert b'"NaN"' not in cell.body()


def test_integers_take_no_halves_and_limits_may_be_open() -> None:
    by_name = {number.name: number for number in numbers.COMPLETIONS}
    assert not by_name["top_k"].takes(1.5)
    assert not by_name["repetition_penalty"].takes(0)
    assert by_name["seed"].takes(-(2**63))
    assert not by_name["seed"].takes(2**63)


def test_made_schemas_differ_and_many_can_be_read() -> None:
    choices = random.Random(1)
    made = [schema_maker.make_schema(choices) for _ in range(200)]
    assert len({str(schema) for schema in made}) > 150
    assert made[:5] != [schema_maker.make_schema(choices) for _ in range(5)]
    good = 0
    for schema in made:
        try:
            Draft202012Validator.check_schema(schema)
            good += 1
        except Exception:
            continue
    assert 100 < good < 200


def test_the_same_seed_makes_the_same_conversation() -> None:
    assert make_case(random.Random(7)) == make_case(random.Random(7)) != make_case(random.Random(8))


@pytest.mark.parametrize("name", HUGE)
def test_huge_conversations_come_in_pieces(name: str) -> None:
    pieces = HUGE[name]()
    first = next(pieces)
    assert first[:4] in (b"GET ", b"POST")
    assert len(first) <= 1 << 20
