"""Tools in the system message, and in the schema that forces a call."""

import json
from typing import Any

import pytest

from quire.errors import InvalidParameterError
from quire.grammar.compiler import GrammarCompiler
from quire.structured_outputs import StructuredOutputsParams
from quire.text.tool_calls.formats import GENERIC
from quire.text.tool_calls.schemas import MAX_PARALLEL_CALLS, tool_choice_schema, tools_system_prompt
from tests.grammar.builders import accepts, make_vocabulary
from tests.text.tool_calls.builders import parse

COMPILER = GrammarCompiler(make_vocabulary)


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {
        "left": {"$ref": "#"},
        "leaf": {"$ref": "#/$defs/leaf"},
        "const": {"$ref": "#/$defs/leaf"},
        "tag": {"const": "#/$defs/leaf"},
    },
    "$defs": {"leaf": {"type": "integer"}},
    "additionalProperties": False,
}
TOOLS = [tool("weather", description="Weather of a city", parameters=CITY), tool("now"), tool("tree", parameters=TREE)]
NOW = '{"name":"now","arguments":{}}'
PARIS = '{"name":"weather","arguments":{"city":"Paris","unit":"C"}}'


def allows(schema: dict[str, Any] | None, text: str) -> bool:
    assert schema is not None
    return accepts(COMPILER.compile(StructuredOutputsParams(json=schema)).start(), text)


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_other_choices_force_no_call(choice: str | None) -> None:
    assert tool_choice_schema(TOOLS, choice) is None
    assert tool_choice_schema([], choice) is None


def test_required_is_a_list_of_calls() -> None:
    schema = tool_choice_schema(TOOLS, "required")
    for text in (f"[{NOW}]", f"[{PARIS},{NOW}]"):
        assert allows(schema, text)
        assert [name for name, _ in parse(GENERIC, [text]).calls] == [call["name"] for call in json.loads(text)]
    for text in ("[]", NOW, '[{"name":"other","arguments":{}}]', '[{"name":"now","arguments":{"a":1}}]'):
        assert not allows(schema, text)
    assert not allows(schema, f"[{','.join([NOW] * (MAX_PARALLEL_CALLS + 1))}]")


def test_required_without_parallel_calls_is_one_call() -> None:
    schema = tool_choice_schema(TOOLS, "required", parallel_tool_calls=False)
    assert allows(schema, PARIS)
    assert allows(schema, NOW)
    assert not allows(schema, f"[{NOW}]")
    assert not allows(schema, '{"name":"weather","arguments":{"unit":"C"}}')


@pytest.mark.parametrize("parallel", [False, True])
def test_named_function_is_one_call_of_it(parallel: bool) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    schema = tool_choice_schema(TOOLS, choice, parallel_tool_calls=parallel)
    assert allows(schema, PARIS)
    assert not allows(schema, NOW)
    assert parse(GENERIC, [PARIS]).calls == [("weather", '{"city": "Paris", "unit": "C"}')]


@pytest.mark.parametrize(
    ("parameters", "accepts_other_keys"),
    [
        ({"type": "object", "properties": {}}, False),
        ({"type": "object"}, False),
        ({"type": "object", "properties": {"b": {}}}, False),
        ({"type": "object", "additionalProperties": True}, True),
        ({"type": "object", "patternProperties": {"^a": {}}}, True),
        ({"anyOf": [{"type": "object", "properties": {"a": {}}}]}, True),
        ({}, False),
        ({"properties": {"b": {"type": "number"}}}, False),
    ],
)
def test_undeclared_keys_are_forbidden_unless_parameters_allow_them(
    parameters: dict[str, Any], accepts_other_keys: bool
) -> None:
    schema = tool_choice_schema([tool("f", parameters=parameters)], "required", parallel_tool_calls=False)
    assert allows(schema, '{"name":"f","arguments":{"a":1}}') is accepts_other_keys
    assert allows(schema, '{"name":"f","arguments":{}}')


@pytest.mark.parametrize(
    ("parameters", "arguments", "is_allowed"),
    [
        ({"properties": {"a": {"items": {"properties": {"b": {}}}}}}, {"a": [{"b": 1}]}, True),
        ({"properties": {"a": {"items": {"properties": {"b": {}}}}}}, {"a": [{"b": 1, "c": 1}]}, False),
        ({"properties": {"map": {"type": "object"}}}, {"map": {"any": 1}}, True),
        ({"type": "object", "minProperties": 1}, {"any": 1}, True),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, {"a": 1, "b": 1}, True),
    ],
)
def test_nested_objects_are_closed_and_maps_and_combined_schemas_are_open(
    parameters: dict[str, Any], arguments: dict[str, Any], is_allowed: bool
) -> None:
    schema = tool_choice_schema([tool("f", parameters=parameters)], "required", parallel_tool_calls=False)
    text = json.dumps({"name": "f", "arguments": arguments}, separators=(",", ":"))
    assert allows(schema, text) is is_allowed


def test_references_within_parameters_are_kept() -> None:
    schema = tool_choice_schema(TOOLS, {"function": {"name": "tree"}})
    for arguments, good in (
        ('{"left":{"left":{"leaf":3}}}', True),
        ('{"const":4,"tag":"#/$defs/leaf"}', True),
        ('{"leaf":"x"}', False),
        ('{"left":{"leaf":"x"}}', False),
    ):
        assert allows(schema, f'{{"name":"tree","arguments":{arguments}}}') == good, arguments


def test_system_prompt_lists_tools_and_format() -> None:
    text = tools_system_prompt(TOOLS)
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"name": "') and "<" not in line]
    assert [line["name"] for line in lines] == ["weather", "now", "tree"]
    assert lines[0]["parameters"] == CITY
    assert "description" not in lines[1]
    example = next(line for line in text.splitlines() if "<function>" in line)
    assert parse(GENERIC, [example]).calls == [("<function>", '{"<argument>": "<value>"}')]


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ("x", "auto", "tools"), ([1], "auto", r"tools\[0\]"), ([{"type": "function"}], None, r"tools\[0\]"),
        ([{"type": "web", "function": {"name": "f"}}], None, r"tools\[0\]"),
        ([tool("")], None, r"tools\[0\].function.name"), ([tool("f"), tool("f")], None, r"tools\[1\].function.name"),
        ([tool("f", parameters=[1])], None, r"tools\[0\].function.parameters"),
        ([], "required", "tool_choice"), ([tool("f")], "any", "tool_choice"), ([tool("f")], 3, "tool_choice"),
        ([tool("f")], {"function": {"name": "g"}}, "tool_choice"), ([tool("f")], {}, "tool_choice"),
        ([], {"function": {"name": "g"}}, "tool_choice"),
    ],
)  # fmt: skip
def test_bad_tools_or_choice_name_the_field(tools: Any, choice: Any, field: str) -> None:
    with pytest.raises(InvalidParameterError, match=field):
        tool_choice_schema(tools, choice)


def test_endless_schema_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(InvalidParameterError, match="levels deep"):
        tool_choice_schema([tool("f", parameters=schema)], "required")
