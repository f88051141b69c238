"""A value without quotes has the type that the tool's schema says."""

from typing import Any

import pytest

from quire.text.tool_calls.schemas import ToolSchemas

TEXT, NULL = {"type": "string"}, {"type": "null"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "zip": {"anyOf": [TEXT, NULL]},
        "listed": {"type": ["string", "null"]},
        "nullable": {"type": "string", "nullable": True},
        "unit": {"enum": ["1", "2", "auto"]},
        "level": {"enum": [1, 2, "auto"]},
        "constant": {"const": "7"},
        "code": TEXT,
        "days": {"type": "integer"},
        "ratio": {"type": "number"},
        "on": {"type": "boolean"},
        "tags": {"type": "array", "items": TEXT},
        "filter": {"type": "object"},
        "either": {"oneOf": [{"type": "integer"}, TEXT]},
        "all": {"allOf": [{"$ref": "#/$defs/name"}, {"minLength": 1}]},
        "name": {"$ref": "#/$defs/name"},
        "alias": {"$ref": "#/$defs/alias"},
        "loop": {"$ref": "#/$defs/loop"},
        "lost": {"$ref": "#/$defs/missing"},
        "any": {},
        "true": True,
    },
    "$defs": {"name": TEXT, "alias": {"$ref": "#/$defs/name"}, "loop": {"$ref": "#/$defs/loop"}},
}
SCHEMAS = ToolSchemas([{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}])


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("zip", "90210", "90210"), ("zip", "null", None), ("zip", "true", "true"), ("zip", '{"a": 1}', '{"a": 1}'),
        ("listed", "90210", "90210"), ("listed", "null", None), ("listed", "None", None),
        ("nullable", "90210", "90210"), ("nullable", "null", None),
        ("unit", "1", "1"), ("unit", "auto", "auto"), ("level", "1", 1), ("level", "auto", "auto"), ("level", "9", 9),
        ("constant", "7", "7"), ("code", "7", "7"), ("code", "null", "null"), ("code", '"x"', '"x"'),
        ("code", " a\n", " a\n"), ("code", "True", "True"), ("days", "3", 3), ("days", " 3\n", 3),
        ("days", "three", "three"), ("days", "3.0", 3.0), ("days", "3.5", 3.5), ("ratio", "3", 3),
        ("ratio", "2.5", 2.5),
        ("on", "true", True), ("on", "False", False), ("on", "1", 1), ("tags", '["a", "b"]', ["a", "b"]),
        ("tags", "['a', 'b',]", ["a", "b"]), ("tags", "a", "a"), ("filter", "{'a': True}", {"a": True}),
        ("filter", "{", "{"), ("either", "3", 3), ("either", "x", "x"), ("all", "5", "5"), ("name", "5", "5"),
        ("alias", "5", "5"), ("loop", "5", 5), ("lost", "5", 5), ("any", "5", 5), ("any", "x y", "x y"),
        ("any", '"x"', "x"), ("any", "None", None), ("true", "[1]", [1]), ("unknown", "5", 5), ("unknown", "x", "x"),
    ],
)  # fmt: skip
def test_value_follows_the_whole_schema(key: str, text: str, value: Any) -> None:
    found = SCHEMAS.value("f", key, text)
    assert found == value
    assert type(found) is type(value)


def test_parameters_may_be_declared_elsewhere_in_the_schema() -> None:
    def value(parameters: Any) -> Any:
        return ToolSchemas([{"function": {"name": "f", "parameters": parameters}}]).value("f", "a", "5")

    properties = {"properties": {"a": TEXT}}
    assert value({"additionalProperties": TEXT}) == "5"
    assert value({"allOf": [{}, properties]}) == "5"
    assert value({"$ref": "#/$defs/p", "$defs": {"p": properties}}) == "5"
    assert value(None) == value({}) == value({"properties": []}) == value({"additionalProperties": False}) == 5
    for odd in ({"allOf": 3}, [], {"properties": {"a": {"type": [["x"]], "enum": 3, "anyOf": [3], "$ref": "x"}}}):
        assert value(odd) == 5


def test_name_of_a_tool_may_have_a_namespace() -> None:
    assert SCHEMAS.known("f") == SCHEMAS.known("functions.f") == SCHEMAS.known("default_api.f") == "f"
    assert [SCHEMAS.known(name) for name in ("", "g", None, 3, "a.f", "\ud800")] == [None] * 6
    assert ToolSchemas(None).known("functions.x") == "functions.x"
    assert ToolSchemas().known("f") is None
    assert [SCHEMAS.may_begin(name) for name in ("", "f", "func", "functions.", "functions.f", "g", "functions.g")] == [
        True, True, True, True, True, False, False,
    ]  # fmt: skip
