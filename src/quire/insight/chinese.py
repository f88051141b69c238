"""`to_chinese`: the fixed sentences of `tour`, `explain` and `view` in Chinese, from the table `chinese.json`.

The table has each sentence as it stands in the source, with "{}" for what is put in; its Chinese takes the parts in the
same order, or by number. "# token" is a number with its noun. What the table does not have stays as it is: names of
weights and instructions, units, and the numbers. Must not know the pictures and reports.
"""

import functools
import html
import json
import re
from collections.abc import Mapping
from pathlib import Path

TABLE: Mapping[str, str] = json.loads((Path(__file__).parent / "chinese.json").read_text(encoding="utf-8"))
LEAST_LENGTH = 10
"""Characters of the fixed text of a sentence that is also looked for inside of longer texts."""
_TEXT_NODE = re.compile(r">([^<>]*[A-Za-z][^<>]*)<")


def to_chinese(text: str) -> str:
    """Return a text with its fixed sentences in Chinese. Parts that were put into a sentence are translated too."""
    if text in TABLE:
        return TABLE[text]
    bare = text.strip(" ")
    if bare != text:
        return text.replace(bare, to_chinese(bare)) if bare else text
    for pattern, chinese in _sentences():
        if match := pattern.fullmatch(text):
            return _filled(chinese, match)
    for pattern, chinese in _phrases():
        if match := pattern.search(text):
            return to_chinese(text[: match.start()]) + _filled(chinese, match) + to_chinese(text[match.end() :])
    if text[:1].isupper() and (lower := to_chinese(text[0].lower() + text[1:])) != text[0].lower() + text[1:]:
        return lower
    items = text.split(", ")
    return ", ".join(map(to_chinese, items)) if len(items) > 1 else text


def html_to_chinese(page: str) -> str:
    """Return a page or an SVG with the fixed sentences between its tags in Chinese."""
    body = page[page.index("</style>") :] if "</style>" in page else page
    translated = _TEXT_NODE.sub(lambda match: f">{html.escape(to_chinese(html.unescape(match[1])))}<", body)
    return page[: len(page) - len(body)].replace('lang="en"', 'lang="zh"') + translated


def _filled(chinese: str, match: re.Match[str]) -> str:
    return chinese.format(*(to_chinese(part) for part in match.groups()))


@functools.cache
def _sentences() -> list[tuple[re.Pattern[str], str]]:
    """Return a pattern for each sentence with parts: first those that begin with fixed text, the longest first."""
    keys = (key for key in TABLE if "{}" in key or key.startswith("# "))
    return [_pattern(key) for key in sorted(keys, key=lambda key: (key.startswith("{}"), -_fixed_length(key)))]


@functools.cache
def _phrases() -> list[tuple[re.Pattern[str], str]]:
    """Return a pattern for each sentence that is looked for in longer texts: it begins and ends with fixed text."""
    found = []
    for key in sorted(TABLE, key=_fixed_length, reverse=True):
        is_long = _fixed_length(key) >= LEAST_LENGTH and " " in key.strip()
        if key.startswith("# ") or (is_long and not key.startswith("{}") and not key.endswith("{}")):
            found.append(_pattern(key))
    return found


def _fixed_length(key: str) -> int:
    return len(key.replace("{}", ""))


def _pattern(key: str) -> tuple[re.Pattern[str], str]:
    if key.startswith("# "):
        return re.compile(rf"(?<![\w.])([\d,.]+) {re.escape(key[2:])}(?:e?s)?\b"), TABLE[key].replace("#", "{}")
    text = re.escape(key.strip(" ")).replace(r"\{\}", "(.*?)")
    # A part at the beginning is no list, so that of a list each item is translated alone.
    if text.startswith("(.*?)") and text[5:6] not in (",", ";"):
        text = "((?:[^,]|,(?! ))*?)" + text[5:]
    return re.compile(text), TABLE[key].strip(" ")
