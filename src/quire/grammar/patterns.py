r"""Regexes of clients in the words of Rust's regex, and regexes for the formats of JSON Schema.

`\d`, `\w`, `\s` and their complements mean ASCII in a regex and in Lark, as with `re.ASCII` in Python. In a schema's
`pattern` llguidance reads `\d` and `\w` so by itself.
Must not know: schemas. Next to read: `schemas.py`.
"""

import re

_CLASSES = {
    "d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]", "s": r"[\t-\r\x20]", "S": r"[^\t-\r\x20]",
}  # fmt: skip
"""ASCII's classes. As nested classes they mean the same inside of brackets. No space, which `(?x)` would drop."""
_ESCAPE = re.compile(r"--|(?P<hyphen>-)(?=\\[dwsDWS])|\\(?P<name>.)", re.DOTALL)
"""An escape, or a hyphen before a class: no range, but `[+-[0-9]]` would have one. `--` is Rust's operator."""
LARK_PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/(?P<regex>(?:\\.|[^/\\])+)/|(?P<json>%json\s*)', re.DOTALL
)
"""A string or a comment, a regex, or the beginning of a JSON Schema in Lark as llguidance extends it."""
_BRACKETS = re.compile(r"\\.|\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]", re.DOTALL)
"""An escape, or a class of characters as ECMA-262 writes it: without classes in it, but for POSIX's."""
_CLASS_PART = re.compile(r"(?P<escape>\\.)|-(?=\\[dwsDWS])|\[(?!:)|&&|~~|--", re.DOTALL)
"""Part of ECMA-262's class that Rust reads differently: `[` begins a class within, a doubled operator combines two."""
_DECIMAL = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*(?:"
    r"\(\?:\\d\{0,(?P<whole>\d+)\}\|\(\?=\[\\d\.\]\{1,(?P<limit>\d+)\}0\*\$\)\\d\{0,\d+\}\\\.\\d\{0,(?P<places>\d+)\}0\*\$\)"
    r"|\(\?:\\d\{0,(?P<digits>\d+)\}\|\(\?=\[\\d\.\]\{1,\d+\}0\*\$\)\\d\*\\\.\\d\*0\*\$\)"
    r"|\\d\*\\\.\?\\d(?:\*|\{0,(?P<only_places>\d+)\}0\*)\$)"
)
"""The patterns that pydantic 2.12 and 2.13 write for `Decimal`, with look-ahead."""
_MAX_DIGITS = 100


def ascii_classes(regex: str) -> str:
    r"""Return a regex with ASCII's classes in place of `\d`, `\w`, `\s` and their complements."""
    return _ESCAPE.sub(lambda found: r"\-" if found["hyphen"] else _CLASSES.get(found["name"], found[0]), regex)


def rust_pattern(pattern: str) -> str:
    r"""Return a `pattern` of JSON Schema, which is ECMA-262's, for llguidance.

    `\s` becomes ASCII's white space, and what is no white space stays Unicode's: the text matches by either reading.
    """
    decimal = _DECIMAL.fullmatch(pattern)
    return _decimal(decimal) if decimal else _BRACKETS.sub(_rust_part, pattern)


def _rust_part(found: re.Match[str]) -> str:
    part = found[0]
    if part[0] == "\\":
        return _CLASSES["s"] if part == r"\s" else part
    # `[\s\S]` is any character, and in `[^\s]` all of Unicode's white space is left out.
    space = r"\s" if part[1] == "^" or r"\S" in part else _CLASSES["s"]

    def literal(inner: re.Match[str]) -> str:
        found = inner[0]
        return space if found == r"\s" else found if inner["escape"] else rf"{found[:-1]}\{found[-1]}"

    return "[" + _CLASS_PART.sub(literal, part[1:])


def _decimal(found: re.Match[str]) -> str:
    """Return a pattern for the same decimal numbers without look-ahead: a digit before or after the point."""
    if found["digits"] is not None:
        num_digits = int(found["digits"])
        if num_digits > _MAX_DIGITS:
            return found[0]
        numbers: list[tuple[str, int | None]] = [
            (f"0*[0-9]{{{count}}}" if count else "0+", num_digits - count) for count in range(num_digits + 1)
        ]
    elif found["whole"] is not None:
        whole = f"(?:0+|0*[0-9]{{1,{found['whole']}}})" if int(found["whole"]) else "0+"
        numbers = [(whole, min(int(found["places"]), int(found["limit"]) - 1))]
    else:
        numbers = [("[0-9]+", None if found["only_places"] is None else int(found["only_places"]))]
    texts = [rf"{whole}(?:\.{_fraction(0, places)})?" for whole, places in numbers]
    return rf"^[+-]?(?:{'|'.join(texts)}|\.{_fraction(1, numbers[0][1])})$"


def _fraction(least: int, most: int | None) -> str:
    """Return a regex for digits of which all but `most` are zeros at the end."""
    if most is None:
        return f"[0-9]{{{least},}}"
    zeros = "0+" if least else "0*"
    return f"(?:[0-9]{{{least},{most}}}0*|0+)" if most else zeros


# --- Formats that llguidance lacks, or has otherwise than Python's parsers ------------------------
# Years, fractions and durations have so few digits that `datetime` holds them.

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_OF_LEAP_YEARS = "(?:0[48]|[2468][048]|[13579][26])"
_MONTH_AND_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_MONTH_AND_DAY}|(?:[0-9]{{2}}{_OF_LEAP_YEARS}|{_OF_LEAP_YEARS}00)-02-29)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_CLOCK})"
_N = "[0-9]{1,6}"
_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_HOURS = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_IPV6 = (
    "(?:"
    + "|".join(
        [
            f"{_GROUP}(?::{_GROUP}){{7}}",
            *(
                f"{f'{_GROUP}(?::{_GROUP}){{{n - 1}}}' if n else ''}::(?:{_GROUP}(?::{_GROUP}){{0,{6 - n}}})?"
                for n in range(7)
            ),
            f"{_GROUP}(?::{_GROUP}){{6}}::",
        ]
    )
    + ")"
)
_OF_32, _OF_128 = "/(?:3[0-2]|[12]?[0-9])", "/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9])"
_HEX = "[0-9A-Fa-f]"
_BASE64 = "(?:{0}{{4}})*(?:{0}{{2}}==|{0}{{3}}=)?"

OWN_FORMATS = {
    "base64": _BASE64.format("[A-Za-z0-9+/]"),
    "base64url": _BASE64.format("[A-Za-z0-9_-]"),
    "byte": _BASE64.format("[A-Za-z0-9+/]"),
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|{_N}W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@(?:{_LABEL}\.)+[A-Za-z]{{2,}}",
    "ipv4": _IPV4,
    "ipv4interface": f"{_IPV4}(?:{_OF_32})?",
    "ipv4network": f"{_IPV4}(?:{_OF_32})?",
    "ipv6": _IPV6,
    "ipv6interface": f"{_IPV6}(?:{_OF_128})?",
    "ipv6network": f"{_IPV6}(?:{_OF_128})?",
    "ipvanyaddress": f"(?:{_IPV4}|{_IPV6})",
    "json-pointer": "(?:/(?:[^/~]|~[01])*)*",
    "time": _TIME,
    "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    **{f"uuid{n}": f"{_HEX}{{8}}-{_HEX}{{4}}-{n}{_HEX}{{3}}-[89ABab]{_HEX}{{3}}-{_HEX}{{12}}" for n in range(1, 9)},
}
"""Formats → regexes of the whole text. Addresses of networks may have bits of hosts."""
LIBRARY_FORMATS = frozenset({"hostname", "uri"})
"""Formats that llguidance enforces as they should be."""
