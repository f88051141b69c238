import pydantic
import pytest

from quire.server.protocol.models import ModelCard

CARD = {
    "id": "m", "object": "model", "created": 1, "owned_by": "quire", "root": "m", "parent": None, "max_model_len": 8,
}  # fmt: skip


def test_a_card_says_how_long_prompts_may_be() -> None:
    assert ModelCard.model_validate(CARD).max_model_len == 8
    with pytest.raises(pydantic.ValidationError):
        ModelCard.model_validate({**CARD, "max_model_len": None})
