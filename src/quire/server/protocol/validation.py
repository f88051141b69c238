"""From JSON to a checked request, and from what pydantic finds wrong to one sentence about one field.

Next to read: `fields.py`.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from quire.errors import nearest
from quire.server.errors import ApiError, shown
from quire.server.protocol.base import Body, FieldError
from quire.server.protocol.fields import OTHER_NAMES, UNSUPPORTED, UNSUPPORTED_FALSE, WITHOUT_EFFECT, known_names
from quire.server.protocol.json_text import JsonTextError, parse_json

MAX_NAME_CHARACTERS = 100
_B = TypeVar("_B", bound=Body)

MESSAGES = {
    "missing": "is required",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "finite_number": "must be a finite number",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "list_type": "must be a list",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "literal_error": "must be {expected}",
    "none_required": "must be null",
}
"""What a field must be, by pydantic's type of the error; others have pydantic's own sentence."""


def parse_body(kind: type[_B], data: bytes) -> _B:
    """The request that a body writes. Raises: ApiError 400."""
    try:
        value = parse_json(data)
    except JsonTextError as error:
        raise ApiError(400, str(error), code="invalid_json") from None
    return validate(kind, value)


def validate(kind: type[_B], value: Any) -> _B:
    """A checked request. Raises: ApiError 400 for the first thing that is wrong."""
    if isinstance(value, dict):
        value = {name: item for name, item in value.items() if not _asks_for_nothing(kind, name, item)}
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _answer(error, kind) from None


def _asks_for_nothing(kind: type[Body], name: str, value: Any) -> bool:
    """Whether a request may have this field though it is unsupported, or another request's: some clients send every
    field they know, those without a value as null."""
    if name in kind.model_fields:
        return False
    if value is None:
        return name in UNSUPPORTED or name in known_names()
    neutral = WITHOUT_EFFECT.get(name)
    # `True == 1`.
    return type(value) is type(neutral) and value == neutral


def _answer(error: ValidationError, kind: type[Body]) -> ApiError:
    first = error.errors(include_url=False)[0]
    path = [str(part)[:MAX_NAME_CHARACTERS] for part in first["loc"] if not _is_tag(part)]
    param = ".".join(path)[:200] or None
    name = path[-1] if path else ""
    if first["type"] == "extra_forbidden":
        if len(path) == 1 and name in UNSUPPORTED:
            return ApiError(400, f"{name} is not supported: {UNSUPPORTED[name]}", code="unsupported_parameter",
                            param=param)  # fmt: skip
        hint = _field_hint(name, kind if len(path) == 1 else None)
        return ApiError(400, f"unknown field {json.dumps(name)}{hint}", code="unknown_parameter", param=param)
    if name in UNSUPPORTED_FALSE and first.get("input") is False:
        return ApiError(400, f"{name}: false is not supported: {UNSUPPORTED_FALSE[name]}", code="unsupported_parameter",
                        param=param)  # fmt: skip
    if first["type"] == "value_error":
        cause = first["ctx"]["error"]
        param = ".".join([*path, cause.param]) if isinstance(cause, FieldError) else param
        return ApiError(400, str(cause), code="invalid_parameter", param=param)
    given = first.get("input")
    if name == "type" and first["type"] == "literal_error" and "content" in path:
        where = ".".join(path[:-1])
        message = f"{where} is of type {shown(given)}: this server reads text only, so remove it or describe it in text"
        return ApiError(400, message, code="unsupported_content", param=param)
    sentence = _sentence(first["type"], first.get("ctx") or {}, first["msg"])
    got = "" if first["type"] == "missing" else f", got {shown(given)}"
    return ApiError(400, f"{param or 'the body'} {sentence}{got}", code="invalid_parameter", param=param)


def _sentence(kind: str, context: Mapping[str, Any], message: str) -> str:
    template = MESSAGES.get(kind)
    if template is None:
        return f"is wrong: {message[:1].lower()}{message[1:200]}"
    expected = str(context.get("expected", "")).replace("'", '"')
    several = " or " in expected
    expected = f"one of {expected}" if several else {"False": "false", "True": "true"}.get(expected, expected)
    numbers = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in context.items()
    }
    sentence = template.format(**{**numbers, "expected": expected})
    return re.sub(r"\b1 (character|item)s$", r"1 \1", sentence)


def _field_hint(name: str, kind: type[Body] | None) -> str:
    """What a client may have meant. `kind`: the whole request, if the field stands at its top level."""
    if kind is None:
        return nearest(name, known_names() - {name})
    fields = {field.alias or own for own, field in kind.model_fields.items()}
    for other in OTHER_NAMES.get(name, ()):
        if other.partition(".")[0] in fields:
            return f": use {other}"
    return nearest(name, fields)


def _is_tag(part: int | str) -> bool:
    """Whether a part of pydantic's path names a member of a union, or an object's key, rather than a field."""
    return isinstance(part, str) and (part.startswith("<") or part == "[key]")
