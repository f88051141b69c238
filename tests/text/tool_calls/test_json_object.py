"""Against Python's json, on valid, damaged and random texts."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text.tool_calls.json_object import MAX_DEPTH, JsonObject, Mark

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


def marks(text: str) -> list[tuple[int, Mark]]:
    followed, found = JsonObject(), []
    for index, character in enumerate(text):
        mark = followed.advance(character)
        if mark is not Mark.INSIDE:
            found.append((index, mark))
        if mark in (Mark.BAD, Mark.OBJECT_ENDS):
            break
    return found


def is_object(text: str) -> bool:
    found = marks(text)
    return bool(found) and found[-1] == (len(text) - 1, Mark.OBJECT_ENDS)


def is_object_for_python(text: str) -> bool:
    def refuse(name: str) -> Any:
        raise ValueError(name)

    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict) and text[:1] == "{" and text[-1:] == "}"
    except ValueError:
        return False


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), st.booleans(), st.sampled_from([None, 0, 2]))
def test_objects_are_objects(value: dict[str, Any], ascii_only: bool, indent: int | None) -> None:
    assert is_object(json.dumps(value, ensure_ascii=ascii_only, indent=indent))


@given(st.dictionaries(st.text(max_size=3), VALUES, min_size=1, max_size=3), st.integers(0, 10**6), st.data())
def test_damaged_objects_are_judged_as_by_python(value: dict[str, Any], seed: int, data: Any) -> None:
    text, draws = json.dumps(value), random.Random(seed)
    index = draws.randrange(len(text))
    character = draws.choice('{}[]",:\\0123456789.-+eEtfnu ax\n')
    text = draws.choice([text[:index] + character + text[index + 1 :], text[:index] + text[index + 1 :]])
    assert is_object(text) == is_object_for_python(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":01}', '{"a":1.}', '{"a":.5}', '{"a":-}', '{"a":1e}', '{"a":+1}', '{"a":tru}', '{"a":nul l}', "{'a':1}",
        '{"a" 1}', '{"a":1,}', '{,}', '{"a":1 "b":2}', '{"a":[1,]}', '{"a":[,1]}', '{"a":"\\x"}', '{"a":"\\u12g4"}',
        '{"a":"\n"}', '{"a":}', '{"a"}', "{1:2}", "[]", '{"a":[}', '{"a":{]}', "NaN", '{"a":NaN}', '{"a":[1}]',
    ],
)  # fmt: skip
def test_what_is_not_json(text: str) -> None:
    assert not is_object(text)
    assert not is_object_for_python(text)


def test_own_keys_and_values_are_marked() -> None:
    text = '{"a": [1, {"k": "v"}], "b": "x", "c": 12, "d": null}'
    found = [(text[: index + 1][-3:], mark) for index, mark in marks(text)]
    own = [mark for _, mark in found]
    key, start, end = Mark.KEY_ENDS, Mark.VALUE_STARTS, Mark.VALUE_ENDS
    assert own == [key, start, end, key, start, end, key, start, key, start, end, Mark.OBJECT_ENDS]


def test_depth_is_bounded() -> None:
    assert is_object('{"a":' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}")
    assert not is_object('{"a":' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}")
    assert marks('{"a":' + "[" * 10**6)[-1][1] is Mark.BAD
