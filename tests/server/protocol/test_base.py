import pydantic
import pytest

from quire.server.protocol.base import Body, FieldError


class Example(Body):
    number: float = 0.0


@pytest.mark.parametrize("value", [{"number": "1"}, {"number": float("nan")}, {"other": 1}])
def test_a_body_is_strict(value: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError):
        Example.model_validate(value)


def test_a_field_error_names_its_field() -> None:
    error = FieldError("n", "n is wrong")
    assert (error.param, str(error)) == ("n", "n is wrong")
