"""Checks of request bodies: from JSON to a pydantic model, and from pydantic's errors to one sentence about one field.

Next to read: `fields.py`.
"""

import json
import re
from typing import Any, TypeVar

from pydantic import ValidationError

from quire.errors import nearest
from quire.server.errors import ApiError, shown
from quire.server.protocol.base import Body, FieldError
from quire.server.protocol.fields import OTHER_NAMES, UNSUPPORTED, WITHOUT_EFFECT, known_names
from quire.server.protocol.json_text import JsonTextError, parse_json

MAX_NAME_CHARACTERS = 100
_B = TypeVar("_B", bound=Body)
_WORDING = [
    (re.compile(pattern), words)
    for pattern, words in (
        (r"^(?:Input|String|List|Dictionary|Value) should (be|have|match)", r"must \1"),
        (r"^Field required$", "is required"),
        # pydantic also tells the length or the kind of the value, which `shown` does.
        (r" after validation.*|, got a number.*", ""),
        (r"dictionary(?: or instance of \w+)?", "object"),
        (r"a valid string", "text"),
        (r"\bNone$", "null"),
        (r"\bTrue$", "true"),
        (r"\bFalse$", "false"),
    )
]
"""Changes to pydantic's sentences: Python's names become JSON's, and the field's name can stand before them."""


def parse_body(kind: type[_B], data: bytes) -> _B:
    """Return the request in a body. Raises: ApiError 400."""
    try:
        value = parse_json(data)
    except JsonTextError as error:
        raise ApiError(400, str(error), code="invalid_json") from None
    return validate(kind, value)


def validate(kind: type[_B], value: Any) -> _B:
    """Return a checked request. Raises: ApiError 400 for the first field that is wrong."""
    if isinstance(value, dict):
        value = {name: item for name, item in value.items() if not _is_neutral(kind, name, item)}
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _api_error(error, kind) from None


def _is_neutral(kind: type[Body], name: str, value: Any) -> bool:
    """Return whether a field that the request does not have may be ignored: some clients send all fields they know,
    unset ones as null or with their default."""
    if name in kind.model_fields:
        return False
    if value is None:
        return name in UNSUPPORTED or name in known_names()
    neutral = WITHOUT_EFFECT.get(name)
    # `True == 1`.
    return type(value) is type(neutral) and value == neutral


def _api_error(error: ValidationError, kind: type[Body]) -> ApiError:
    first = error.errors(include_url=False)[0]
    path = [str(part)[:MAX_NAME_CHARACTERS] for part in first["loc"] if not _is_tag(part)]
    param = ".".join(path)[:200] or None
    name, given = path[-1] if path else "", first.get("input")
    message, code = "", "invalid_parameter"
    if first["type"] == "extra_forbidden":
        if len(path) == 1 and name in UNSUPPORTED:
            message, code = f"{name} is not supported: {UNSUPPORTED[name]}", "unsupported_parameter"
        else:
            hint = _field_hint(name, kind if len(path) == 1 else None)
            message, code = f"unknown field {json.dumps(name)}{hint}", "unknown_parameter"
    elif first["type"] == "value_error":
        cause = first["ctx"]["error"]
        message = str(cause)
        param = ".".join([*path, cause.param]) if isinstance(cause, FieldError) else param
    elif name == "type" and first["type"] == "literal_error" and "content" in path:
        where, code = ".".join(path[:-1]), "unsupported_content"
        message = f"{where} is of type {shown(given)}: this server reads text only, so remove it or describe it in text"
    else:
        sentence = first["msg"][:200]
        for pattern, words in _WORDING:
            sentence = pattern.sub(words, sentence)
        got = "" if first["type"] == "missing" else f", got {shown(given)}"
        message = f"{param or 'the body'} {sentence}{got}"
    return ApiError(400, message, code=code, param=param)


def _field_hint(name: str, kind: type[Body] | None) -> str:
    """Return the nearest known field, for a message. `kind`: the request, for a field at its top level."""
    if kind is None:
        return nearest(name, known_names() - {name})
    fields = {field.alias or own for own, field in kind.model_fields.items()}
    for other in OTHER_NAMES.get(name, ()):
        if other.partition(".")[0] in fields:
            return f": use {other}"
    return nearest(name, fields)


def _is_tag(part: int | str) -> bool:
    """Return whether a part of pydantic's path is a union member's tag or an object's key, not a field."""
    return isinstance(part, str) and (part.startswith("<") or part == "[key]")
