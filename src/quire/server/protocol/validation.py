"""From the bytes of a body to a checked request, and from pydantic's errors to one sentence about one field.

JSON is parsed strictly. Refused beyond what JSON itself forbids: nesting above `MAX_DEPTH`, more than `MAX_PARTS`
lists, objects and their keys, `MAX_KEYS` of one object, duplicate keys (parsers disagree on which one counts), NaN and
infinities; and outside of what the model reads (`PROMPT_FIELDS`) integers of
more than 64 bits, lone surrogates and NUL characters. Next to read: `fields.py`.
"""

import functools
import json
import re
from collections import Counter
from typing import Any, NoReturn, TypeVar, get_args

from pydantic import AliasChoices, ValidationError

from quire.errors import nearest
from quire.garbage import collections_paused
from quire.server.errors import ApiError, shown
from quire.server.protocol.fields import OTHER_NAMES, UNSUPPORTED, WITHOUT_EFFECT, Body, FieldError
from quire.text.chat_template import unicode_text

MAX_NAME_CHARACTERS = 100
TOOL_FIELDS = ("tools", "tool_choice")
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
    # A collection looks through all lists of a large body, in up to 1.6 s that no other thread can interrupt.
    with collections_paused():
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
    found = error.errors(include_url=False)
    # An object of another `type` also lacks fields.
    first = next((item for item in found if item["type"] == "literal_error" and item["loc"][-1] == "type"), found[0])
    path = [str(part)[:MAX_NAME_CHARACTERS] for part in first["loc"] if not _is_tag(part)]
    param = ".".join(path)[:200] or None
    name, given = path[-1] if path else "", first.get("input")
    message, code = "", "invalid_parameter"
    if first["type"] == "extra_forbidden":
        if len(path) == 1 and name in UNSUPPORTED:
            message, code = f"{name} is not supported: {UNSUPPORTED[name]}", "unsupported_parameter"
        else:
            hint = _field_hint(name, path[:-1], kind)
            message, code = f"unknown field {json.dumps(name)}{hint}", "unknown_parameter"
    elif first["type"] == "value_error":
        cause = first["ctx"]["error"]
        message = f"{param} {cause}, got {shown(given)}"
        if isinstance(cause, FieldError):
            param, message, code = ".".join([*path, cause.param]), str(cause), cause.code
    elif name == "type" and first["type"] == "literal_error" and "content" in path:
        where, code = ".".join(path[:-1]), "unsupported_content"
        message = f"{where} is of type {shown(given)}: this server reads text only, so remove it or describe it in text"
    elif name == "type" and first["type"] == "literal_error" and path[0] in TOOL_FIELDS and isinstance(given, str):
        where, code = ".".join(path[:-1]), "unsupported_parameter"
        message = f"{where} is of type {shown(given)}, which is not supported: the only tools are functions"
    else:
        sentence = first["msg"][:200]
        for pattern, words in _WORDING:
            sentence = pattern.sub(words, sentence)
        got = _other_names(name, kind) if first["type"] == "missing" else f", got {shown(given)}"
        message = f"{param or 'the body'} {sentence}{got}"
    return ApiError(400, message, code=code, param=param)


def _other_names(name: str, kind: type[Body]) -> str:
    """Return the other names that a request may give a field, for a message."""
    field = kind.model_fields.get(name)
    choices = field.validation_alias.choices if field and isinstance(field.validation_alias, AliasChoices) else ()
    others = [str(choice) for choice in choices if choice != name]
    return f", which may also be named {', '.join(others)}" if others else ""


def _field_hint(name: str, path: list[str], kind: type[Body]) -> str:
    """Return the nearest field of the object at `path` in a request, for a message."""
    kinds = {kind}
    for part in path:
        if not part.isdigit():
            kinds = {
                inner
                for outer in kinds
                for own, field in outer.model_fields.items()
                if (field.alias or own) == part
                for inner in _bodies(field.annotation)
            }
    fields = {field.alias or own for each in kinds for own, field in each.model_fields.items()}
    for other in () if path else OTHER_NAMES.get(name, ()):
        if other.partition(".")[0] in fields:
            return f": use {other}"
    return nearest(name, fields)


def _bodies(annotation: Any) -> set[type[Body]]:
    """Return the objects of requests in a type, such as those of a list or a union."""
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return {annotation}
    return {found for inner in get_args(annotation) for found in _bodies(inner)}


def _is_tag(part: int | str) -> bool:
    """Return whether a part of pydantic's path is a union member's tag or an object's key, not a field."""
    return isinstance(part, str) and (part.startswith("<") or part == "[key]")


# --- JSON ------------------------------------------------------------------------------------


MAX_DEPTH = 64
MAX_PARTS = 1 << 16
"""Python reads them in 60 ms at most, in which it holds its lock and no other stream gets its tokens."""
MAX_KEYS = 1 << 13
"""Each unknown one is an error of its own for pydantic: 300,000 take 2 s."""
SLICE_BYTES = 256 << 10
INTEGER_BITS = 64
MAX_DIGITS = 4300
"""As many as Python reads."""
MAX_EXACT = 2.0**53
"""Above this, floating-point numbers skip integers."""
PROMPT_FIELDS = frozenset(
    ("data_1", "data_2", "documents", "input", "input_extra", "input_prefix", "input_suffix", "instructions", "items",
     "messages", "prompt", "queries", "query", "suffix", "system", "text_1", "text_2", "tools")
)  # fmt: skip
"""Fields whose text the model reads. It may be output of programs: NUL characters and halves of surrogate pairs are
replaced there, and a call that a model wrote may have any integer, because an agent cannot take back what it has read.
"""


class JsonTextError(ValueError):
    """Text that is not JSON, or JSON that is refused."""


def _too_deep() -> JsonTextError:
    return JsonTextError(f"the body is nested more than {MAX_DEPTH} deep")


def parse_json(data: bytes) -> Any:
    """Return the value that `data` encodes. Raises: JsonTextError."""
    if not data.strip():
        raise JsonTextError("the body is empty: send a JSON object")
    try:
        _check_parts(data)
        text = data.decode()
        large: list[int] = []
        value = json.loads(
            text,
            parse_constant=_constant,
            parse_float=_number,
            parse_int=functools.partial(_integer, large),
            object_pairs_hook=_object,
        )
    except UnicodeDecodeError as error:
        raise JsonTextError(f"the body is not UTF-8: byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise JsonTextError(
            f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise _too_deep() from None
    # Only an escape can encode a surrogate or a NUL: the parser refuses raw control characters, UTF-8 lone surrogates.
    if large or "\\u" in text or text.count("[") + text.count("{") > MAX_DEPTH:
        value = _checked(value, 0, is_read=False)
    return value


def _check_parts(data: bytes) -> None:
    """Raises: JsonTextError for more lists, objects and keys than `MAX_PARTS`."""
    if _num_parts(data) <= MAX_PARTS:
        return  # even if these characters were none in texts
    num_parts, is_text = 0, 0
    data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    for start in range(0, len(data), SLICE_BYTES):
        pieces = data[start : start + SLICE_BYTES].split(b'"')
        num_parts += _num_parts(b"".join(pieces[is_text::2]))
        is_text ^= (len(pieces) - 1) % 2
        if num_parts > MAX_PARTS:
            raise JsonTextError(f"the body has more than {MAX_PARTS} lists, objects and keys")


def _num_parts(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{") + data.count(b":")


def _constant(name: str) -> NoReturn:
    raise JsonTextError(f"the body is not valid JSON: {name} is not a number of JSON")


def _number(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise JsonTextError(f"the number {digits[:40]} is too large")
    # Some languages write every number with a point; JSON Schema calls 8.0 an integer, and so does openapi.json.
    return int(value) if value.is_integer() and abs(value) <= MAX_EXACT else value


def _integer(large: list[int], digits: str) -> int:
    """Return an integer. Mutates: `large` gets it if it has more than 64 bits. Raises: JsonTextError."""
    if len(digits) > MAX_DIGITS:
        raise JsonTextError(f"the integer {digits[:40]} has more than {MAX_DIGITS} digits")
    value = int(digits)
    if value.bit_length() > INTEGER_BITS:
        large.append(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise JsonTextError(f"an object of the body has more than {MAX_KEYS} keys")
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise JsonTextError(f"an object of the body has a key more than once, such as {json.dumps(twice[:100])}")
    return found


def _checked(value: Any, depth: int, *, is_read: bool) -> Any:
    """Return the value; `is_read`: the model reads it, so that its texts are mended.

    Raises: JsonTextError for text that is not Unicode, for large integers, and for nesting that is too deep.
    """
    if isinstance(value, str):
        return unicode_text(value) if is_read else _unicode(value)
    if isinstance(value, dict | list) and depth == MAX_DEPTH:
        raise _too_deep()
    if isinstance(value, list):
        return [_checked(item, depth + 1, is_read=is_read) for item in value]
    if isinstance(value, dict):
        return {
            _unicode(name): _checked(item, depth + 1, is_read=is_read or (not depth and name in PROMPT_FIELDS))
            for name, item in value.items()
        }
    if isinstance(value, int) and value.bit_length() > INTEGER_BITS and not is_read:
        raise JsonTextError(f"the integer {str(value)[:40]} has more than {INTEGER_BITS} bits")
    return value


def _unicode(text: str) -> str:
    """Raises: JsonTextError for text that is not Unicode, and for NUL."""
    mended = unicode_text(text)
    if mended == text:
        return text
    code = ord(next(old for old, new in zip(text, mended, strict=True) if old != new))
    kind = "half of a surrogate pair" if code else "the NUL character"
    raise JsonTextError(f"a text of the body has \\u{code:04x}, {kind}: remove it")


@functools.cache
def known_names() -> frozenset[str]:
    """Return the names of all fields of all requests."""
    found: set[str] = set()
    waiting = list(Body.__subclasses__())
    while waiting:
        kind = waiting.pop()
        found |= {field.alias or name for name, field in kind.model_fields.items()}
        waiting += kind.__subclasses__()
    return frozenset(found)
