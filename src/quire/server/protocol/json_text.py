"""Strict JSON parser for request bodies: any text gives a value or a 400.

Refused beyond what JSON itself forbids: nesting above `MAX_DEPTH`, duplicate keys (parsers disagree on which one
counts), NaN and infinities, integers of more than 64 bits, lone surrogates and NUL characters.
Next to read: `validation.py`.
"""

import json
from collections import Counter
from typing import Any, NoReturn

MAX_DEPTH = 64
INTEGER_BITS = 64
MAX_EXACT = 2.0**53
"""Above this, floating-point numbers skip integers."""


class JsonTextError(ValueError):
    """Text that is not JSON, or JSON that is refused."""


def _too_deep() -> JsonTextError:
    return JsonTextError(f"the body is nested more than {MAX_DEPTH} deep")


def parse_json(data: bytes) -> Any:
    """Return the value that `data` encodes. Raises: JsonTextError."""
    if not data.strip():
        raise JsonTextError("the body is empty: send a JSON object")
    try:
        text = data.decode()
        value = json.loads(
            text, parse_constant=_constant, parse_float=_number, parse_int=_integer, object_pairs_hook=_object
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
    if "\\u" in text or text.count("[") + text.count("{") > MAX_DEPTH:
        _check(value)
    return value


def _constant(name: str) -> NoReturn:
    raise JsonTextError(f"the body is not valid JSON: {name} is not a number of JSON")


def _number(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise JsonTextError(f"the number {digits[:40]} is too large")
    # Some languages write every number with a point; JSON Schema calls 8.0 an integer, and so does openapi.json.
    return int(value) if value.is_integer() and abs(value) <= MAX_EXACT else value


def _integer(digits: str) -> int:
    # Python's own limit is 4,300 digits. Integers of up to 64 bits are refused later, with the field's name.
    if len(digits) > 21 or (value := int(digits)).bit_length() > INTEGER_BITS:
        raise JsonTextError(f"the integer {digits[:40]} has more than {INTEGER_BITS} bits")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise JsonTextError(f"an object of the body has a key more than once, such as {json.dumps(twice[:100])}")
    return found


def _check(value: Any) -> None:
    """Raises: JsonTextError for text that is not Unicode, and for nesting that is too deep."""
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, str):
            if "\0" in item:
                raise JsonTextError("a text of the body has a NUL character (\\u0000): remove it")
            try:
                item.encode()
            except UnicodeEncodeError as error:
                code = f"\\u{ord(item[error.start]):04x}"
                raise JsonTextError(f"a text of the body has {code}, half of a surrogate pair: remove it") from None
        elif isinstance(item, dict | list):
            if depth == MAX_DEPTH:
                raise _too_deep()
            if isinstance(item, dict):
                waiting += [(name, depth) for name in item]
                item = item.values()
            waiting += [(child, depth + 1) for child in item]
