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


def test_either_name_turns_normalisation_off() -> None:
    for fields, is_normalized in (({}, True), ({"normalize": False}, False), ({"use_activation": False}, False)):
        assert validate(EmbeddingRequest, {"input": "a", **fields}).is_normalized is is_normalized


def test_defaults_of_vllm_are_taken() -> None:
    fields = {"embed_dtype": "float32", "endianness": "native", "padding": None, "cache_salt": None, "request_id": "a"}
    assert validate(EmbeddingRequest, {"input": "a", **fields})
    with pytest.raises(ApiError, match="endianness is not supported: base64 is of little-endian"):
        validate(EmbeddingRequest, {"input": "a", "endianness": "big"})
