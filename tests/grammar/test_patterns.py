"""ASCII's classes in regexes, Lark and patterns, against Python's `re.ASCII`."""

import itertools
import json
import re
from collections.abc import Iterator
from random import Random

import pytest
from llguidance import LLMatcher

from quire.grammar.check_child import define
from quire.grammar.patterns import ascii_classes, rust_pattern
from tests.grammar.random_schemas import OPTIONS, TOKENIZER, grammar_of, matches, walk

CHARACTERS = "3a_Zé٣ \t\n\r\x0b\x0c\x1f\u00a0\u2003\u2028\u3000\ufeff🯸ſK-+.!d\\[]sß五"


def regex(text: str) -> str:
    return define("regex", text, {})


def lark(text: str) -> str:
    return define("grammar", text, OPTIONS)


@pytest.mark.parametrize(
    "pattern",
    [r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"[\d]", r"[^\d]", r"[\w.-]", r"[^\w\s]", r"[\W\d]", r"[\s\S]", r"[\D_]",
     r"\\d", r"[\\d]", r"[^\\d]", r"\\\d", r"(?:\w|\s)", r"(?x) \s  # one\d"],
)  # fmt: skip
def test_classes_in_a_regex_are_those_of_ascii(pattern: str) -> None:
    by_regex, by_lark = regex(pattern), lark(f"start: /{pattern}/")
    for text in [*CHARACTERS, r"\d", r"\3", r"\٣"]:
        is_match = re.fullmatch(pattern, text, re.ASCII) is not None
        assert matches(by_regex, text) is is_match, text
        assert matches(by_lark, text) is is_match, text


def test_posix_classes_are_those_of_ascii() -> None:
    for pattern, same in (("[[:digit:]]", r"\d"), ("[[:word:]x]", r"\w"), ("[^[:space:]]", r"\S")):
        grammar = regex(pattern)
        for text in CHARACTERS:
            assert matches(grammar, text) is (re.fullmatch(same, text, re.ASCII) is not None), (pattern, text)


@pytest.mark.parametrize("pattern", [r"[+-\d]", r"[\w-z]", r"[a-z-\s]", r"[\d-]"])
def test_hyphen_beside_a_class_is_no_range(pattern: str) -> None:
    literal = pattern.replace(r"-\d", r"\-\d").replace(r"\w-", r"\w\-").replace(r"-\s", r"\-\s")
    grammars = regex(pattern), grammar_of({"type": "string", "pattern": f"^{pattern}$"})["grammar"]
    for text in "+-,.5az\\[ Z":
        is_match = re.fullmatch(literal, text, re.ASCII) is not None
        assert matches(grammars[0], text) is is_match, text
        assert matches(grammars[1], json.dumps(text)) is is_match, text


def test_rust_operators_of_classes_are_kept_in_a_regex() -> None:
    assert [text for text in "4567a" if matches(regex(r"[\d--5]"), text)] == ["4", "6", "7"]
    assert [text for text in "4567a" if matches(regex(r"[\d&&[^5]]"), text)] == ["4", "6", "7"]


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{3}-\d{4}",
        r"\w+@\w+\.com",
        r"(?:\s?\S){3}",
        r"[^\W\d_]{2,5}",
        r".{1,4}",
        r"\D\W\S",
        r"[\s\S]{0,9}",
        r"(?i)\w\d",
    ],
)
def test_drawn_texts_are_valid_utf_8_and_match(pattern: str) -> None:
    grammar = regex(pattern)
    for seed in range(20):
        text = walk(grammar, Random(seed))
        assert text is not None
        assert re.fullmatch(pattern.replace("(?i)", "(?ai)"), text.decode(), re.ASCII), text


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('start: X | "#" /\\w/ // /\\d/ "\nX: /[\\d]/i "\\\\d" # \\d', ["3\\d", "#a"], ["33", "٣\\d", "#é"]),
        ('start: /a\\/\\d/ "/" /\\s/ "/"', ["a/3/ /"], ["a/٣/ /", "a/3/\u00a0/"]),
        ('start: %json {"type": "string", "pattern": "^[/\\"\\\\d]+$"} /\\d/', ['"/3"3'], ['"٣"3', '"3"٣']),
        ('start: %json {"type": "object", "title": "/"} /\\d/ %json {"format": "date"}', ['{ }3"2024-02-29"'],
         ['{   }3"2024-02-29"', '{}3"2023-02-29"']),
        ('root ::= "\\\\d" [0-9a-f]+', ["\\df3"], ["3f3"]),
    ],
)  # fmt: skip
def test_regexes_and_schemas_within_lark(grammar: str, good: list[str], bad: list[str]) -> None:
    compiled = lark(grammar)
    assert [text for text in good if not matches(compiled, text)] == []
    assert [text for text in bad if matches(compiled, text)] == []


@pytest.mark.parametrize("pattern", [r"\b\d", r"a(?=\d)", r"(a)\1", r"(?-u:\D)"])
def test_regex_that_is_not_supported_is_refused(pattern: str) -> None:
    matcher = LLMatcher(TOKENIZER, regex(pattern), log_level=0)
    assert matcher.is_error()


# --- JSON Schema's patterns -------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [r"^\d$", r"^[\d.]$", r"^\w$", r"^\s$", r"^[\s,]$", r"^\S$", r"^[^\s]$", r"^[^\s,]$", r"^\\$"],
)
def test_text_of_a_pattern_matches_for_ascii_and_for_unicode(pattern: str) -> None:
    grammar = grammar_of({"type": "string", "pattern": pattern})["grammar"]
    allowed = [text for text in CHARACTERS if matches(grammar, json.dumps(text, ensure_ascii=False))]
    assert allowed
    assert all(re.search(pattern, text, re.ASCII) and re.search(pattern, text) for text in allowed), allowed


def test_pattern_allows_any_character_by_class_and_complement() -> None:
    grammar = grammar_of({"type": "string", "pattern": r"^[\s\S]$"})["grammar"]
    assert all(matches(grammar, json.dumps(text, ensure_ascii=False)) for text in CHARACTERS if text not in "\x0b\x1f")


def test_brackets_and_operators_in_classes_of_a_pattern_are_characters() -> None:
    for pattern, good, bad in (
        (r"^[[\]]$", "[]", "a"),
        ("^[a&&b]$", "a&b", "c"),
        ("^[~~]$", "~", "a"),
        ("^[+--]$", "+,-", "."),
    ):
        grammar = grammar_of({"type": "string", "pattern": pattern})["grammar"]
        assert all(matches(grammar, json.dumps(text)) for text in good), pattern
        assert not any(matches(grammar, json.dumps(text)) for text in bad), pattern


def decimal_pattern(max_digits: int | None, places: int | None) -> str:
    """Return pydantic's pattern of a `Decimal`."""
    start = r"^(?!^[-+.]*$)[+-]?0*"
    if max_digits is None:
        return start + (r"\d*\.?\d*$" if places is None else rf"\d*\.?\d{{0,{places}}}0*$")
    few = rf"(?=[\d.]{{1,{max_digits + 1}}}0*$)"
    if places is None:
        return start + rf"(?:\d{{0,{max_digits}}}|{few}\d*\.\d*0*$)"
    whole = max(0, max_digits - places)
    return start + rf"(?:\d{{0,{whole}}}|{few}\d{{0,{whole}}}\.\d{{0,{places}}}0*$)"


def numbers() -> Iterator[str]:
    for size in range(6):
        yield from map("".join, itertools.product("01.-", repeat=size))


@pytest.mark.parametrize("max_digits", [None, 0, 1, 3])
@pytest.mark.parametrize("places", [None, 0, 1, 3])
def test_pattern_of_a_decimal_has_an_equal_one_without_look_ahead(max_digits: int | None, places: int | None) -> None:
    pattern = decimal_pattern(max_digits, places)
    equal = rust_pattern(pattern)
    assert "(?=" not in equal
    for text in numbers():
        found = re.fullmatch(r"-?(\d*)\.?(\d*)", text)
        is_number = found is not None and any(found.groups())
        whole, fraction = (found[1].lstrip("0"), found[2].rstrip("0")) if found else ("", "")
        has_few = max_digits is None or len(whole) + len(fraction) <= max_digits
        if max_digits is not None and places is not None:
            has_few = has_few and len(whole) <= max(0, max_digits - places)
        has_few = has_few and (places is None or len(fraction) <= places)
        assert (re.search(equal, text) is not None) is (is_number and has_few), text
        assert not re.search(equal, text) or re.search(pattern, text), text
    assert "grammar" in grammar_of({"anyOf": [{"type": "number"}, {"type": "string", "pattern": pattern}]})


def test_other_look_ahead_is_refused() -> None:
    for pattern in (r"^(?=.*\d).+$", decimal_pattern(101, None), r"^(?!a)b$"):
        assert "look-around" in grammar_of({"type": "string", "pattern": pattern})["error"]


def test_ascii_classes_keep_everything_else() -> None:
    for text in (r"\\d", r"[a--\x20]", r"\p{L}", "a-b", r"\.", "\\", "é"):
        assert ascii_classes(text) == text
