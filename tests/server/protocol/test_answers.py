import pydantic
import pytest

from quire import __version__
from quire.server.protocol.answers import FINGERPRINT, ErrorAnswer


def test_an_answer_has_its_fields_and_no_others() -> None:
    error = {"message": "m", "type": "t", "param": None, "code": None}
    assert ErrorAnswer.model_validate({"error": error})
    for wrong in ({**error, "detail": 1}, {key: error[key] for key in ("message", "type")}):
        with pytest.raises(pydantic.ValidationError):
            ErrorAnswer.model_validate({"error": wrong})


def test_the_fingerprint_names_the_version() -> None:
    assert __version__ in FINGERPRINT
