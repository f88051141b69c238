"""Values on the command line: token lengths (32K), bytes (2GiB), lists, JSON, token=bias pairs.

A bad value names itself and what is accepted. Must not know options or verbs. Next to read: `options.py`.
"""

import json
import re
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


def parse_length(text: str) -> int:
    """A count: `2k` is 2000, `2K` is 2048, `25.6k` is 25600. Raises: ValueError."""
    return _parse_suffixed(text, LENGTH_SUFFIXES)


def parse_bytes(text: str) -> int:
    """A size: `2GiB` is 2147483648, `1.5GB` is 1500000000, `4096` is itself. Raises: ValueError."""
    return _parse_suffixed(text, BYTE_SUFFIXES)


def _parse_suffixed(text: str, suffixes: dict[str, int]) -> int:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2] not in suffixes:
        raise ValueError(text)
    # Through an integer numerator: 0.1GiB must not depend on how a float rounds.
    whole, _, fraction = match[1].partition(".")
    scaled, scale = int(whole + fraction) * suffixes[match[2]], int("1" + "0" * len(fraction))
    if scaled % scale and suffixes[match[2]] == 1:
        raise ValueError(text)
    return scaled // scale


class Length(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """A count, with an optional suffix k, K, m or M."""

    name = "n"
    envvar_list_splitter = ","

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The integer; fails naming the value and the accepted forms."""
        if isinstance(value, int):
            return value
        try:
            return parse_length(value)
        except ValueError:
            self.fail(f"'{value}' is not a count such as 2048, 2K (2048) or 2k (2000)", param, ctx)


class ByteSize(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """A size in bytes, with an optional unit."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The integer; fails naming the value and the accepted forms."""
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except ValueError:
            self.fail(f"'{value}' is not a size such as 4096, 512MiB or 2GiB", param, ctx)


class LengthList(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """Counts separated by commas."""

    name = "n,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The integers, in order, without repetition; fails naming the value."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(dict.fromkeys(parse_length(part) for part in value.split(",") if part.strip()))
        except ValueError:
            self.fail(f"'{value}' is not a list of counts such as 128,512 or 1K,2K", param, ctx)


class JsonObject(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """A JSON object."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """The parsed object; fails naming the value."""
        try:
            parsed = json.loads(value) if isinstance(value, str) else value
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            self.fail(f"'{value}' is not a JSON object such as {{\"key\": 1}}", param, ctx)
        return parsed


class StructuredForm(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """The fields of `StructuredOutputsParams` as a JSON object, or @FILE with one."""

    name = "json|@file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> StructuredOutputsParams:
        """The form; fails naming what is wrong with the text, the file or a field."""
        if isinstance(value, StructuredOutputsParams):
            return value
        text = str(value)
        try:
            if text.startswith("@"):
                text = Path(text[1:]).expanduser().read_text(encoding="utf-8")
            fields = json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or error
            self.fail(f"'{value}' is neither a JSON object nor @FILE with one: {reason}", param, ctx)
        names = StructuredOutputsParams.__dataclass_fields__
        unknown = [name for name in fields if name not in names] if isinstance(fields, dict) else [text]
        if unknown:
            example = '{"regex": "[0-9]+"}'
            self.fail(f"'{unknown[0]}' is not one of {', '.join(names)}, as in {example}", param, ctx)
        try:
            return StructuredOutputsParams(**fields)
        except InvalidParameterError as error:
            self.fail(error.message, param, ctx)


class TokenBias(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """TOKEN_ID=BIAS."""

    name = "id=bias"
    envvar_list_splitter = ","

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        """(token id, bias); fails naming the value."""
        if isinstance(value, tuple):
            return value
        token_id, _, bias = str(value).partition("=")
        try:
            return int(token_id), float(bias)
        except ValueError:
            self.fail(f"'{value}' is not TOKEN_ID=BIAS such as 42=-5", param, ctx)


class Text(click.types.StringParamType):
    """Text; several in one environment variable are separated by commas."""

    name = "text"
    envvar_list_splitter = ","
