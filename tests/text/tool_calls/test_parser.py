"""Content and calls do not depend on how a text is cut, lose nothing, and take linear time on hostile texts."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.tool_calls.formats import (
    DEEPSEEK,
    DEEPSEEK_V31,
    FORMATS,
    GEMMA,
    GENERIC,
    GLM,
    GLM_TAGGED,
    HARMONY,
    HERMES,
    LFM,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    OLMO,
    PHI,
    QWEN,
    SEED,
    ToolCallFormat,
)
from quire.text.tool_calls.parser import ContentDelta, ToolArgumentsDelta, ToolCallParser, ToolCallStart, ToolEvent
from quire.text.tool_calls.requests import text_parameters
from tests.text.tool_calls.builders import Parsed, parse

F = '{"name": "f", "arguments": {"a": [1, "}]", {"b": null}]}}'
F_ARGUMENTS = '{"a": [1, "}]", {"b": null}]}'
G = '{"name":"g","parameters":{}}'
D_BEGIN, D_CALL, D_SEP, D_CALL_END, D_END = (
    DEEPSEEK.around[0],
    DEEPSEEK.opening,
    "<｜tool▁sep｜>",
    DEEPSEEK.closing,
    DEEPSEEK.around[1],
)
D_KIND = f"{D_CALL}function{D_SEP}"
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
    "qwen": (
        QWEN, "Well.\n<tool_call>\n<function=f>\n<parameter=a>\nUlm\n</parameter>\n<parameter=b c>\n[1, \"</x>\"]\n"
        "</parameter>\n</function>\n</tool_call>", "Well.", [("f", '{"a": "Ulm", "b c": [1, "</x>"]}')],
    ),
    "qwen, two": (
        QWEN, "<tool_call><function=g></function></tool_call>\n<tool_call>\n<function=f><parameter=a>True</parameter>"
        "<parameter=b>\n\n{x\n\n</parameter></function>", "",
        [("g", "{}"), ("f", '{"a": true, "b": "\\n{x\\n"}')],
    ),
    "seed": (
        SEED, "<seed:tool_call>\n<function=f>\n<parameter=a>3</parameter>\n</function>\n</seed:tool_call>", "",
        [("f", '{"a": 3}')],
    ),
    "mistral, name first": (
        MISTRAL_ARGS, f"Yes. [TOOL_CALLS]f[ARGS]{F_ARGUMENTS}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{{}}", "Yes.",
        [("f", F_ARGUMENTS), ("g", "{}")],
    ),
    "harmony": (
        HARMONY, f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{F_ARGUMENTS}", "",
        [("f", F_ARGUMENTS)],
    ),
    "phi": (PHI, f"<|tool_call|>[{F}, {G}]<|/tool_call|>", "", [("f", F_ARGUMENTS), ("g", "{}")]),
    "lfm": (
        LFM, """Yes. <|tool_call_start|>[f(a="x]\\"", b={'c': [1, -2.5, null, True]}), a.g()]<|tool_call_end|> Done.""",
        "Yes. Done.", [("f", '{"a": "x]\\"", "b": {"c": [1, -2.5, null, true]}}'), ("a.g", "{}")],
    ),
    "olmo": (
        OLMO, "<function_calls>\nf(a=1)\ng()\n</function_calls>", "", [("f", '{"a": 1}'), ("g", "{}")],
    ),
    "olmo, not closed": (OLMO, "<function_calls>g()</function_c", "", [("g", "{}")]),
    "gemma": (
        GEMMA, """<|tool_call>call:f{a:[1,<|"|>}]<|"|>,{b:null}]}<tool_call|>""", "", [("f", F_ARGUMENTS)],
    ),
    "gemma, two": (
        GEMMA, 'Sure.<|tool_call>call:a.b-c{}<tool_call|><|tool_call>call:g{ on : true , n:-1.5e3,}<tool_call|>\n',
        "Sure.",
        [("a.b-c", "{}"), ("g", '{"on": true, "n": -1.5e3}')],
    ),
    "gemma, strings": (
        GEMMA, """<|tool_call>call:f{a:<|"|>"q"\\ <| é\n<|"|>,<|"|>b:c<|"|>:<|"|><|"|>,d:two words,e:None}""", "",
        [("f", '{"a": "\\"q\\"\\\\ <| é\\n", "b:c": "", "d": "two words", "e": null}')],
    ),
    "deepseek": (
        DEEPSEEK, f"{D_BEGIN}{D_KIND}f\n```json\n{F_ARGUMENTS}\n```{D_CALL_END}{D_END}", "", [("f", F_ARGUMENTS)],
    ),
    "deepseek, two": (
        DEEPSEEK, f"Sure.\n\n{D_BEGIN}{D_KIND}f\n```json\n{F_ARGUMENTS}\n```{D_CALL_END}\n{D_KIND}a.g\n```json\n"
        f"{{}}\n```{D_CALL_END}{D_END}\n", "Sure.", [("f", F_ARGUMENTS), ("a.g", "{}")],
    ),
    "deepseek, as V3.1 writes it": (DEEPSEEK, f"{D_BEGIN}{D_CALL}g{D_SEP}{{}}{D_CALL_END}{D_END}", "", [("g", "{}")]),
    "deepseek, no marker of all": (DEEPSEEK, f"a{D_KIND}g\n```json\n{{}}\n```{D_CALL_END} b", "a b", [("g", "{}")]),
    "deepseek, marker of all alone": (
        DEEPSEEK, f"a {D_BEGIN} b {D_BEGIN}\n{D_KIND}g\n{{}}", f"a {D_BEGIN} b", [("g", "{}")],
    ),
    "deepseek, not closed": (DEEPSEEK, f"{D_BEGIN}{D_KIND}g\n```json\n{{}}{D_END} b", " b", [("g", "{}")]),
    "deepseek, end cut off": (DEEPSEEK, f"{D_BEGIN}{D_KIND}g\n```json\n{{}}\n``", "", [("g", "{}")]),
    "deepseek 3.1": (
        DEEPSEEK_V31, f"Yes. {D_BEGIN}{D_CALL}f{D_SEP}{F_ARGUMENTS}{D_CALL_END}{D_CALL}function{D_SEP}{{}}{D_CALL_END}"
        f"{D_END}", "Yes.", [("f", F_ARGUMENTS), ("function", "{}")],
    ),
    "glm": (GLM, f"f\n{F_ARGUMENTS}", "", [("f", F_ARGUMENTS)]),
    "glm, two": (GLM, f"\nf \n{F_ARGUMENTS}<|assistant|>g\n{{}}\n", "", [("f", F_ARGUMENTS), ("g", "{}")]),
    "glm, text after": (GLM, "g\n{}\nDone.", "\nDone.", [("g", "{}")]),
    "glm, tags": (
        GLM_TAGGED, "\nWell.\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>\nUlm </arg_value>\n<arg_key>b c"
        "</arg_key>\n<arg_value>[1, \"</x>\"]</arg_value>\n</tool_call>", "\nWell.",
        [("f", '{"a": "\\nUlm ", "b c": [1, "</x>"]}')],
    ),
    "glm, tags without line breaks": (
        GLM_TAGGED, "<tool_call>g</tool_call><tool_call>f<arg_key>a</arg_key><arg_value>true</arg_value>"
        "</tool_call> Done.", " Done.", [("g", "{}"), ("f", '{"a": true}')],
    ),
    "gemma, text after": (GEMMA, "<|tool_call>call:g{}<tool_call|> Done. ", " Done. ", [("g", "{}")]),
    "gemma, closing cut off": (GEMMA, "<|tool_call>call:g{}<tool_c", "", [("g", "{}")]),
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
    "generic, name is a number": (GENERIC, '{"name": 3, "arguments": {}}'),
    "generic, name is empty": (GENERIC, '{"name": "", "arguments": {}}'),
    "generic, name is no Unicode": (GENERIC, '{"name": "\\ud800", "arguments": {}}'),
    "generic, arguments are no Unicode": (GENERIC, '{"arguments": {"a": "\\ud800"}, "name": "f"}'),
    "generic, name only": (GENERIC, '{"name": "f"}'),
    "generic, other key": (GENERIC, '{"name": "f", "arguments": "{}", "x": 1}'),
    "generic, no JSON": (GENERIC, "{]"),
    "hermes, deep": (HERMES, '<tool_call>{"x": ' + "[" * 10**4 + "]" * 10**4 + "}"),
    "qwen, JSON": (QWEN, f"<tool_call>{F}</tool_call>"),
    "qwen, no name": (QWEN, "<tool_call><function=></function></tool_call>"),
    "qwen, cut off": (QWEN, "<tool_call>\n<function=f"),
    "mistral, name alone": (MISTRAL_ARGS, "[TOOL_CALLS]f\n{}"),
    "mistral, no name": (MISTRAL_ARGS, "[TOOL_CALLS]{}"),
    "harmony, no tool": (HARMONY, "<|channel|>commentary to=functions. <|message|>{}"),
    "lfm, positional": (LFM, "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
    "lfm, not a literal": (LFM, "<|tool_call_start|>[f(a=open('x'))]<|tool_call_end|>"),
    "lfm, not JSON": (LFM, "<|tool_call_start|>[f(a={1}, b=b'', c={1: 2})]<|tool_call_end|>"),
    "lfm, half a pair": (LFM, "<|tool_call_start|>[f(a='\\ud800')]<|tool_call_end|>"),
    "lfm, deep": (LFM, f"<|tool_call_start|>f(a={'[' * 10**4}{']' * 10**4})<|tool_call_end|>"),
    "lfm, rather deep": (LFM, f"<|tool_call_start|>f(a={'[' * 90}{']' * 90})<|tool_call_end|>"),
    "lfm, large": (LFM, f"<|tool_call_start|>f(a='{'x' * 70_000}')<|tool_call_end|>"),
    "olmo, text": (OLMO, "<function_calls>I call f(a=1)</function_calls>"),
    "deepseek, markers alone": (DEEPSEEK, f"{D_BEGIN}\n{D_CALL}{D_CALL_END}{D_END}"),
    "deepseek, no object": (DEEPSEEK, f"a {D_BEGIN}{D_KIND}f\n```json\nnone\n```{D_CALL_END}{D_END} b"),
    "deepseek, marker cut off": (DEEPSEEK, "a <｜tool▁calls▁begin"),
    "deepseek, name cut off": (DEEPSEEK, f"{D_BEGIN}{D_KIND}f\n```js"),
    "deepseek 3.1, no name": (DEEPSEEK_V31, f"{D_BEGIN}{D_CALL}{D_SEP}{{}}{D_CALL_END}"),
    "glm, text": (GLM, "\nHello there {}"),
    "glm, text before": (GLM, "I call\nf\n{}"),
    "glm, name cut off": (GLM, "f\n"),
    "glm, list": (GLM, "f\n[1]"),
    "glm, tags, JSON": (GLM_TAGGED, f"<tool_call>{F}</tool_call>"),
    "glm, tags, words": (GLM_TAGGED, "<tool_call>I call f</tool_call>"),
    "glm, tags, cut off": (GLM_TAGGED, "<tool_call>f\n"),
    "gemma, JSON": (GEMMA, f"<|tool_call>{F}<tool_call|>"),
    "gemma, no name": (GEMMA, "<|tool_call>call:{}<tool_call|>"),
    "gemma, no object": (GEMMA, "a <|tool_call>call:f(1)<tool_call|> b"),
    "gemma, cut off": (GEMMA, "<|tool_call>call:f"),
    "empty": (HERMES, ""),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_each_format_are_found(name: str) -> None:
    format, text, content, calls = CALLS[name]
    expected = Parsed(content, calls, [f"id{i}" for i in range(len(calls))])
    for pieces in ([text], list(text)):
        found = parse(format, pieces)
        found.num_events = 0
        assert found == expected
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("name", CONTENT)
def test_text_without_calls_is_content_to_the_character(name: str) -> None:
    format, text = CONTENT[name]
    for pieces in ([text], list(text)):
        found = parse(format, pieces)
        assert (found.content, found.calls) == (text, [])


BROKEN = [
    ('<tool_call>{"name": "f", "arguments": {"a": "x', '{"a": "x', ""),
    ('<tool_call>{"name": "f", "arguments": {"a": tru!} more', '{"a": tru', "!} more"),
    ('<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call>', '{"a": 1]}', ""),
    (f'<tool_call>{{"name": "f", "arguments": {F_ARGUMENTS}</tool_call> more', F_ARGUMENTS, " more"),
    ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>', '{"a": 1', "</tool_call>"),
    ('<tool_call>{"name": "f", "arguments": {}, !}</tool_call>', "{}", ", !}</tool_call>"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "arguments", "content"), BROKEN)
def test_broken_call_keeps_its_arguments_and_rest_is_content(text: str, arguments: str, content: str) -> None:
    found = parse(HERMES, list(text))
    assert (found.calls, found.content) == ([("f", arguments)], content)


BROKEN_TAGGED = [
    ("<parameter=a>x", "", ""),
    ("<parameter=a>\n1\n</parameter> more", '{"a": 1', "more"),
    ("<parameter=a\n>1</parameter></function>", "", "\n>1</parameter></function>"),
]


@pytest.mark.parametrize(("text", "arguments", "content"), BROKEN_TAGGED)
def test_broken_tagged_call_keeps_whole_parameters_and_rest_is_content(text: str, arguments: str, content: str) -> None:
    for pieces in ([f"<tool_call><function=f>{text}"], list(f"<tool_call><function=f>{text}")):
        found = parse(QWEN, pieces)
        assert (found.calls, found.content) == ([("f", arguments)], content)


BROKEN_GLM_TAGS = [
    ("<arg_key>a</arg_key>x", "", "x"),
    ("<arg_key>a</arg_key><arg_value>1</arg_value> more", '{"a": 1', "more"),
    ("<arg_key>a</arg_key>\n<arg_value>1</arg_val", "", ""),
    ("<arg_key>a<b></arg_key>", "", "<b></arg_key>"),
    ("<arg_key>a</arg_key><arg_value>1</arg_value><tool_call>g</tool_call>", '{"a": 1', ""),
]


@pytest.mark.parametrize(("text", "arguments", "content"), BROKEN_GLM_TAGS)
def test_broken_call_of_glm_keeps_whole_parameters(text: str, arguments: str, content: str) -> None:
    for pieces in ([f"<tool_call>f\n{text}"], list(f"<tool_call>f\n{text}")):
        found = parse(GLM_TAGGED, pieces)
        assert (found.calls[0], found.content) == (("f", arguments), content)
        assert found.calls[1:] == ([("g", "{}")] if ">g<" in text else [])


BROKEN_DEEPSEEK = [
    ('{"a": "x', [("f", '{"a": "x')], ""),
    (f'{{"a": 1}} more{D_CALL_END}{D_END}', [("f", '{"a": 1}')], f" more{D_CALL_END}{D_END}"),
    (f"{{}}{D_CALL_END} or {D_KIND}g\n{{}}", [("f", "{}"), ("g", "{}")], " or"),
]


@pytest.mark.parametrize(("text", "calls", "content"), BROKEN_DEEPSEEK)
def test_broken_call_of_deepseek_is_kept_and_rest_is_content(
    text: str, calls: list[tuple[str, str]], content: str
) -> None:
    for pieces in ([f"{D_BEGIN}{D_KIND}f\n{text}"], list(f"{D_BEGIN}{D_KIND}f\n{text}")):
        found = parse(DEEPSEEK, pieces)
        assert (found.calls, found.content) == (calls, content)


def test_arguments_behind_a_name_are_streamed() -> None:
    for format, start in ((DEEPSEEK, f"{D_BEGIN}{D_KIND}f\n```json\n"), (GLM, "f\n")):
        parser = ToolCallParser(format, make_id=lambda: "id")
        assert parser.feed(start) == []
        assert parser.feed('{"a": "x') == [ToolCallStart(0, "id", "f"), ToolArgumentsDelta(0, '{"a": "x')]
        assert parser.feed('y"}') == [ToolArgumentsDelta(0, 'y"}')]
        assert parser.feed(format.closing) == parser.finish() == []


def test_declared_text_stays_text() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {
        "properties": {"code": {"type": "string"}, "days": {"type": "integer"}, "any": True},
    }}}]  # fmt: skip
    parameters = "".join(f"<parameter={name}>\n7\n</parameter>" for name in ("code", "days", "any"))
    text = f"<tool_call><function=f>{parameters}</function></tool_call>"
    expected = [("f", '{"code": "7", "days": 7, "any": 7}')]
    assert parse(QWEN, [text], text_parameters=text_parameters(tools)).calls == expected
    names = ("code", "days", "any")
    text = "".join(f"<arg_key>{name}</arg_key>\n<arg_value>7</arg_value>\n" for name in names)
    text = f"<tool_call>f\n{text}</tool_call>"
    assert parse(GLM_TAGGED, [text], text_parameters=text_parameters(tools)).calls == expected


BROKEN_BARE = [
    ('{a:<|"|>x', '{"a": "x', ""),
    ("{a:[1,2", '{"a": [1, 2', ""),
    ("{a:1 {b:2}}<tool_call|>", '{"a": "1 {b:2"}', "}<tool_call|>"),
    ("{a:1]} more", '{"a": 1', "]} more"),
    ("{:1} more", "{", ":1} more"),
    ("{a:{b:1}{} more", '{"a": {"b": 1}', "{} more"),
    ("{a:1,,b:2} more", '{"a": 1, ', ",b:2} more"),
]


@pytest.mark.parametrize(("text", "arguments", "content"), BROKEN_BARE)
def test_broken_bare_call_keeps_its_arguments_and_rest_is_content(text: str, arguments: str, content: str) -> None:
    for pieces in (["<|tool_call>call:f" + text], list("<|tool_call>call:f" + text)):
        found = parse(GEMMA, pieces)
        assert (found.calls, found.content) == ([("f", arguments)], content)


def as_template(value: Any) -> str:
    """Write a value as Gemma 4's chat template does."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_template(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_template, value)) + "]"
    return json.dumps(value)


def test_calls_after_a_broken_call_are_found() -> None:
    found = parse(HERMES, [f'<tool_call>{{"name": "f", "arguments": {{x <tool_call>{G}</tool_call>'])
    assert (found.calls, found.content) == ([("f", "{x "), ("g", "{}")], "")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@given(
    st.dictionaries(st.text(max_size=4), JSON, max_size=4),
    st.text(min_size=1, max_size=4),
    st.permutations(range(3)),
    st.booleans(),
    st.sampled_from([None, 0, 2]),
)
def test_any_call_has_the_name_and_arguments_that_json_finds(
    arguments: dict[str, Any], name: str, order: list[int], ascii_only: bool, indent: int | None
) -> None:
    items = [("name", name), ("arguments", arguments), ("id", {"arguments": {}, "name": "no"})]
    text = json.dumps(dict(items[index] for index in order), ensure_ascii=ascii_only, indent=indent)
    for format in (HERMES, GENERIC):
        for pieces in ([format.opening + text], list(text) if format is GENERIC else [format.opening, *text]):
            ((found, written),) = parse(format, pieces).calls
            assert (found, json.loads(written)) == (name, arguments)


KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
BARE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, BARE, max_size=4), KEYS)
def test_arguments_written_as_gemma_writes_them_are_read_as_json(arguments: dict[str, Any], name: str) -> None:
    text = f"{GEMMA.opening}call:{name}{as_template(arguments)}{GEMMA.closing}"
    for pieces in ([text], list(text)):
        found = parse(GEMMA, pieces)
        ((called, written),) = found.calls
        assert (called, json.loads(written), found.content) == (name, arguments, "")


def test_bare_strings_are_streamed() -> None:
    parser = ToolCallParser(GEMMA, make_id=lambda: "id")
    assert parser.feed('<|tool_call>call:f{a:<|"|>x<|') == [
        ToolCallStart(0, "id", "f"), ToolArgumentsDelta(0, '{"a": "x'),
    ]  # fmt: skip
    assert parser.feed('y<|"|>') == [ToolArgumentsDelta(0, '<|y"')]
    assert parser.feed("}<tool_call|>") == [ToolArgumentsDelta(0, "}")]
    assert parser.finish() == []


def test_calls_of_unknown_tools_are_content() -> None:
    text = f"<tool_call>{F}</tool_call><tool_call>{G}</tool_call>"
    found = parse(HERMES, [text], tool_names={"g"})
    assert found.calls == [("g", "{}")]
    assert found.content == f"<tool_call>{F}</tool_call>"
    assert parse(GENERIC, ['{"name": "f"}'], tool_names=["f"]).calls == [("f", "{}")]


def test_arguments_are_streamed_piece_by_piece_and_content_is_not_delayed() -> None:
    parser = ToolCallParser(HERMES, make_id=lambda: "id")
    start = ToolCallStart(0, "id", "f")
    steps: list[tuple[str, list[ToolEvent]]] = [
        ("Hel", [ContentDelta("Hel", 0)]),
        ("lo <", [ContentDelta("lo", 3)]),
        ("b> <tool_call>", [ContentDelta(" <b>", 5)]),
        ('{"name": "f", "arguments": ', []),
        ('{"a', [start, ToolArgumentsDelta(0, '{"a')]),
        ('": {"b": "x', [ToolArgumentsDelta(0, '": {"b": "x')]),
        ('}"}', [ToolArgumentsDelta(0, '}"}')]),
        ("}} </tool", [ToolArgumentsDelta(0, "}")]),
        ("_call>\n", []),
    ]
    for piece, events in steps:
        assert parser.feed(piece) == events, piece
    assert parser.finish() == []


def test_mistral_ids_have_nine_characters() -> None:
    (start, _) = ToolCallParser(MISTRAL).feed(f"[TOOL_CALLS][{G}")
    assert isinstance(start, ToolCallStart)
    assert len(start.id) == 9


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<tool_", "<", "[TOOL_CALLS]", "[TOOL", "<|python_tag|>", "```json", "```", "`",
        F, G, '{"name": "f"', ', "arguments": ', '{"a": 1}', '"', "{", "}", "[", "]", ",", ";", " ", "\n", "x", "\\",
        '{"name": "f", "arguments": {"a": ', "1", "tru", "e", "é", '\\u00e9"', '{"arguments": {}, ', '"name": "f"}',
        '"{\\"a\\": 1}"', "<|tool_call>", "<tool_call|>", "call:f{", "a:", '<|"|>', "<|", "null",
        D_BEGIN, D_CALL, D_KIND, D_SEP, D_CALL_END, D_END, "<｜tool", "f\n", "<|assistant|>",
        "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    ]
)  # fmt: skip
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@settings(max_examples=120)
@given(st.sampled_from(sorted(FORMATS)), TEXTS, st.lists(st.integers(0, 10**6), max_size=8), st.booleans())
def test_any_cut_gives_the_same_result(format: str, text: str, places: list[int], knows_names: bool) -> None:
    options: dict[str, Any] = {"tool_names": ["f"]} if knows_names else {}
    results = [parse(FORMATS[format], pieces, **options) for pieces in ([text], cut(text, places), list(text))]
    for result in results:
        result.num_events = 0
    assert results[0] == results[1] == results[2]


SIZE = 1 << 17
LONG: dict[str, str] = {
    "blanks": " " * SIZE,
    "beginnings of markers": "<tool_cal" * (SIZE // 9),
    "markers": "<tool_call>" * (SIZE // 11),
    "markers and blanks": "<tool_call> " * (SIZE // 12),
    "objects cut off": '<tool_call>{"name": "f", ' * (SIZE // 25),
    "open braces": '<tool_call>{"name": "f", "arguments": ' + '{"a":' * (SIZE // 5),
    "brackets": "[" * SIZE,
    "a long string": '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * SIZE,
    "backslashes": '<tool_call>{"name": "f", "arguments": {"a": "' + "\\\\" * (SIZE // 2),
    "a long name": '<tool_call>{"name": "' + "x" * SIZE,
    "a long number": '<tool_call>{"x": ' + "1" * SIZE,
    "many keys": '<tool_call>{"x": 1' + ', "y": 2' * (SIZE // 8),
    "escaped arguments": '<tool_call>{"arguments": "' + '\\"' * (SIZE // 2) + '", "name": "f"}',
    "closings": f"<tool_call>{G}" + "</tool_call>" * (SIZE // 12),
    "closings cut off": f"<tool_call>{G}" + "</tool_cal" * (SIZE // 10),
    "calls": f"<tool_call>{G}</tool_call>" * (SIZE // 60),
    "list": "[TOOL_CALLS][" + f"{G}," * (SIZE // 40),
    "separators": G + ";" * SIZE,
    "backticks": "`" * SIZE,
    "bare strings": '<|tool_call>call:f{a:<|"|>' + "<|" * (SIZE // 2),
    "bare objects": "<|tool_call>call:f{a:" + "{a:" * (SIZE // 3),
    "bare calls": "<|tool_call>call:f{a:1}<tool_call|>" * (SIZE // 35),
    "deepseek, markers of all": f"{D_BEGIN} " * (SIZE // 20),
    "deepseek, calls": f"{D_BEGIN}{D_KIND}f\n{{}}{D_CALL_END}{D_END}" * (SIZE // 90),
    "deepseek, open calls": f"{D_KIND}f" * (SIZE // 40),
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize(("size", "piece_len"), [(SIZE, SIZE), (SIZE // 8, 7)])
def test_long_hostile_text_is_read_in_linear_time(name: str, size: int, piece_len: int) -> None:
    """Quadratic time would be hours."""
    text = LONG[name][:size]
    format = (
        GEMMA
        if "bare" in name
        else DEEPSEEK
        if "deepseek" in name
        else MISTRAL
        if name == "list"
        else GENERIC
        if name in ("brackets", "separators", "backticks")
        else HERMES
    )
    found = parse(format, [text[start : start + piece_len] for start in range(0, len(text), piece_len)])
    assert found.calls or found.content == text
