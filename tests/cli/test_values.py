"""Suffixes, lists, JSON, and errors that name the value."""

from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.options import BYTES, JSON_OBJECT, LENGTH, LENGTHS, STRUCTURED, TOKEN_BIAS, parse_length
from quire.structured_outputs import StructuredOutputsParams


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (LENGTH, "2k", 2000),
        (LENGTH, "25.6k", 25600),
        (LENGTH, " 8 ", 8),
        (BYTES, "4096", 4096),
        (BYTES, "2GiB", 2**31),
        (BYTES, "1.5GB", 1_500_000_000),
        (BYTES, "0.5G", 2**29),
        (LENGTHS, "1K,2,2,", (1024, 2)),
        (JSON_OBJECT, '{"a": 1}', {"a": 1}),
        (TOKEN_BIAS, "42=-5", (42, -5.0)),
    ],
)
def test_good_values(kind: click.ParamType, text: str, value: Any) -> None:
    assert kind.convert(text, None, None) == value


@given(st.integers(-(10**12), 10**12), st.sampled_from(["k", "K", "m", "M", ""]))
def test_length_is_the_number_times_its_suffix(number: int, suffix: str) -> None:
    factor = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20, "": 1}[suffix]
    assert parse_length(f"{number}{suffix}") == number * factor


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        *((LENGTH, text, f"'{text}'") for text in ("", "k", "2kk", "1.5", "2GiB", "1e3", "0x10", "two")),
        *((BYTES, text, f"'{text}'") for text in ("", "GiB", "2gib", "2 GiB 1", "1.5", "2XB")),
        (LENGTHS, "1,x", "'1,x'"),
        (JSON_OBJECT, "[1]", "'[1]'"),
        (JSON_OBJECT, "{", "'{'"),
        (TOKEN_BIAS, "5", "'5'"),
        (TOKEN_BIAS, "a=1", "'a=1'"),
        (STRUCTURED, "[0-9]+", "'[0-9]+'"),
        (STRUCTURED, "[1]", "'[1]'"),
        (STRUCTURED, '{"regexp": "a"}', "'regexp'"),
        (STRUCTURED, '{"regex": ""}', "structured_outputs.regex"),
        (STRUCTURED, '{"reasoning": {"start": "<r>"}}', "start, end and is_open"),
        (STRUCTURED, "@no/such/file", "no/such/file"),
    ],
)
def test_errors_name_the_value(kind: click.ParamType, text: str, named: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        kind.convert(text, None, None)
    assert named in caught.value.message


def test_structure_is_written_or_read_from_a_file(tmp_path: Path) -> None:
    structured = StructuredOutputsParams(json={"type": "object"})
    text = '{"json": {"type": "object"}}'
    (tmp_path / "form.json").write_text(text)
    for value in (text, f"@{tmp_path / 'form.json'}"):
        assert STRUCTURED.convert(value, None, None) == structured
