"""Regexes for `format` of JSON Schema, where llguidance has none or one that Python's parsers do not follow.

Years, fractions and durations have so few digits that `datetime` holds them. Next to read: `schemas.py`.
"""

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
