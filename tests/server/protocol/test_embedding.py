import pytest

from quire.server.errors import ApiError
from quire.server.protocol.embedding import EmbeddingRequest
from quire.server.protocol.validation import validate


def test_several_inputs() -> None:
    assert validate(EmbeddingRequest, {"model": "m", "input": [[1], [2, 3]]}).inputs == [[1], [2, 3]]
    assert validate(EmbeddingRequest, {"model": "m", "input": "a"}).inputs == ["a"]


def test_other_encodings_are_refused() -> None:
    with pytest.raises(ApiError) as caught:
        validate(EmbeddingRequest, {"model": "m", "input": "a", "encoding_format": "int8"})
    assert caught.value.param == "encoding_format"
