"""Readers of calls: each reads the calls at the beginning of a passage, in one way that models write them.

    objects    {"name": "weather", "arguments": {"city": "Ulm"}}, one or several, in a list or not
    keyed      [{"weather": {"city": "Ulm"}}]
    named      weather[ARGS]{"city": "Ulm"}, and other text between a name and its arguments
    gemma      call:weather{city:<|"|>Ulm<|"|>}
    tagged     <function=weather><parameter=city>Ulm</parameter></function>, and other tags
    python     [weather(city="Ulm"), clock()]

Readers are plain functions that survive the slips of `lenient_json.py`. Must not know markers. Next to read:
`formats.py`, which combines readers and markers.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.text.tool_calls.lenient_json import Bare, NotReadableError, Read, dump_json, parse_json, read_value
from quire.text.tool_calls.schemas import ToolSchemas

NAME = r"(?P<name>[\w.-]+)"
GAP = re.compile(r"(?:```\w*|[\s,;\[\]})`])*+")
"""Text that may stand between calls: separators, fences, and brackets that are one too many."""
_REST = re.compile(r"[\s,;\[\]})`]*+(?:\{|$)")
_FENCE = re.compile(r"\s*(?:```\w*\s*)?")
_NAME_KEYS = ("name", "tool_name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = frozenset({*_NAME_KEYS, "id", "type", "tool_call_id"})
_PYTHON_CALL = re.compile(r"(?:[^\W\d]\w*\s*=\s*)?(?:print\s*\(\s*)?(?P<name>[^\W\d][\w.]*)\s*\(")
_PYTHON_KEY = re.compile(r"\s*(?:(?P<key>[^\W\d]\w*)\s*=(?!=))?\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """Text that may begin with calls, `text[start:end]`.

    Fields:
        is_marked: a marker stands before it; without one, less looks like a call.
        is_closed: a marker stands behind it, so that it is not cut off and may miss its own ends.
        is_last_try: parts without an end go on to the end of the passage.
    """

    text: str
    start: int
    end: int
    schemas: ToolSchemas
    is_marked: bool = True
    is_closed: bool = False
    is_last_try: bool = False

    def match(self, pattern: re.Pattern[str], start: int) -> re.Match[str] | None:
        """Match a pattern at a place within the passage."""
        return pattern.match(self.text, start, self.end)

    def after(self, pattern: re.Pattern[str], start: int) -> int:
        """Return the place behind a pattern, which may be missing."""
        match = self.match(pattern, start)
        return match.end() if match else start

    def begins(self, prefix: str, start: int) -> bool:
        """Return True if the passage goes on with `prefix` at `start`."""
        return self.text.startswith(prefix, start, self.end)


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call and the place behind it. `id`: as the model wrote it, for formats in which that counts."""

    name: str
    arguments: dict[str, Any]
    end: int
    id: str | None = None


Reader = Callable[[Passage], list[WrittenCall]]
"""Returns the calls that a passage begins with, in order."""


def objects(passage: Passage) -> list[WrittenCall]:
    """Read JSON objects with a name and arguments."""
    return _each(passage, lambda start: _object(passage, start))


def keyed(passage: Passage) -> list[WrittenCall]:
    """Read JSON objects with a name as their key and arguments as its value."""
    return _each(passage, lambda start: _keyed(passage, start))


def named(head: str) -> Reader:
    """Return a reader of calls that are a name with text around it, which `head` matches, and a JSON object.

    The group `name` of the pattern is the name; the group `id`, if there is one, the id.
    """
    return lambda passage: _each(passage, lambda start: _named(passage, re.compile(head), start, quote=""))


def gemma(quote: str) -> Reader:
    """Return a reader of Gemma's calls, whose strings stand between two `quote`."""
    head = re.compile(rf"call:\s*{NAME}\s*(?=\{{)")
    return lambda passage: _each(passage, lambda start: _named(passage, head, start, quote=quote))


def python(passage: Passage) -> list[WrittenCall]:
    """Read calls with literals as arguments, as Python has them."""
    return _each(passage, lambda start: _python(passage, start))


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags of a call: patterns of its beginning with the group `name`, and of a parameter's with the group `key`.

    The group `type` of `key`, if there is one, is "string" or "true" for text. `value_end`: tag behind a value.
    `set_off`: text between a value and its tags.
    """

    call: str
    key: str
    value_end: str
    set_off: str = ""

    def __call__(self, passage: Passage) -> list[WrittenCall]:
        """Read calls with these tags. A call ends where no parameter follows."""
        return _each(passage, lambda start: _tagged(passage, self, start))


def either(*readers: Reader) -> Reader:
    """Return a reader that uses the first of several that finds calls."""
    return lambda passage: next((calls for reader in readers if (calls := reader(passage))), [])


def _each(passage: Passage, read: Callable[[int], WrittenCall | None]) -> list[WrittenCall]:
    """Read calls one after another."""
    found: list[WrittenCall] = []
    end = passage.start
    while (call := read(passage.after(GAP, end))) is not None:
        found.append(call)
        end = call.end
    return found


def _read(passage: Passage, start: int, *, quote: str = "", opening: str | tuple[str, ...] = "{") -> Read | None:
    """Return the object at a place; None if there is none. `opening`: what it may begin with."""
    if not passage.text.startswith(opening, start, passage.end):
        return None
    try:
        return read_value(passage.text, start, passage.end, quote=quote)
    except NotReadableError:
        return None


def _is_whole(passage: Passage, read: Read, *, num_outer: int) -> bool:
    """Return False if arguments may be cut off: more objects are open than the `num_outer` around them.

    Behind a closing marker one more bracket may be missing, if nothing else follows.
    """
    if read.num_open <= num_outer:
        return True
    return read.num_open == num_outer + 1 and passage.is_closed and passage.match(_REST, read.end) is not None


def _call(passage: Passage, name: Any, arguments: Any, end: int, call_id: str | None = None) -> WrittenCall | None:
    """Return a call; None for a name that no tool has, or for arguments that are no object. They may be its text."""
    known = passage.schemas.known(name)
    if isinstance(arguments, str) and arguments.strip():
        arguments, _ = parse_json(arguments)
    arguments = {} if arguments in (None, "") else arguments
    if known is None or not isinstance(arguments, dict) or dump_json(arguments) is None:
        return None
    return WrittenCall(known, arguments, end, call_id)


def _object(passage: Passage, start: int) -> WrittenCall | None:
    read = _read(passage, start)
    if read is None or not _is_whole(passage, read, num_outer=1):
        return None
    value = read.value
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = next((value[key] for key in _NAME_KEYS if isinstance(value.get(key), str)), None)
    key = next((key for key in _ARGUMENT_KEYS if key in value), None)
    if key is None:
        # Between markers, or with the name of a tool, this is a call without arguments; otherwise it is any object.
        is_call = passage.is_marked or passage.schemas.names is not None
        return _call(passage, name, {}, read.end) if is_call and _OTHER_KEYS.issuperset(value) else None
    return _call(passage, name, value[key], read.end)


def _keyed(passage: Passage, start: int) -> WrittenCall | None:
    read = _read(passage, start)
    if read is None or len(read.value) != 1 or not _is_whole(passage, read, num_outer=1):
        return None
    ((name, arguments),) = read.value.items()
    return _call(passage, name, arguments, read.end)


def _named(passage: Passage, head: re.Pattern[str], start: int, *, quote: str) -> WrittenCall | None:
    match = passage.match(head, start)
    if match is None or (name := passage.schemas.known(match["name"])) is None:
        return None
    call_id = match["id"] if "id" in head.groupindex else None
    return call_with(name, passage, match.end(), quote=quote, call_id=call_id)


def call_with(
    name: str, passage: Passage, start: int, *, quote: str = "", call_id: str | None = None
) -> WrittenCall | None:
    """Return a call of `name` with the object at `start`, or without arguments if a closing marker follows at once."""
    begin = passage.after(_FENCE, start)
    read = _read(passage, begin, quote=quote, opening=("{", '"'))
    if read is None:
        is_empty = passage.is_closed and passage.after(GAP, begin) == passage.end
        return WrittenCall(name, {}, passage.end, call_id) if is_empty else None
    if not _is_whole(passage, read, num_outer=0):
        return None
    arguments = _typed(passage.schemas, name, read.value) if isinstance(read.value, dict) else read.value
    return _call(passage, name, arguments, read.end, call_id)


def _typed(schemas: ToolSchemas, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with the values of scalars without quotes."""
    untyped = ToolSchemas()

    def nested(value: Any) -> Any:
        if isinstance(value, Bare):
            return untyped.value("", "", value)
        if isinstance(value, dict):
            return {key: nested(item) for key, item in value.items()}
        return [nested(item) for item in value] if isinstance(value, list) else value

    return {
        key: schemas.value(name, key, value) if isinstance(value, Bare) else nested(value)
        for key, value in arguments.items()
    }


def _tagged(passage: Passage, tags: Tags, start: int) -> WrittenCall | None:
    call_tag, key_tag = re.compile(tags.call), re.compile(tags.key)
    value_end = re.compile(rf"(?P<closer>{re.escape(tags.value_end)})|(?={tags.key})")
    head = passage.match(call_tag, start)
    if head is None or (name := passage.schemas.known(head["name"])) is None:
        return None
    arguments: dict[str, Any] = {}
    end = head.end()
    while True:
        begin = passage.after(_FENCE, end)
        key = passage.match(key_tag, begin)
        if key is None:
            break
        found = value_end.search(passage.text, key.end(), passage.end)
        if found is None and not passage.is_last_try:
            return None
        value = passage.text[key.end() : found.start() if found else passage.end]
        if found and not found["closer"] and tags.call.startswith("<") and call_tag.search(value):
            return None  # its end is missing, and another call follows
        value = value.removeprefix(tags.set_off).removesuffix(tags.set_off)
        kind = key["type"] if "type" in key_tag.groupindex else None
        is_text = kind in ("string", "true")
        arguments[key["key"].strip()] = value if is_text else passage.schemas.value(name, key["key"].strip(), value)
        end = found.end() if found else passage.end
    if arguments:
        return _call(passage, name, arguments, end)
    read = _read(passage, begin)
    if read is not None:
        return _call(passage, name, read.value, read.end) if _is_whole(passage, read, num_outer=0) else None
    return _call(passage, name, {}, end) if passage.is_closed and begin == passage.end else None


def _python(passage: Passage, start: int) -> WrittenCall | None:
    match = passage.match(_PYTHON_CALL, start)
    name = match and passage.schemas.known(match["name"].removesuffix(".call"))
    if not match or not name:
        return None
    arguments: dict[str, Any] = {}
    position, names = match.end(), iter(passage.schemas.keys(name))
    while not passage.begins(")", position := passage.after(_FENCE, position)):
        if arguments:
            if not passage.begins(",", position):
                return None
            position = passage.after(_FENCE, position + 1)
            if passage.begins(")", position):
                break
        key = passage.match(_PYTHON_KEY, position)
        assert key is not None, "every part is optional"
        try:
            read = read_value(passage.text, key.end(), passage.end)
        except NotReadableError:
            return None
        argument = key["key"] or next(names, None)
        if read.num_open or argument is None:
            return None
        arguments[argument], position = read.value, read.end
    return _call(passage, name, arguments, position + 1)
