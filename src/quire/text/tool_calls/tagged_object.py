"""`TaggedObject`: translates parameters between tags, as Qwen3.5, Qwen3-Coder and GLM-4.5 write them, to a JSON object.

    <parameter=city> Ulm </parameter> <parameter=days> 3 </parameter> </function>   →   {"city": "Ulm", "days": 3}
    <arg_key>city</arg_key> <arg_value>Ulm</arg_value> </tool_call>                 →   {"city": "Ulm"}

Qwen sets a value off from its tags by line breaks. Values are text without quotes: JSON if they are a number, a list
and so on, unless the tool declares text. Must not know tools. Next to read: `parser.py`.
"""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from quire.text.stop_strings import begun_len
from quire.text.tool_calls.pieces import Pieces, Reading


@dataclass(frozen=True, slots=True)
class Tags:
    """Text around the parts of a call: its name stands between `call` and `name_end`, parameters follow up to `end`.

    A parameter's name stands between `key` and `key_end`, its value between `value` and `value_end`. `set_off`: what
    separates a value from its tags.
    """

    call: str
    name_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    end: str
    set_off: str


QWEN_TAGS = Tags("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", "\n")
GLM_TAGS = Tags("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>", "")
_NON_BLANK = re.compile(r"\S")
_KEY_END = re.compile(r"[<>\n]")
_WORDS = {"True": True, "False": False, "None": None}


class TaggedObject:
    """Reads the parameters of one call from `pieces`, and gives their JSON to `write` as it becomes certain.

    `texts`: names of parameters that are text, whatever their values look like.
    """

    def __init__(self, pieces: Pieces, tags: Tags, texts: Collection[str], write: Callable[[str], None]) -> None:
        self._pieces, self._tags, self._texts, self._write = pieces, tags, texts, write

    def read(self) -> Reading:
        """Return True at the end of the call, False where it breaks off."""
        before, tags = "{", self._tags
        while True:
            if (yield from self._skip(tags.end)):
                self._write("{}" if before == "{" else "}")
                return True
            if not (yield from self._skip(tags.key)):
                return False
            name: list[str] = []
            yield from self._pieces.until(_KEY_END, name.append)
            if not (yield from self._pieces.is_at(tags.key_end)):
                return False
            self._pieces.take(len(tags.key_end))
            if tags.value and not (yield from self._skip(tags.value)):
                return False
            value = yield from self._read_value()
            if value is None:
                return False
            key = "".join(name).strip()
            found = value if key in self._texts else _value(value)
            self._write(f"{before}{json.dumps(key, ensure_ascii=False)}: {json.dumps(found, ensure_ascii=False)}")
            before = ", "

    def _skip(self, tag: str) -> Reading:
        """Skip blanks, and the tag if it follows. Return True if it does."""
        yield from self._pieces.until(_NON_BLANK, lambda _: None)
        is_there = yield from self._pieces.is_at(tag)
        self._pieces.take(len(tag) if is_there else 0)
        return is_there

    def _read_value(self) -> Reading:
        """Return the text up to the closing tag, without the blanks that set it off; None if it breaks off."""
        pieces, taken, closing, set_off = self._pieces, list[str](), self._tags.value_end, self._tags.set_off
        while (found := pieces.text.find(closing, pieces.position)) < 0:
            if pieces.is_ended:
                return None
            held = begun_len(pieces.text, closing, pieces.position)
            taken.append(pieces.take(len(pieces.text) - held - pieces.position))
            yield
        taken.append(pieces.take(found - pieces.position))
        pieces.take(len(closing))
        return "".join(taken).removeprefix(set_off).removesuffix(set_off)


def _value(text: str) -> Any:
    """Return the value that a text without quotes stands for."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return _WORDS.get(text, text)
    return value
