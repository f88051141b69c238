"""One object: when it is a call, and what is held back until then."""

import pytest

from quire.text.tool_calls.call import CallReader, Status
from quire.text.tool_calls.formats import GENERIC, HERMES


def test_the_name_comes_with_the_brace_of_the_arguments() -> None:
    reader = CallReader(HERMES, None)
    first = reader.read('{"name": "f", "arguments": ', 0)
    assert (first.name, first.arguments, first.status) == (None, [], Status.MORE)
    assert "".join(reader.held) == '{"name": "f", "arguments": '
    second = reader.read('{"a": 1', 0)
    assert (second.name, second.arguments) == ("f", ['{"a": 1'])
    assert reader.has_open_arguments
    assert reader.held == []
    third = reader.read("2}} rest", 0)
    assert (third.arguments, third.status, third.position) == (["2}"], Status.DONE, 3)
    assert not reader.has_open_arguments


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ('{"name": 3}', 9), ('{"name": ""}', 11), ('{"name": "f", "arguments": [1]}', 27), ('{"x": 1}', 4),
        ('{"name": "f", "arguments": "no"}', 31), ('{"name": "\\ud800"}', 17), ('{"name": "f"}', 13), ("{]", 1),
    ],
)  # fmt: skip
def test_what_is_no_call_is_held_to_the_character(text: str, position: int) -> None:
    reader = CallReader(GENERIC, None)
    found = reader.read(text, 0)
    assert found.status is Status.BAD
    assert found.position == position
    assert "".join(reader.held) == text[:position]


def test_names_of_tools() -> None:
    assert CallReader(HERMES, ["f"]).read('{"name": "g"}', 0).status is Status.BAD
    found = CallReader(GENERIC, ["f"]).read('{"name": "f"}', 0)
    assert (found.status, found.name, found.arguments) == (Status.DONE, "f", ["{}"])
