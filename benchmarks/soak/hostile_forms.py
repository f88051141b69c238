"""Structured outputs that cost a compiler hours, the stack or all memory, for `hogs.py` and the tests of `grammar/`."""

from collections.abc import Callable
from typing import Any

from quire.structured_outputs import StructuredOutputsParams

Spec = StructuredOutputsParams
ENDLESS = Spec(grammar="start: A\nA: " + " & ".join(f"/.*a.{{{i}}}/" for i in range(30)))
"""A product of automata that no limit of the library stops."""


def lark(*lines: str) -> dict[str, str]:
    return {"grammar": "\n".join(lines)}


def fan(depth: int, width: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {f"p{j}": {"$ref": f"#/$defs/d{i + 1}"} for j in range(width)}}
        for i in range(depth)
    }
    definitions[f"d{depth}"] = {"type": "string"}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def repeated(keyword: str, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
    for _ in range(depth):
        schema = {keyword: [schema, schema]}
    return schema


SCHEMAS: dict[str, dict[str, Any]] = {
    "enum of 5,000": {"enum": [f"value{i}" for i in range(5000)]},
    "enum of 10,000 numbers": {"enum": list(range(10_000))},
    "maxLength": {"type": "string", "maxLength": 10**6},
    "minLength": {"type": "string", "minLength": 10**9},
    "minItems": {"type": "array", "items": {"type": "string"}, "minItems": 10**6},
    "maxItems": {"type": "array", "items": {"type": "string"}, "maxItems": 10**6},
    "nested arrays": {"type": "array", "maxItems": 1000, "items": {"type": "array", "maxItems": 1000}},
    "reference to itself": {"$ref": "#"},
    "references in a ring": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "reference to itself below": {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "properties without names": {"type": "object", "minProperties": 3},
    "tree": {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}},
    "fan": fan(20, 20),
    "product of anyOf": {
        "allOf": [{"anyOf": [{"properties": {f"{c}{i}": {}}} for c in "ab"]} for i in range(20)],
    },
    "300 alternatives": {"oneOf": [{"properties": {f"a{i}": {"const": i}}} for i in range(300)]},
    "product of patterns": {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(30)]},
    "catastrophic pattern": {"type": "string", "pattern": "^(a+)+$"},
    "multipleOf": {"type": "integer", "multipleOf": 999999937},
    "small multipleOf": {"type": "number", "multipleOf": 1e-7, "minimum": 0},
    "range of integers": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "range of numbers": {"type": "number", "minimum": 1.2345678901234567e-300, "maximum": 1e300},
    "unknown type": {"type": "nonsense"},
    "1,500 properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}},
    "pattern properties": {"type": "object", "patternProperties": {f"^a{i}.*b": {} for i in range(300)}},
    "dynamic reference": {"$dynamicRef": "#x"},
    "reference to a server": {"$ref": "https://example.com/x"},
    "reference to a file": {"$ref": "file:///etc/passwd"},
    "reference to nothing": {"$ref": "#/$defs/x"},
    "unknown format": {"type": "string", "format": "unknown"},
    "not": {"not": {}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "if": {"if": {"type": "string"}, "then": {}},
    "long constant": {"const": "x" * 60_000},
    "anyOf of anyOf": repeated("anyOf", 10),
    "allOf of allOf": repeated("allOf", 10),
    "properties of a wrong type": {"type": "object", "properties": [1]},
    "numbers as keywords": {"type": 3, "required": "x", "enum": {}},
    "options of the library": {"x-guidance": {"whitespace_pattern": "(a*)*", "unknown": 1}},
}
REGEXES: dict[str, str] = {
    "repeated": "a{1,1000000}",
    "repeated repeatedly": "(((a{1,1000}){1,1000}){1,1000}){1,1000}",
    "too many": "a{1,99999999999}",
    "nested plus": "(a+)+b",
    "same twice": "(a|a)*b",
    "many stars": "(.*a){25}",
    "distance": "(.*a.{50}){20}",
    "long distance": ".*a.{200}b.{200}",
    "10,000 parentheses": "(" * 10_000 + "a" + ")" * 10_000,
    "240 parentheses": "(" * 240 + "a" + ")" * 240,
    "classes": "|".join(f"[{chr(97 + i % 26)}-z]{{{i},{i + 50}}}" for i in range(500)),
    "5,000 words": "|".join(f"word{i}x" for i in range(5000)),
    "Unicode": r"\p{L}{1,100}\p{N}{1,100}",
    "word characters": r"(\w\W){2000}",
    "look-around": "(?=a)b",
    "back-reference": r"(a)\1",
    "unclosed": "(a",
    "NUL": "a\0b",
    "nothing": r"[^\s\S]",
    "flags": "(?i)" + "abc" * 500,
    "slashes": "a/b\\/c",
}
GRAMMARS: dict[str, dict[str, str]] = {
    "10,000 parentheses": lark("start: " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "10,000 question marks": lark('start: "a"' + "?" * 10_000),
    "10,000 brackets": lark("start: " + "[" * 10_000 + '"a"' + "]" * 10_000),
    "10,000 tildes": lark("start: A", "A: " + "~" * 10_000 + "/a/"),
    "ambiguous": lark("start: e", 'e: e e | e e e | "a"'),
    "left recursion": lark("start: start start | "),
    "repeated": lark("start: ((x{1,1000}){1,1000}){1,1000}", 'x: "a" | "b"'),
    "doubled 3,000 times": lark("start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(3000)), 'r3000: "a"'),
    "chain of 3,000 rules": lark("start: r0", *(f"r{i}: r{i + 1}" for i in range(3000)), 'r3000: "a"'),
    "chain of 3,000 terminals": lark("start: T0", *(f"T{i}: T{i + 1}" for i in range(3000)), 'T3000: "a"'),
    "doubled terminals": lark("start: T0", *(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)), 'T40: "a"'),
    "terminal of itself": lark("start: A", "A: A"),
    "unknown name": lark("start: nope"),
    "import of a file": lark("%import ../../etc/passwd", "start: INT"),
    "deep JSON": lark("start: %json " + '{"a":' * 5000 + "1" + "}" * 5000),
    "unknown grammar": lark("start: @x"),
    "substrings": lark('start: %regex {"substring_chars": "' + "ab" * 20_000 + '"}'),
    "garbage": lark("\x00\x01\ufffd{{{"),
    "GBNF of 10,000 parentheses": lark("root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "GBNF of 8,000 rules": lark("root ::= a", *(f"a{i} ::= [a-z]" for i in range(4000))),
    "GBNF with an open string": lark('root ::= "a' + "\\" * 9999),
}
HOSTILE: dict[str, Callable[[], StructuredOutputsParams]] = {
    **{f"schema: {name}": lambda value=value: Spec(json=value) for name, value in SCHEMAS.items()},
    **{f"regex: {name}": lambda value=value: Spec(regex=value) for name, value in REGEXES.items()},
    **{f"grammar: {name}": lambda value=value: Spec(**value) for name, value in GRAMMARS.items()},
}
