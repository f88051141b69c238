"""Content and calls do not depend on how a text is cut, lose nothing, and take linear time on hostile texts."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.tool_calls.formats import FORMATS, GENERIC
from quire.text.tool_calls.parser import (
    CallReading,
    ContentDelta,
    ToolArgumentsDelta,
    ToolCallParser,
    ToolCallStart,
    ToolEvent,
)
from quire.text.tool_calls.schemas import ToolSchemas
from tests.text.tool_calls.builders import TOOLS, cuts, parse, tool

HERMES, QWEN, GEMMA, DEEPSEEK = (FORMATS[name] for name in ("hermes", "qwen3-coder", "gemma-4", "deepseek"))
ROWS = [row for row in FORMATS.values() if not row.is_harmony]
F = '{"name": "f", "arguments": {"a": [1, "}]", {"b": null}]}}'
G = '{"name":"g","parameters":{}}'
D_BEGIN, D_CALL = DEEPSEEK.openings
D_CALL_END, D_END = DEEPSEEK.closings
D_KIND = f"{D_CALL}function<｜tool▁sep｜>"


def as_gemma_writes(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_gemma_writes(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_gemma_writes, value)) + "]"
    return json.dumps(value)


def as_python_writes(name: str, arguments: dict[str, Any]) -> str:
    return f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6)
)
KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=12
)
ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=4)


@given(ARGUMENTS, KEYS, st.permutations(range(3)), st.booleans(), st.sampled_from([None, 0, 2]))
def test_any_call_has_the_name_and_arguments_that_json_finds(
    arguments: dict[str, Any], name: str, order: list[int], ascii_only: bool, indent: int | None
) -> None:
    items = [("name", name), ("arguments", arguments), ("id", "x")]
    text = json.dumps(dict(items[index] for index in order), ensure_ascii=ascii_only, indent=indent)
    # An object without a marker that begins with an id is any JSON.
    for format, opening in ((HERMES, "<tool_call>"), (GENERIC, "")) if order[0] != 2 else ((HERMES, "<tool_call>"),):
        for pieces in ([opening + text], [opening, *text]):
            found = parse(format, pieces)
            ((called, written),) = found.calls
            assert (called, json.loads(written), found.content) == (name, arguments, "")


@given(ARGUMENTS, KEYS)
def test_arguments_written_in_other_notations_are_read_as_json(arguments: dict[str, Any], name: str) -> None:
    texts = [
        (GEMMA, f"<|tool_call>call:{name}{as_gemma_writes(arguments)}<tool_call|>"),
        (FORMATS["lfm"], f"<|tool_call_start|>{as_python_writes(name, arguments)}<|tool_call_end|>"),
        (FORMATS["mistral"], f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"),
    ]
    for format, text in texts:
        for pieces in ([text], list(text)):
            found = parse(format, pieces)
            ((called, written),) = found.calls
            assert (called, json.loads(written), found.content) == (name, arguments, "")


def test_call_is_given_when_it_is_complete_and_content_is_not_delayed() -> None:
    parser = ToolCallParser(CallReading(format=HERMES, schemas=ToolSchemas(TOOLS)), make_id=lambda: "id")
    steps: list[tuple[str, list[ToolEvent]]] = [
        ("Hel", [ContentDelta("Hel", 0)]),
        ("lo <", [ContentDelta("lo", 3)]),
        ("b> <tool_call>", [ContentDelta(" <b>", 5)]),
        ('{"name": "f", "argum', []),
        ('ents": {"a": 1}}', []),
        ("</tool_call", []),
        (">", [ToolCallStart(0, "id", "f"), ToolArgumentsDelta(0, '{"a": 1}')]),
        ("\n", []),
        ("Done {", [ContentDelta("\nDone", 69)]),
        ("1} [x", [ContentDelta(" {1} [x", 74)]),
    ]
    for piece, events in steps:
        assert parser.feed(piece) == events, piece
    assert parser.finish() == []


def test_names_are_those_of_tools() -> None:
    text = f"<tool_call>{F}</tool_call><tool_call>{G}</tool_call>"
    found = parse(HERMES, [text], tools=[tool("g")])
    assert (found.calls, found.content) == ([("g", "{}")], f"<tool_call>{F}</tool_call>")
    found = parse(HERMES, [f"<tool_call>[{G}, {F}]</tool_call>"], tools=[tool("g")])
    assert (found.calls, found.content) == ([("g", "{}")], f" {F}]</tool_call>".replace("]</tool_call>", "]"))


def test_calls_after_text_that_is_none_are_found() -> None:
    for pieces in cuts(f'<tool_call>{{"name": "f", "arguments": {{x <tool_call>{G}</tool_call>'):
        found = parse(HERMES, pieces)
        assert (found.calls, found.content) == ([("g", "{}")], '<tool_call>{"name": "f", "arguments": {x')


def test_values_between_tags_have_the_type_of_the_schema() -> None:
    schemas = {
        "code": {"type": "string"},
        "days": {"type": "integer"},
        "zip": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    }
    tools = [tool("f", **schemas)]
    values = ("code", "days", "zip", "any")
    expected = [("f", '{"code": "7", "days": 7, "zip": "7", "any": 7}')]
    tags = "".join(f"<parameter={key}>\n7\n</parameter>" for key in values)
    glm = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>7</arg_value>\n" for key in values)
    minimax = "".join(f'<parameter name="{key}">7</parameter>' for key in values)
    dsml = "".join(f'<｜DSML｜parameter name="{key}" string="false">7</｜DSML｜parameter>' for key in values)
    texts = {
        "qwen3-coder": f"<tool_call><function=f>{tags}</function></tool_call>",
        "glm-4.5": f"<tool_call>f\n{glm}</tool_call>",
        "minimax-m2": f'<minimax:tool_call><invoke name="f">{minimax}</invoke></minimax:tool_call>',
        "deepseek-v3.2": f'<｜DSML｜tool_calls><｜DSML｜invoke name="f">{dsml}</｜DSML｜invoke></｜DSML｜tool_calls>',
        "gemma-4": f"<|tool_call>call:f{{{','.join(f'{key}:7' for key in values)}}}<tool_call|>",
    }
    for name, text in texts.items():
        assert parse(FORMATS[name], [text], tools=tools).calls == expected, name


def test_demanded_list_ends_at_an_equal_call() -> None:
    calls = [
        '{"name":"f","arguments":{"a":1}}',
        '{"name":"f","arguments":{"a":2}}',
        '{"name":"f","arguments":{"a": 1}}',
    ]
    for pieces in cuts(f"[{','.join(calls)},{calls[1]},{G}]"):
        found = parse(GENERIC, pieces, schema={})
        assert (found.calls, found.content) == ([("f", '{"a": 1}'), ("f", '{"a": 2}')], "")
        assert len(parse(GENERIC, pieces).calls) == 5
    for pieces in cuts(f"{calls[0]}\n{calls[0]} and more {G}"):
        assert parse(GENERIC, pieces, schema={}).content == ""


def test_only_the_first_call_is_kept_without_parallel_calls() -> None:
    found = parse(HERMES, [f"<tool_call>{F}</tool_call><tool_call>{G}</tool_call> Done."], is_parallel=False)
    assert ([name for name, _ in found.calls], found.content) == (["f"], " Done.")


def test_ids_are_those_that_the_family_needs() -> None:
    kimi = "<|tool_call_begin|>functions.f:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    found = parse(FORMATS["kimi-k2"], [kimi.format(3) + kimi.format(4) + kimi.format(4)])
    assert found.ids == ["functions.f:3", "functions.f:4", "id0"]
    parser = ToolCallParser(CallReading(format=FORMATS["mistral"], schemas=ToolSchemas(None)))
    (start, _) = parser.feed("[TOOL_CALLS]f[ARGS]{}") + parser.finish()
    assert isinstance(start, ToolCallStart)
    assert len(start.id) == 9
    assert start.id.isalnum()


def test_no_marker_is_a_part_of_another() -> None:
    for row in FORMATS.values():
        pairs = itertools.permutations(row.markers, 2)
        assert not [pair for pair in pairs if pair[0] in pair[1]], row.name
        assert all(len(marker) <= 64 for marker in row.markers)


def pieces_of(row: Any) -> list[str]:
    leads = [
        "<function=f>",
        "<parameter=a>",
        "</parameter>",
        "f",
        "[f(",
        "a=1",
        ")]",
        "[ARGS]",
        "\n",
        "call:f",
        "print(",
    ]
    json_parts = [
        F,
        G,
        '{"name": "f", ',
        '"arguments": ',
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        ",",
        ":",
        "1",
        "```json\n",
        "```",
    ]
    return [*row.markers, *(marker[:4] for marker in row.markers), *leads, *json_parts, " ", "x", "<", "|", "\\"]


@settings(max_examples=250, deadline=None)
@given(st.data(), st.sampled_from(ROWS), st.lists(st.integers(0, 10**6), max_size=8), st.booleans())
def test_any_cut_gives_the_same_result(data: Any, row: Any, places: list[int], knows_names: bool) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(pieces_of(row)), max_size=24)))
    ends = sorted({place % (len(text) + 1) for place in places})
    cut = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    results = [parse(row, pieces, tools=TOOLS if knows_names else None) for pieces in ([text], cut, list(text))]
    assert results[0] == results[1] == results[2]
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in results[0].calls)


SIZE = 1 << 16
LONG: dict[str, tuple[str, str]] = {
    "blanks": ("hermes", " " * SIZE),
    "beginnings of markers": ("hermes", "<tool_cal" * (SIZE // 9)),
    "markers": ("hermes", "<tool_call>" * (SIZE // 11)),
    "markers and blanks": ("hermes", "<tool_call> " * (SIZE // 12)),
    "markers and text": ("hermes", "<tool_call>x" * (SIZE // 12)),
    "objects cut off": ("hermes", '<tool_call>{"name": "f", ' * (SIZE // 25)),
    "open braces": ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a":' * (SIZE // 5)),
    "a long string": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * SIZE),
    "backslashes": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "' + "\\\\" * (SIZE // 2)),
    "a long number": ("hermes", '<tool_call>{"x": ' + "1" * SIZE),
    "many keys": ("hermes", '<tool_call>{"x": 1' + ', "y": 2' * (SIZE // 8)),
    "escaped arguments": ("hermes", '<tool_call>{"arguments": "' + '\\"' * (SIZE // 2) + '", "name": "f"}'),
    "closings": ("hermes", f"<tool_call>{G}" + "</tool_call>" * (SIZE // 12)),
    "closings cut off": ("hermes", f"<tool_call>{G}" + "</tool_cal" * (SIZE // 10)),
    "calls": ("hermes", f"<tool_call>{G}</tool_call>" * (SIZE // 60)),
    "strings with markers": ("hermes", '<tool_call>{"name": "f", "a": "' + "</tool_call>" * (SIZE // 12)),
    "list": ("mistral", "[TOOL_CALLS][" + f"{G}," * (SIZE // 40)),
    "brackets": ("generic", "[" * SIZE),
    "braces": ("generic", "{" * SIZE),
    "separators": ("generic", G + ";" * SIZE),
    "backticks": ("generic", "`" * SIZE),
    "leads": ("generic", '{"name": "f", ' * (SIZE // 14)),
    "lines with leads": ("generic", f"{G}\nx\n" * (SIZE // 40)),
    "leads of lists": ("generic", '[{"name": "f"}, ' * (SIZE // 16)),
    "lines": ("glm-4", "f\n" * (SIZE // 2)),
    "tags": ("qwen3-coder", "<function=f>" * (SIZE // 12)),
    "parameters": ("qwen3-coder", "<tool_call><function=f>" + "<parameter=a>1</parameter>" * (SIZE // 26)),
    "parameters without ends": ("qwen3-coder", "<function=f><parameter=a>" * (SIZE // 25)),
    "python": ("lfm", "[f(a=" * (SIZE // 5)),
    "python lists": ("lfm", "<|tool_call_start|>[" + "f(a=1), " * (SIZE // 8)),
    "bare strings": ("gemma-4", '<|tool_call>call:f{a:<|"|>' + "<|" * (SIZE // 2)),
    "bare objects": ("gemma-4", "<|tool_call>call:f{a:" + "{a:" * (SIZE // 3)),
    "bare calls": ("gemma-4", "<|tool_call>call:f{a:1}<tool_call|>" * (SIZE // 35)),
    "markers of all": ("deepseek", f"{D_BEGIN} " * (SIZE // 20)),
    "deepseek": ("deepseek", f"{D_BEGIN}{D_KIND}f\n{{}}{D_CALL_END}{D_END}" * (SIZE // 90)),
    "open calls": ("deepseek", f"{D_KIND}f" * (SIZE // 40)),
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize(("size", "piece_len"), [(SIZE, SIZE), (SIZE // 8, 7)])
def test_long_hostile_text_is_read_in_linear_time(name: str, size: int, piece_len: int) -> None:
    """Quadratic time would be hours."""
    row, text = LONG[name]
    text = text[:size]
    found = parse(FORMATS[row], [text[start : start + piece_len] for start in range(0, len(text), piece_len)])
    assert found.calls or found.content == text
