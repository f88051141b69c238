"""Suffixes and lists."""

from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.values import (
    BYTES,
    JSON_OBJECT,
    LENGTH,
    LENGTHS,
    STRUCTURED,
    TOKEN_BIAS,
    parse_bytes,
    parse_length,
)
from quire.structured_outputs import StructuredOutputsParams


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2048", 2048),
        ("2k", 2000),
        ("2K", 2048),
        ("25.6k", 25600),
        ("1m", 10**6),
        ("1M", 2**20),
        ("-1", -1),
        (" 8 ", 8),
    ],
)
def test_lengths(text: str, value: int) -> None:
    assert parse_length(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("2GiB", 2**31), ("1.5GB", 1_500_000_000), ("512MiB", 2**29), ("0.5G", 2**29), ("1TiB", 2**40)],
)
def test_bytes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "k", "2kk", "1.5", "2GiB", "1e3", "0x10", "two", "1_000x"])
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_length(text)


@pytest.mark.parametrize("text", ["", "GiB", "2gib", "2 GiB 1", "1.5"])
def test_bad_bytes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_bytes(text)


@given(st.integers(-(10**12), 10**12), st.sampled_from(["k", "K", "m", "M", ""]))
def test_length_is_the_number_times_its_suffix(number: int, suffix: str) -> None:
    factor = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20, "": 1}[suffix]
    assert parse_length(f"{number}{suffix}") == number * factor


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        (LENGTH, "12q", "'12q'"),
        (BYTES, "2XB", "'2XB'"),
        (LENGTHS, "1,x", "'1,x'"),
        (JSON_OBJECT, "[1]", "'[1]'"),
        (JSON_OBJECT, "{", "'{'"),
        (TOKEN_BIAS, "5", "'5'"),
        (TOKEN_BIAS, "a=1", "'a=1'"),
        (STRUCTURED, "[0-9]+", "'[0-9]+'"),
        (STRUCTURED, "[1]", "'[1]'"),
        (STRUCTURED, '{"regexp": "a"}', "'regexp'"),
        (STRUCTURED, '{"regex": ""}', "structured_outputs.regex"),
        (STRUCTURED, "@no/such/file", "no/such/file"),
    ],
)
def test_errors_name_the_value(kind: click.ParamType, text: str, named: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        kind.convert(text, None, None)
    assert named in caught.value.message


def test_good_values() -> None:
    assert LENGTHS.convert("1K,2,2,", None, None) == (1024, 2)
    assert JSON_OBJECT.convert('{"a": 1}', None, None) == {"a": 1}
    assert TOKEN_BIAS.convert("42=-5", None, None) == (42, -5.0)


def test_structure_is_written_or_read_from_a_file(tmp_path: Path) -> None:
    structured = StructuredOutputsParams(json={"type": "object"})
    text = '{"json": {"type": "object"}}'
    (tmp_path / "form.json").write_text(text)
    for value in (text, f"@{tmp_path / 'form.json'}", structured):
        assert STRUCTURED.convert(value, None, None) == structured
