import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.protocol import validation
from quire.server.protocol.validation import MAX_DEPTH, MAX_KEYS, JsonTextError, parse_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda items: st.lists(items, max_size=4) | st.dictionaries(st.text("ab{[\"\\"), items, max_size=4),
    max_leaves=30,
)  # fmt: skip


@given(VALUES, st.booleans())
def test_reads_what_json_writes(value: object, escapes: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=escapes).encode()) == value


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_a_refusal(data: bytes) -> None:
    try:
        value = parse_json(data)
    except JsonTextError:
        return
    assert value == json.loads(data)


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_depth_is_bounded(opening: bytes, closing: bytes) -> None:
    assert parse_json(opening * MAX_DEPTH + b"1" + closing * MAX_DEPTH)
    for depth in (MAX_DEPTH + 1, 500, 30_000):
        with pytest.raises(JsonTextError, match="nested more than 64"):
            parse_json(opening * depth + b"1" + closing * depth)


def num_parts(value: object) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(num_parts, value.values()))
    return 1 + sum(map(num_parts, value)) if isinstance(value, list) else 0


@given(VALUES, st.booleans())
def test_lists_objects_and_keys_are_bounded_and_texts_do_not_count(value: object, escapes: bool) -> None:
    data = json.dumps(value, ensure_ascii=escapes).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "MAX_PARTS", 3)
        patch.setattr(validation, "SLICE_BYTES", 7)
        if num_parts(value) <= 3:
            assert parse_json(data) == value
        else:
            with pytest.raises(JsonTextError, match="more than 3 lists, objects and keys"):
                parse_json(data)


def test_keys_of_one_object_are_bounded() -> None:
    value = dict.fromkeys(map(str, range(MAX_KEYS)), 1)
    assert parse_json(json.dumps(value).encode()) == value
    with pytest.raises(JsonTextError, match="more than 8192 keys"):
        parse_json(json.dumps({**value, "a": 1}).encode())


def test_brackets_in_texts_are_not_nesting() -> None:
    text = '[{"' * 1000
    assert parse_json(json.dumps([text, "\\", text]).encode()) == [text, "\\", text]


def test_many_brackets_side_by_side_are_not_nesting() -> None:
    assert parse_json(b"[" + b"[]," * 1000 + b"[]]") == [[]] * 1001


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 1}}', 'key more than once, such as "c"'),
        ("[NaN]", "NaN is not"),
        ("[-Infinity]", "Infinity is not"),
        ("[1e400]", "1e400 is too large"),
        ("[18446744073709551616]", "more than 64 bits"),
        ("[" + "9" * 5000 + "]", "more than 4300 digits"),
        ('{"seed": 18446744073709551616}', "more than 64 bits"),
        ('{"metadata": {"messages": ["\\ud800"]}}', "half of a surrogate"),
        ('{"stop": "a\\u0000"}', "\\u0000, the NUL character"),
        ('{"messages": [{"a\\u0000": 1}]}', "NUL"),
        ("[-18446744073709551616]", "more than 64 bits"),
        ('["\\ud800"]', "\\ud800, half of a surrogate"),
        ('{"\\udc00": 1}', "half of a surrogate"),
        ('["a\\u0000"]', "NUL"),
        ('["a\0"]', "not valid JSON: Invalid control character"),
        ("", "the body is empty: send a JSON object"),
        (" \n", "the body is empty"),
        ("x", "not valid JSON: Expecting value at line 1, column 1"),
        ("[1,]", "not valid JSON"),
        ('{"a": 1} x', "Extra data at line 1, column 10"),
        ("\ufeff{}", "not valid JSON"),
    ],
)
def test_refuses(text: str, message: str) -> None:
    with pytest.raises(JsonTextError) as caught:
        parse_json(text.encode())
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("field", ["messages", "system", "input", "prompt", "documents", "tools"])
def test_texts_that_the_model_reads_are_mended(field: str) -> None:
    given = {field: ["\x7fELF\0\0", {"content": [{"text": "cut \ud83d"}]}, "\U0001f96d", 10**30]}
    assert parse_json(json.dumps(given).encode()) == {
        field: ["\x7fELF\ufffd\ufffd", {"content": [{"text": "cut \ufffd"}]}, "\U0001f96d", 10**30]
    }


@pytest.mark.parametrize(("text", "value"), [("8.0", 8), ("-0.0", 0), ("1e3", 1000), ("8.5", 8.5), ("1e300", 1e300)])
def test_whole_float_is_parsed_as_an_integer(text: str, value: float) -> None:
    found = parse_json(text.encode())
    assert (found, type(found)) == (value, type(value))


def test_refuses_what_is_not_utf8() -> None:
    with pytest.raises(JsonTextError, match="not UTF-8: byte 2"):
        parse_json(b'["\xff"]')
