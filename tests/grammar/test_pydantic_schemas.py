"""Schemas of pydantic's types: they are accepted, and pydantic reads the drawn texts."""

import datetime
import decimal
import enum
import ipaddress
import pathlib
import re
import uuid
from random import Random
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import pytest
from pydantic import BaseModel, Field, TypeAdapter

from tests.grammar.random_schemas import accepts, grammar_of, walk


class Color(enum.Enum):
    RED = "red"
    NONE = 0


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(BaseModel):
    kind: Literal["dog", "wolf"]
    puppies: "list[Animal]" = []


Animal = Annotated[Cat | Dog, Field(discriminator="kind")]
Dog.model_rebuild()


class Node(BaseModel):
    """A tree."""

    value: Annotated[int, Field(description="a number", examples=[1], deprecated=True)]
    left: "Node | None" = Field(None, title="Left")
    others: "list[Node]" = Field([], max_length=2)


class Closed(BaseModel, extra="forbid"):
    a: int = 1
    b: "float | None" = None


class Pair(NamedTuple):
    a: int
    b: str = ""


TYPES: dict[str, Any] = {
    "date": datetime.date, "datetime": datetime.datetime, "time": datetime.time, "timedelta": datetime.timedelta,
    "uuid": uuid.UUID, "uuid4": pydantic.UUID4, "uuid1": pydantic.UUID1,
    "ipv4": ipaddress.IPv4Address, "ipv6": ipaddress.IPv6Address, "ip": pydantic.IPvAnyAddress,
    "ipv4 interface": ipaddress.IPv4Interface, "ipv6 interface": ipaddress.IPv6Interface,
    "few digits": Annotated[decimal.Decimal, Field(ge=0, le=100)], "base64": pydantic.Base64Bytes,
    "base64url": pydantic.Base64UrlStr, "path": pathlib.Path, "secret": pydantic.SecretStr, "bytes": bytes,
    "literal": Literal["a", 1, None, True], "enum": Color, "union": Animal, "node": Node, "closed": Closed,
    "pair": Pair,
    "int": Annotated[int, Field(gt=0, le=1000, multiple_of=3)], "float": Annotated[float, Field(gt=0, lt=1.5)],
    "list": Annotated[list[int], Field(min_length=1, max_length=3)], "tuple": tuple[int, str, Color],
    "text": Annotated[str, Field(min_length=1, max_length=5, pattern=r"^\w+$")], "optional": int | None,
    "map": dict[str, int], "map of enum": dict[Literal["a", "b"], int], "map of dates": dict[datetime.date, bool],
    "map of ids": dict[uuid.UUID, None],
    "map of texts": dict[Annotated[str, Field(min_length=2)], int], "any": Any, "object": dict[str, Any],
    "several": int | str | list[int] | None, "json": pydantic.JsonValue,
    "uint64": Annotated[int, Field(ge=0, lt=2**64)],
    "byte size": Annotated[pydantic.ByteSize, Field(le=10)],
}  # fmt: skip
NOT_READ = {"byte size", "few digits"}
"""Types that read less than their schema says: any unit of a size, any text for a decimal number."""


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_pydantic_reads_texts_of_its_schema(name: str, mode: Literal["validation", "serialization"]) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(TYPES[name])
    answer = grammar_of(adapter.json_schema(mode=mode))
    assert "grammar" in answer, answer
    for seed in range(0 if name in NOT_READ else 12):
        text = walk(answer["grammar"], Random(seed))
        assert text is not None
        adapter.validate_json(text)


@pytest.mark.parametrize("name", [
    "password", "path", "file-path", "directory-path", "binary", "regex", "multi-host-uri", "fraction", "uri-reference",
    "ipv4network", "ipv6network", "idn-email", "json-pointer", "no such format",
])  # fmt: skip
def test_format_that_is_not_enforced_is_accepted(name: str) -> None:
    assert "grammar" in grammar_of({"type": ["string", "null"], "format": name})


READERS: dict[str, Any] = {
    "date": datetime.date.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "time": datetime.time.fromisoformat,
    "duration": TypeAdapter(datetime.timedelta).validate_python,
    "email": re.compile(r"[^@\s]{1,}@([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z]{2,}").fullmatch,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "ipv6network": ipaddress.IPv6Interface,
    "uuid": uuid.UUID,
    "uri": pydantic.AnyUrl,
}


@pytest.mark.parametrize("name", READERS)
def test_texts_of_a_format_are_ascii_and_pythons_parsers_read_them(name: str) -> None:
    grammar = grammar_of({"type": "string", "format": name})["grammar"]
    for seed in range(40):
        text = walk(grammar, Random(seed))
        assert text is not None
        assert text.isascii()
        if name != "uri":  # a URI need not have a host
            assert READERS[name](text.decode()[1:-1]) is not None


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", ["2024-02-29", "2000-02-29", "9999-12-31"],
         ["2023-02-29", "2023-02-31", "1900-02-29", "0000-01-01", "٢٠٢٤-٠١-٠١", "2024-04-31"]),
        ("time", ["23:59:59Z", "00:00:00.123456+01:30"], ["24:00:00Z", "23:59:60Z", "10:00:00"]),
        ("date-time", ["2024-02-29T10:00:00Z"], ["2024-02-30T10:00:00Z", "2024-02-29 10:00:00Z"]),
        ("uuid4", ["9f1b6e4e-6d5c-4c3f-8c39-4b9f4f1d2a60"], ["9f1b6e4e-6d5c-1c3f-8c39-4b9f4f1d2a60"]),
        ("base64", ["", "QQ==", "QUI=", "QUJD"], ["Q", "QQ=", "Q-=="]),
        ("ipvanyaddress", ["1.2.3.4", "::1", "1::", "1:2:3:4:5:6:7:8"], ["1.2.3", "1:2", ":::", "256.1.1.1"]),
        ("email", ["a.b+c@example.org"], ["a@localhost", "a@[1.2.3.4]", "é@example.org"]),
    ],
)  # fmt: skip
def test_own_formats(name: str, good: list[str], bad: list[str]) -> None:
    both = ({"type": "string", "format": name}, {"format": name, "pattern": "", "allOf": [{"maxLength": 40}]})
    for schema in both:
        assert [text for text in good if not accepts(schema, text)] == []
        assert [text for text in bad if accepts(schema, text)] == []
