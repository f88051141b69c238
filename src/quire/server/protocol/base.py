"""Base of every object in a request body: strict types, no unknown fields.

Next to read: `fields.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticKnownError


class Body(BaseModel):
    """A JSON object with known fields only; numbers are not parsed from strings."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class FieldError(ValueError):
    """A field that contradicts another one. `param` is its path."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def _check_boolean(value: Any) -> Any:
    if not isinstance(value, bool):
        raise PydanticKnownError("bool_type")
    return value


# `Literal` compares with `==`, and `0 == False`.
AlwaysFalse = Annotated[Literal[False], BeforeValidator(_check_boolean)]
AlwaysTrue = Annotated[Literal[True], BeforeValidator(_check_boolean)]
