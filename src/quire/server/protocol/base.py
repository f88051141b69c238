"""What every object of a request is made of.

Next to read: `fields.py`.
"""

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """A JSON object with known fields only; numbers are not read out of strings."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class FieldError(ValueError):
    """A field is wrong in a way that only other fields show. `param` is its path."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param
