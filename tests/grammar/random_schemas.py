"""Random JSON Schemas, random texts that follow them, and an oracle: jsonschema.

The promise that is tested: a text of single bytes, each drawn among the allowed ones, ends if those that end something
(quotes, brackets, the end token) are preferred, and follows its schema. Whitespace is never without end, whatever is
preferred.
"""

import decimal
import json
import re
from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

import jsonschema
import llguidance
from jsonschema import Draft202012Validator
from jsonschema.validators import extend
from llguidance import LLMatcher

from quire.grammar.check_child import ByteTokens, check
from quire.grammar.check_process import JSON_ESCAPES, WHITESPACE

EOS = 256
MAX_BYTES = 20_000
TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTokens()), eos_token=[EOS])
OPTIONS = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": JSON_ESCAPES}


def bits(tokens: Iterable[int]) -> int:
    """Return a set of tokens as a mask."""
    return sum(1 << token for token in set(tokens))


def members(mask: int) -> list[int]:
    """Return the tokens of a mask, ascending."""
    found = []
    while mask:
        found.append((mask & -mask).bit_length() - 1)
        mask &= mask - 1
    return found


CLOSING = bits([*b'"]}', EOS])
WHITE = bits(b" \n\t\r")
WORST = WHITE | bits(b'\\[{",.-+eE0123456789')
PATTERNS = (
    "^[a-z]{2,5}$", r"^\d{3}-\d{4}$", r"^\w+$", r"^\S+@\S+$", r"\d", "^(ab|cd)*$", r"^[^\d\s]{1,3}$", r"^[\w.-]+$",
    "[A-F]+", r"^\s?x\s*$", r"^[\s\S]{0,4}$", r"^\.$", r"^\$[0-9]+(\.[0-9]{2})?$", "^.*$", "^é+$", r"\D$", r"^\W",
)  # fmt: skip
FORMATS = (
    "date", "date-time", "time", "duration", "email", "uuid", "uuid4", "ipv4", "ipv6", "uri", "hostname", "base64",
    "json-pointer", "ipvanyaddress", "password", "path", "binary", "no such format",
)  # fmt: skip
NAMES = ("a", "b", "name", "a b", "é", 'q"', "\\", "type", "pattern", "format", "$ref", "required", "x1", "")
VALUES = (0, 1, -1, 2.5, "a", "", "é", None, True, False, [], {}, [1, "x"], {"a": 1}, "\n", '"', 10**12)


def random_schema(random: Random) -> dict[str, Any]:
    """Return a schema, with definitions that it may refer to, also recursively."""
    names = [f"D{index}" for index in range(random.randint(0, 2))]
    schema = _schema(random, 3, names)
    schema = schema if isinstance(schema, dict) else {"not": {}} if schema is False else {}
    if names:
        schema["$defs"] = {name: _ending(_schema(random, 2, names)) for name in names}
    return schema


def _ending(value: Any) -> Any:
    """Return a definition that requires no other one: its texts are short where brackets are closed early."""
    if isinstance(value, list):
        return [_ending(item) for item in value]
    if not isinstance(value, dict):
        return value
    ending = {key: _ending(item) for key, item in value.items() if key != "minItems"}
    properties = ending.get("properties")
    if isinstance(ending.get("required"), list) and isinstance(properties, dict):
        ending["required"] = [name for name in ending["required"] if '"#/$defs' not in json.dumps(properties[name])]
    return ending


def _schema(random: Random, depth: int, names: list[str]) -> Any:
    simple = [_text, _number, _any_value]
    nested = [_object, _object, _array, _map, _any_of, _one_of, _all_of]
    make = random.choice(simple if depth == 0 else simple + nested * 2)
    if names and depth < 3 and random.random() < 0.15:
        return {"$ref": f"#/$defs/{random.choice(names)}"}
    schema = make(random, depth - 1, names)
    if isinstance(schema, dict) and random.random() < 0.2:
        schema |= {"title": "T", "description": "d", "default": 1, "examples": [{"pattern": "("}], "deprecated": True}
    return schema


def _text(random: Random, depth: int, names: list[str]) -> Any:
    schema: dict[str, Any] = {"type": "string"}
    kind = random.randrange(5)
    if kind == 1:
        schema["pattern"] = random.choice(PATTERNS)
    elif kind == 2:
        schema["format"] = random.choice(FORMATS)
    elif kind == 3:
        least = random.randint(0, 3)
        schema |= {"minLength": least, "maxLength": least + random.randint(0, 9)}
    elif kind == 4:
        schema = {"enum": random.sample(VALUES, random.randint(1, 4))}
    return schema


def _number(random: Random, depth: int, names: list[str]) -> Any:
    schema: dict[str, Any] = {"type": random.choice(["integer", "number", ["number", "null"]])}
    least = random.choice([-(2**40), -1000, -3, 0, 0.5, 7])
    most = least + random.choice([1, 4, 99, 2**63 + 2**41])
    if random.random() < 0.5:
        schema[random.choice(["minimum", "exclusiveMinimum"])] = least
    if random.random() < 0.5:
        schema[random.choice(["maximum", "exclusiveMaximum"])] = most + 1
    if random.random() < 0.2:
        schema["multipleOf"] = random.choice([1, 3, 0.5, 0.01, 10])
    return schema


def _any_value(random: Random, depth: int, names: list[str]) -> Any:
    return random.choice([
        {}, True, {"type": "boolean"}, {"type": "null"}, {"const": random.choice(VALUES)},
        {"type": ["string", "integer"]}, {"type": "object"}, {"type": "array"}, {"type": "array", "uniqueItems": False},
    ])  # fmt: skip


def _object(random: Random, depth: int, names: list[str]) -> Any:
    properties = {name: _schema(random, depth, names) for name in random.sample(NAMES, random.randint(1, 4))}
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if random.random() < 0.7:
        schema["required"] = random.sample([*properties], random.randint(0, len(properties)))
    if random.random() < 0.6:
        schema["additionalProperties"] = random.choice([False, True, {"type": "integer"}])
    if random.random() < 0.1:
        schema["patternProperties"] = {random.choice(PATTERNS): {"type": ["integer", "string"]}}
    if random.random() < 0.1:
        schema["minProperties"] = 1
    return schema


def _map(random: Random, depth: int, names: list[str]) -> Any:
    schema: dict[str, Any] = {"type": "object", "additionalProperties": _schema(random, depth, names)}
    keys = [{"enum": ["a", "b"]}, {"format": "date"}, {"minLength": 1, "maxLength": 3}, {"pattern": "^[a-c]{1,2}$"}]
    if random.random() < 0.5:
        schema["propertyNames"] = random.choice(keys)
    elif random.random() < 0.5:
        schema |= {"minProperties": random.randint(0, 1), "maxProperties": random.randint(1, 3)}
    return schema


def _array(random: Random, depth: int, names: list[str]) -> Any:
    schema: dict[str, Any] = {"type": "array"}
    if random.random() < 0.3:
        schema["prefixItems"] = [_schema(random, depth, names) for _ in range(random.randint(1, 2))]
    if random.random() < 0.8:
        schema["items"] = random.choice([_schema(random, depth, names), False])
    if schema.get("items") is not False and random.random() < 0.4:
        least = random.randint(0, 2)
        schema |= {"minItems": least, "maxItems": least + random.randint(0, 3)}
    return schema


def _any_of(random: Random, depth: int, names: list[str]) -> Any:
    return {"anyOf": [_schema(random, depth, names) for _ in range(random.randint(1, 3))]}


def _one_of(random: Random, depth: int, names: list[str]) -> Any:
    if random.random() < 0.3:
        return {"oneOf": [_schema(random, 0, names) for _ in range(2)]}
    members = [_object(random, depth, names) for _ in range(random.randint(1, 3))]
    for index, member in enumerate(members):
        member["properties"]["kind"] = {"const": f"k{index}"}
        if random.random() < 0.5:
            member["required"] = [*member.get("required", []), "kind"]
    return {"oneOf": members, "discriminator": {"propertyName": "kind"}}


def _all_of(random: Random, depth: int, names: list[str]) -> Any:
    make = random.choice([_text, _number, _object])
    return {"allOf": [make(random, depth, names), make(random, depth, names)]}


# --- Texts ------------------------------------------------------------------------------------


def grammar_of(schema: Any) -> dict[str, str]:
    """Return the answer of the process that compiles grammars."""
    return check(TOKENIZER, "json", json.dumps(schema), OPTIONS)


def matches(grammar: str, text: str) -> bool:
    """Return True if a grammar accepts the whole text."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


def accepts(schema: Any, value: Any) -> bool:
    """Return True if a schema accepts the compact text of a value."""
    answer = grammar_of(schema)
    assert "grammar" in answer, answer
    return matches(answer["grammar"], json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def walk(grammar: str, random: Random, *, likes_whitespace: bool = False) -> bytes | None:
    """Return a text of drawn bytes; None if it is as long as `MAX_BYTES` without an end."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    text, is_in_string = bytearray(), False
    while len(text) < MAX_BYTES:
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        assert allowed, (bytes(text), matcher.get_error())
        preferred = 0
        if likes_whitespace and not is_in_string:
            preferred = allowed & WHITE
        if not preferred and random.random() < 0.8:
            preferred = allowed & CLOSING
        if not preferred and random.random() < 0.5:
            preferred = allowed & WORST
        token = random.choice(members(preferred or allowed))
        if token == EOS:
            return bytes(text)
        text.append(token)
        is_in_string ^= token == ord('"') and not is_escaped(text)
        assert matcher.consume_token(token), matcher.get_error()
    return None


def is_escaped(text: bytearray) -> bool:
    """Return True if the last byte of a text within a string comes after a backslash that is not escaped itself."""
    return (len(text) - 1 - len(text[:-1].rstrip(b"\\"))) % 2 == 1


STRING = re.compile(rb'"(?:\\.|[^"\\])*"', re.DOTALL)


def longest_whitespace(text: bytes) -> int:
    """Return the longest run of whitespace outside of strings."""
    return max(map(len, re.findall(rb"[ \n\t\r]+", STRING.sub(b'""', text))), default=0)


def _with_ascii(schema: Any) -> Any:
    """Return a schema of which Python reads the patterns as ECMA-262 does."""
    if isinstance(schema, list):
        return [_with_ascii(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    read = {key: f"(?a){item}" if key == "pattern" and isinstance(item, str) else item for key, item in schema.items()}
    if "patternProperties" in read:
        read["patternProperties"] = {f"(?a){pattern}": item for pattern, item in read["patternProperties"].items()}
    return {key: _with_ascii(item) for key, item in read.items()}


def _multiple_of(validator: Any, divisor: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if type(instance) in (int, float):
        with decimal.localcontext(prec=400):
            if decimal.Decimal(str(instance)) % decimal.Decimal(str(divisor)):
                yield jsonschema.ValidationError(f"{instance} is no multiple of {divisor}")


# Floating point arithmetic would find 0.07 no multiple of 0.01.
_Validator = extend(Draft202012Validator, {"multipleOf": _multiple_of})


def error_of(schema: Any, text: bytes) -> str | None:
    """Return the reason why a text does not follow a schema; None if it does."""
    value = json.loads(text.decode())
    validator = _Validator(_with_ascii(schema), format_checker=Draft202012Validator.FORMAT_CHECKER)
    error = next(validator.iter_errors(value), None)
    return None if error is None else f"{error.message} at {list(error.absolute_path)}"
