"""`TaggedObject`: translates parameters between tags, as Qwen3.5 and Qwen3-Coder write them, to a JSON object.

    <parameter=city> Ulm </parameter> <parameter=days> 3 </parameter> </function>   →   {"city": "Ulm", "days": 3}

A line break sets a value off from its tags. Values are text without quotes: JSON if they are a number, a list and so
on, unless the tool declares text. Must not know tools. Next to read: `parser.py`.
"""

import json
import re
from collections.abc import Callable, Collection
from typing import Any

from quire.text.stop_strings import begun_len
from quire.text.tool_calls.pieces import Pieces, Reading

OPENING, CLOSING, END = "<parameter=", "</parameter>", "</function>"
_NON_BLANK = re.compile(r"\S")
_TAG_END = re.compile(r"[>\n]")
_WORDS = {"True": True, "False": False, "None": None}


class TaggedObject:
    """Reads the parameters of one call from `pieces`, and gives their JSON to `write` as it becomes certain.

    `texts`: names of parameters that are text, whatever their values look like.
    """

    def __init__(self, pieces: Pieces, texts: Collection[str], write: Callable[[str], None]) -> None:
        self._pieces, self._texts, self._write = pieces, texts, write

    def read(self) -> Reading:
        """Return True at the end of the call, False where it breaks off."""
        before = "{"
        while True:
            yield from self._pieces.until(_NON_BLANK, lambda _: None)
            if (yield from self._pieces.is_at(END)):
                self._pieces.take(len(END))
                self._write("{}" if before == "{" else "}")
                return True
            if not (yield from self._pieces.is_at(OPENING)):
                return False
            self._pieces.take(len(OPENING))
            name: list[str] = []
            if (yield from self._pieces.until(_TAG_END, name.append)) != ">":
                return False
            self._pieces.take(1)
            value = yield from self._read_value()
            if value is None:
                return False
            key = "".join(name).strip()
            found = value if key in self._texts else _value(value)
            self._write(f"{before}{json.dumps(key, ensure_ascii=False)}: {json.dumps(found, ensure_ascii=False)}")
            before = ", "

    def _read_value(self) -> Reading:
        """Return the text up to the closing tag, without the line breaks that set it off; None if it breaks off."""
        pieces, taken = self._pieces, list[str]()
        while (found := pieces.text.find(CLOSING, pieces.position)) < 0:
            if pieces.is_ended:
                return None
            held = begun_len(pieces.text, CLOSING, pieces.position)
            taken.append(pieces.take(len(pieces.text) - held - pieces.position))
            yield
        taken.append(pieces.take(found - pieces.position))
        pieces.take(len(CLOSING))
        return "".join(taken).removeprefix("\n").removesuffix("\n")


def _value(text: str) -> Any:
    """Return the value that a text without quotes stands for."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return _WORDS.get(text, text)
    return value
