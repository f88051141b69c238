"""Base of every object in a request body: strict types, no unknown fields.

Next to read: `fields.py`.
"""

from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, StrictBool, WithJsonSchema


class Body(BaseModel):
    """A JSON object with known fields only; numbers are not parsed from strings."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class FieldError(ValueError):
    """A field that contradicts another one. `param` is its path."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def _require(*, expected: bool) -> Callable[[bool], bool]:
    def check(value: bool) -> bool:
        if value is not expected:
            raise ValueError(f"must be {str(expected).lower()}")
        return value

    return check


# `Literal[False]` would accept 0, because it compares with `==`.
AlwaysFalse = Annotated[
    StrictBool, AfterValidator(_require(expected=False)), WithJsonSchema({"const": False, "type": "boolean"})
]
AlwaysTrue = Annotated[
    StrictBool, AfterValidator(_require(expected=True)), WithJsonSchema({"const": True, "type": "boolean"})
]
