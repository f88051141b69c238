"""JSON from strangers: read strictly and in bounded depth, so that no text leads to anything but a value or a 400.

Refused beyond what JSON itself forbids: nesting above `MAX_DEPTH`, an object that names a key twice (readers disagree
on which one counts), NaN and infinities, integers of more than 64 bits, lone surrogates and NUL characters.
Next to read: `validation.py`.
"""

import json
import re
from itertools import accumulate
from typing import Any, NoReturn

MAX_DEPTH = 64
INTEGER_BITS = 64
MAX_EXACT = 2.0**53
"""From here on floating-point numbers pass over integers."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NOT_BRACKETS = bytes(value for value in range(256) if value not in _STEPS)


class JsonTextError(ValueError):
    """A text that is not JSON, or JSON that is refused."""


def parse_json(data: bytes) -> Any:
    """The value that `data` writes. Raises: JsonTextError."""
    if not data.strip():
        raise JsonTextError("the body is empty: send a JSON object")
    if depth(data) > MAX_DEPTH:
        raise JsonTextError(f"the body is nested more than {MAX_DEPTH} deep")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise JsonTextError(f"the body is not UTF-8: byte {error.start}") from None
    try:
        value = json.loads(
            text, parse_constant=_constant, parse_float=_number, parse_int=_integer, object_pairs_hook=_object
        )
    except json.JSONDecodeError as error:
        raise JsonTextError(
            f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    # Only an escape can write what is not text: the parser refuses raw control characters, UTF-8 lone surrogates.
    if "\\u" in text:
        _check_texts(value)
    return value


def depth(data: bytes) -> int:
    """How deep brackets are nested, counted without recursion; an upper bound where it is at most `MAX_DEPTH`."""
    most = data.count(b"[") + data.count(b"{")
    if most <= MAX_DEPTH:
        return most
    brackets = _STRING.sub(b"", data).translate(None, _NOT_BRACKETS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


def _constant(name: str) -> NoReturn:
    raise JsonTextError(f"the body is not valid JSON: {name} is not a number of JSON")


def _number(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise JsonTextError(f"the number {digits[:40]} is too large")
    # Some languages write every number so; JSON Schema calls 8.0 an integer, and so does the API's description.
    return int(value) if value.is_integer() and abs(value) <= MAX_EXACT else value


def _integer(digits: str) -> int:
    # Python's own limit is 4,300 digits. What fits here and not in a field is refused there, with the field's name.
    if len(digits) > 21 or (value := int(digits)).bit_length() > INTEGER_BITS:
        raise JsonTextError(f"the integer {digits[:40]} has more than {INTEGER_BITS} bits")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1) if len(names) < 1000 else names[0]
        shown = json.dumps(twice[:100])
        raise JsonTextError(f"an object of the body has a key more than once, such as {shown}")
    return found


def _check_texts(value: Any) -> None:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            if "\0" in item:
                raise JsonTextError("a text of the body has a NUL character (\\u0000): remove it")
            try:
                item.encode()
            except UnicodeEncodeError as error:
                code = f"\\u{ord(item[error.start]):04x}"
                raise JsonTextError(f"a text of the body has {code}, half of a surrogate pair: remove it") from None
        elif isinstance(item, dict):
            waiting += item
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
