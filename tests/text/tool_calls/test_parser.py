"""Content and calls are the same however a text is cut; nothing is lost; long hostile texts are read in linear time."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.tool_calls.events import ToolCallStart
from quire.text.tool_calls.formats import FORMATS, GENERIC, HERMES, LLAMA, MISTRAL, ToolCallFormat
from quire.text.tool_calls.parser import ToolCallParser
from tests.text.tool_calls.builders import Parsed, parse

F = '{"name": "f", "arguments": {"a": [1, "}]", {"b": null}]}}'
F_ARGUMENTS = '{"a": [1, "}]", {"b": null}]}'
G = '{"name":"g","parameters":{}}'
CALLS: dict[str, tuple[ToolCallFormat, str, str, list[tuple[str, str]]]] = {
    "hermes": (HERMES, f"<tool_call>\n{F}\n</tool_call>", "", [("f", F_ARGUMENTS)]),
    "hermes, two": (
        HERMES, f"Sure.\n<tool_call>\n{F}\n</tool_call>\n<tool_call>{G}</tool_call>\n", "Sure.",
        [("f", F_ARGUMENTS), ("g", "{}")],
    ),
    "hermes, not closed": (HERMES, f"<tool_call>{F}", "", [("f", F_ARGUMENTS)]),
    "hermes, closing cut off": (HERMES, f"<tool_call>{F}\n</tool_c", "", [("f", F_ARGUMENTS)]),
    "hermes, next without closing": (HERMES, f"<tool_call>{F}<tool_call>{G}", "", [("f", F_ARGUMENTS), ("g", "{}")]),
    "hermes, list": (HERMES, f"<tool_call>[{F}, {G}]</tool_call>", "", [("f", F_ARGUMENTS), ("g", "{}")]),
    "hermes, text after": (HERMES, f"<tool_call>{F}</tool_call> Done. ", " Done. ", [("f", F_ARGUMENTS)]),
    "hermes, blanks before": (HERMES, f" \n\n<tool_call>{F}</tool_call>", "", [("f", F_ARGUMENTS)]),
    "hermes, other keys": (
        HERMES, '<tool_call>{"id": 3, "x": [{"name": "no"}], "name": "f", "arguments": {}, "y": 1}</tool_call>', "",
        [("f", "{}")],
    ),
    "hermes, arguments first": (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
    "hermes, arguments in a string": (
        HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}', "", [("f", '{"a": "é"}')],
    ),
    "hermes, no arguments": (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "hermes, null": (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    "hermes, escapes in the name": (HERMES, '<tool_call>{"name": "\\u0066", "arguments": {}}', "", [("f", "{}")]),
    "llama": (LLAMA, G, "", [("g", "{}")]),
    "llama, tag": (LLAMA, f"<|python_tag|>{G}", "", [("g", "{}")]),
    "llama, two": (LLAMA, f'\n{G}; {{"name": "h", "parameters": {{"a": 1}}}}\n', "", [("g", "{}"), ("h", '{"a": 1}')]),
    "mistral": (MISTRAL, f"[TOOL_CALLS] [{F}, {G}]", "", [("f", F_ARGUMENTS), ("g", "{}")]),
    "mistral, text before": (MISTRAL, f"Yes. [TOOL_CALLS][{G}]", "Yes.", [("g", "{}")]),
    "mistral, list cut off": (MISTRAL, f"[TOOL_CALLS] [{G}, ", "", [("g", "{}")]),
    "generic": (GENERIC, F, "", [("f", F_ARGUMENTS)]),
    "generic, list": (GENERIC, f"[{F},{G}]", "", [("f", F_ARGUMENTS), ("g", "{}")]),
    "generic, fenced": (GENERIC, f"```json\n{F}\n```\n", "", [("f", F_ARGUMENTS)]),
}  # fmt: skip
CONTENT: dict[str, tuple[ToolCallFormat, str]] = {
    "hermes, plain": (HERMES, "Hello <b>world</b>.\n"),
    "hermes, no object": (HERMES, "a <tool_call> nope </tool_call> b"),
    "hermes, no name": (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    "hermes, not json": (HERMES, "<tool_call>{'name': 'f'}</tool_call>"),
    "hermes, cut off": (HERMES, '<tool_call>{"name": "f", "argum'),
    "hermes, marker cut off": (HERMES, "yes <tool_ca"),
    "hermes, empty list": (HERMES, "<tool_call>[]</tool_call>"),
    "hermes, arguments are a list": (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    "hermes, arguments are text": (HERMES, '<tool_call>{"name": "f", "arguments": "a"}</tool_call>'),
    "hermes, nested markers": (HERMES, "<tool_call><tool_call><tool_call>"),
    "hermes, blanks": (HERMES, "  \n\t "),
    "llama, answer": (LLAMA, '{"answer": 42}'),
    "llama, name only": (LLAMA, '{"name": "Bob"}'),
    "llama, python": (LLAMA, "<|python_tag|>print(1)"),
    "llama, text first": (LLAMA, f"I call {G}"),
    "llama, tag cut off": (LLAMA, "<|pyth"),
    "mistral, no list": (MISTRAL, "[TOOL_CALLS] f()"),
    "generic, numbers": (GENERIC, "[1, 2]"),
    "generic, other fence": (GENERIC, "```python\nprint(1)\n```"),
    "generic, open list": (GENERIC, "["),
    "empty": (HERMES, ""),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    format, text, content, calls = CALLS[name]
    expected = Parsed(content, calls, [f"id{i}" for i in range(len(calls))])
    for pieces in ([text], list(text)):
        found = parse(format, pieces)
        found.num_events = 0
        assert found == expected
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("name", CONTENT)
def test_what_is_no_call_is_content_to_the_character(name: str) -> None:
    format, text = CONTENT[name]
    for pieces in ([text], list(text)):
        found = parse(format, pieces)
        assert (found.content, found.calls, found.is_incomplete) == (text, [], False)


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": "x', '{"a": "x', ""),
        ('<tool_call>{"name": "f", "arguments": {"a": tru!} more', '{"a": tru', "!} more"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call>', '{"a": 1', "]}</tool_call>"),
    ],
)
def test_a_call_that_breaks_off_keeps_what_it_has(text: str, arguments: str, content: str) -> None:
    found = parse(HERMES, list(text))
    assert found.calls == [("f", arguments)]
    assert found.content == content
    assert found.is_incomplete


def test_after_a_broken_call_others_are_found() -> None:
    found = parse(HERMES, [f'<tool_call>{{"name": "f", "arguments": {{x <tool_call>{G}</tool_call>'])
    assert found.calls == [("f", "{"), ("g", "{}")]
    assert found.content == "x"
    assert found.is_incomplete


def test_garbage_behind_complete_arguments_is_content() -> None:
    found = parse(HERMES, ['<tool_call>{"name": "f", "arguments": {}, !}</tool_call>'])
    assert (found.calls, found.content, found.is_incomplete) == ([("f", "{}")], ", !}</tool_call>", False)


def test_only_names_of_tools_are_calls() -> None:
    text = f"<tool_call>{F}</tool_call><tool_call>{G}</tool_call>"
    found = parse(HERMES, [text], tool_names={"g"})
    assert found.calls == [("g", "{}")]
    assert found.content == f"<tool_call>{F}</tool_call>"
    assert parse(GENERIC, ['{"name": "f"}'], tool_names=["f"]).calls == [("f", "{}")]


def test_arguments_are_streamed_and_content_is_not_delayed() -> None:
    pieces = ["Hel", "lo <", "b> <tool_call>", '{"name": "f", "arguments": {"a', '": "x', 'y"', "}}", "</tool_call>"]
    seen = [parse(HERMES, pieces[:count]).content for count in range(1, 3)]
    assert seen == ["Hel", "Hello <"]
    assert parse(HERMES, pieces).num_events > 5


def test_ids_are_the_formats_own() -> None:
    (start, _) = ToolCallParser(MISTRAL).feed(f"[TOOL_CALLS][{G}")
    assert isinstance(start, ToolCallStart)
    assert len(start.id) == 9


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<tool_", "<", "[TOOL_CALLS]", "[TOOL", "<|python_tag|>", "```json", "```", "`",
        F, G, '{"name": "f"', ', "arguments": ', '{"a": 1}', '"', "{", "}", "[", "]", ",", ";", " ", "\n", "x", "\\",
        '{"name": "f", "arguments": {"a": ', "1", "tru", "e", "é", '\\u00e9"', '{"arguments": {}, ', '"name": "f"}',
        '"{\\"a\\": 1}"',
    ]
)  # fmt: skip
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@settings(max_examples=400)
@given(st.sampled_from(sorted(FORMATS)), TEXTS, st.lists(st.integers(0, 10**6), max_size=8), st.booleans())
def test_any_cut_is_the_whole(format: str, text: str, places: list[int], knows_names: bool) -> None:
    options: dict[str, Any] = {"tool_names": ["f"]} if knows_names else {}
    results = [parse(FORMATS[format], pieces, **options) for pieces in ([text], cut(text, places), list(text))]
    for result in results:
        result.num_events = 0
    assert results[0] == results[1] == results[2]


@settings(max_examples=300)
@given(st.sampled_from(sorted(FORMATS)), TEXTS)
def test_nothing_is_lost(format: str, text: str) -> None:
    """Without calls the content is the text; with calls it is a part of it, in order."""
    found = parse(FORMATS[format], [text])
    if not found.calls:
        assert found.content == text
    rest = iter(text)
    assert all(character in rest for character in found.content), "content is a subsequence of the text"


@given(st.sampled_from(sorted(FORMATS)), st.text(max_size=40))
def test_any_text_at_all(format: str, text: str) -> None:
    assert parse(FORMATS[format], list(text)).content == parse(FORMATS[format], [text]).content


MIB = 1 << 20
LONG: dict[str, str] = {
    "blanks": " " * MIB,
    "beginnings of markers": "<tool_cal" * (MIB // 9),
    "markers": "<tool_call>" * (MIB // 11),
    "markers and blanks": "<tool_call> " * (MIB // 12),
    "objects cut off": '<tool_call>{"name": "f", ' * (MIB // 25),
    "open braces": '<tool_call>{"name": "f", "arguments": ' + '{"a":' * (MIB // 5),
    "brackets": "[" * MIB,
    "a long string": '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * MIB,
    "backslashes": '<tool_call>{"name": "f", "arguments": {"a": "' + "\\\\" * (MIB // 2),
    "a long name": '<tool_call>{"name": "' + "x" * MIB,
    "a long number": '<tool_call>{"x": ' + "1" * MIB,
    "many keys": '<tool_call>{"x": 1' + ', "y": 2' * (MIB // 8),
    "escaped arguments": '<tool_call>{"arguments": "' + '\\"' * (MIB // 2) + '", "name": "f"}',
    "closings": f"<tool_call>{G}" + "</tool_call>" * (MIB // 12),
    "closings cut off": f"<tool_call>{G}" + "</tool_cal" * (MIB // 10),
    "calls": f"<tool_call>{G}</tool_call>" * (MIB // 60),
    "list": "[TOOL_CALLS][" + f"{G}," * (MIB // 40),
    "separators": G + ";" * MIB,
    "backticks": "`" * MIB,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize(("size", "piece_len"), [(MIB, MIB), (MIB // 4, 7)])
def test_a_megabyte_is_read_in_time(name: str, size: int, piece_len: int) -> None:
    """If any of these took time in proportion to the square, this would take hours."""
    text = LONG[name][:size]
    format = MISTRAL if name == "list" else GENERIC if name in ("brackets", "separators", "backticks") else HERMES
    found = parse(format, [text[start : start + piece_len] for start in range(0, len(text), piece_len)])
    assert found.calls or found.content == text
