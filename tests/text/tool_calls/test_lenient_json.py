"""Values are read as JSON reads them, and with the slips that models make."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text.tool_calls.lenient_json import MAX_DEPTH, NotReadableError, dump_json, parse_json, read_value

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@given(JSON, st.booleans(), st.sampled_from([None, 0, 2]), st.sampled_from(["", " ", "}", ', "x": 1', "é"]))
def test_json_is_read_as_json_reads_it(value: Any, ascii_only: bool, indent: int | None, behind: str) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    if isinstance(value, bool | int | float | None) and behind[:1] not in ("", " ", "}", ","):
        return  # it would be a part of the word
    read = read_value(f"x {text}{behind}", 1)
    assert (read.value, read.end, read.num_open) == (json.loads(text), len(text) + 2, 0)


@pytest.mark.parametrize(
    ("text", "value", "num_open"),
    [
        ("{'city': 'Ulm', \"days\": 3}", {"city": "Ulm", "days": 3}, 0),
        ("{'text': 'it\\'s \"so\"'}", {"text": 'it\'s "so"'}, 0),
        ('{"a": True, "b": None, "c": false,}', {"a": True, "b": None, "c": False}, 0),
        ("[1, 2, ]", [1, 2], 0),
        ("{city: 'Ulm', $ref: 1}", {"city": "Ulm", "$ref": 1}, 0),
        ('{"a": "two\nlines\\x41"}', {"a": "two\nlinesA"}, 0),
        ('{"code": """if "x":\n  y"""}', {"code": 'if "x":\n  y'}, 0),
        ("(1, 'a')", [1, "a"], 0),
        ('{"a": {"b": 1}', {"a": {"b": 1}}, 1),
        ('{"a": {"b": 1', {"a": {"b": 1}}, 2),
        ('{"a": [1, 2}', {"a": [1, 2]}, 1),
        ('{"a": {"b": 1}, {"c": 2}', {"a": {"b": 1}}, 1),
        ('{"a": "\\ud83d\\ude00\\n"}', {"a": "😀\n"}, 0),
    ],
)
def test_slips_are_forgiven(text: str, value: Any, num_open: int) -> None:
    read = read_value(text)
    assert (read.value, read.num_open) == (value, num_open)


@pytest.mark.parametrize(
    "text",
    ["", '{"a": ', '{"a": "b', "{'a': 'b", '{"a": word}', "[NaN]", "[-Infinity]", "[01]", "[" * (MAX_DEPTH + 1),
     '{"a": ' + "1" * 5000 + "}", '{"a": "b", "c'],
)  # fmt: skip
def test_what_is_no_value_is_refused(text: str) -> None:
    with pytest.raises(NotReadableError):
        read_value(text)


def test_strings_of_gemma_stand_between_markers() -> None:
    text = '{a:[1,<|"|>}]<|"|>,{b:null}],c d:two words,<|"|>e:f<|"|>:"x",g:<|"|>"q"\\ é\n<|"|>}'
    read = read_value(text, quote='<|"|>')
    assert read.value == {"a": ["1", "}]", {"b": "null"}], "c d": "two words", "e:f": "x", "g": '"q"\\ é\n'}
    with pytest.raises(NotReadableError):
        read_value('{a:<|"|>x', quote='<|"|>')


@pytest.mark.parametrize(
    ("text", "value", "is_json"),
    [("3", 3, True), ('"a"', "a", True), ("a", "a", False), ("{'a': 1}", {"a": 1}, False),
     ("{'a': 1", "{'a': 1", False),
     ("NaN", "NaN", False), ("1e999", "1e999", False), ('"\\ud800"', '"\\ud800"', False), ("", "", False)],
)  # fmt: skip
def test_whole_text_is_a_value_or_stays_text(text: str, value: Any, is_json: bool) -> None:
    assert parse_json(text) == (value, is_json)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", {"\udfff": 1}])
def test_values_that_json_cannot_hold_have_no_text(value: Any) -> None:
    assert dump_json(value) is None
