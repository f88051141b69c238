"""Values on the command line: token lengths (32K), bytes (2GiB), lists, JSON, token=bias pairs.

A bad value names itself and what is accepted. Must not know options or verbs. Next to read: `options.py`.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from quire.errors import InvalidParameterError
from quire.structured_outputs import StructuredOutputsParams

_NUMBER = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
LENGTH_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}
"""As in vLLM: small letters are decimal, capitals binary."""
BYTE_SUFFIXES = {
    "": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip


class Value(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """A value that `parse` makes of a text; several in one environment variable are separated by commas.

    `expected` completes "'…' is not" where `parse` raises ValueError.
    """

    envvar_list_splitter = ","

    def __init__(self, name: str, parse: Callable[[str], Any], expected: str) -> None:
        self.name, self._parse, self._expected = name, parse, expected

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the parsed value; fails naming the text and what is accepted."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except InvalidParameterError as error:
            self.fail(error.message, param, ctx)
        except ValueError as error:
            self.fail(
                str(error) if isinstance(error, NamedValueError) else f"'{value}' is not {self._expected}", param, ctx
            )


class NamedValueError(ValueError):
    """A ValueError whose message says everything."""


def parse_length(text: str) -> int:
    """Return a count: `2k` is 2000, `2K` is 2048, `25.6k` is 25600. Raises: ValueError."""
    return _parse_suffixed(text, LENGTH_SUFFIXES)


def parse_bytes(text: str) -> int:
    """Return a size: `2GiB` is 2147483648, `1.5GB` is 1500000000, `4096` is itself. Raises: ValueError."""
    return _parse_suffixed(text, BYTE_SUFFIXES)


def _parse_suffixed(text: str, suffixes: dict[str, int]) -> int:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2] not in suffixes:
        raise ValueError(text)
    # Integers only: 0.1GiB must not depend on how a float rounds.
    whole, _, fraction = match[1].partition(".")
    scaled, scale = int(whole + fraction) * suffixes[match[2]], int("1" + "0" * len(fraction))
    if scaled % scale and suffixes[match[2]] == 1:
        raise ValueError(text)
    return scaled // scale


def _parse_lengths(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(parse_length(part) for part in text.split(",") if part.strip()))


def _parse_every_length(text: str) -> tuple[int, ...]:
    return tuple(parse_length(part) for part in text.split(","))


def _parse_object(text: str) -> dict[str, Any]:
    parsed = json.loads(text)
    if not isinstance(parsed, dict):
        raise ValueError(text)
    return parsed


def _parse_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    return int(token_id), float(bias)


def _parse_structured(text: str) -> StructuredOutputsParams:
    """Parse the fields of `StructuredOutputsParams` as a JSON object, or @FILE with one."""
    try:
        source = Path(text[1:]).expanduser().read_text(encoding="utf-8") if text.startswith("@") else text
        fields = json.loads(source)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NamedValueError(f"'{text}' is neither a JSON object nor @FILE with one: {reason}") from None
    names = StructuredOutputsParams.__dataclass_fields__
    unknown = [name for name in fields if name not in names] if isinstance(fields, dict) else [source]
    if unknown:
        example = '{"regex": "[0-9]+"}'
        raise NamedValueError(f"'{unknown[0]}' is not one of {', '.join(names)}, as in {example}")
    return StructuredOutputsParams(**fields)


LENGTH = Value("n", parse_length, "a count such as 2048, 2K (2048) or 2k (2000)")
LENGTHS = Value("n,…", _parse_lengths, "a list of counts such as 128,512 or 1K,2K")
EVERY_LENGTH = Value("n,…", _parse_every_length, "a list of counts, one per request, such as 100,200,200")
BYTES = Value("bytes", parse_bytes, "a size such as 4096, 512MiB or 2GiB")
JSON_OBJECT = Value("json", _parse_object, 'a JSON object such as {"key": 1}')
STRUCTURED = Value("json|@file", _parse_structured, "a JSON object")
TOKEN_BIAS = Value("id=bias", _parse_bias, "TOKEN_ID=BIAS such as 42=-5")
TEXT = Value("text", str, "a text")
