"""Language models in checkpoints of models that also see images."""

import pytest
import torch

from quire.errors import ModelFileError
from tests.models.harness import Runner, build_model, random_tokens
from tests.models.oracle import Pair
from tests.models.tiny_configs import TINY_CONFIGS, full_config


@pytest.mark.parametrize("model_type", ["gemma3", "gemma4", "mistral3"])
def test_names_of_transformers_4_give_the_same_logits(model_type: str) -> None:
    (fields,) = TINY_CONFIGS[model_type].values()
    pair = Pair(model_type, fields)
    state = {
        name.replace("model.language_model.", "language_model.model.")
        .replace("model.vision_tower.", "vision_tower.")
        .replace("model.embed_vision.", "embed_vision.")
        .replace("model.multi_modal_projector.", "multi_modal_projector.")
        .replace("lm_head.", "language_model.lm_head."): values
        for name, values in pair.oracle.state_dict().items()
        if name != "lm_head.weight" or not pair.oracle.config.tie_word_embeddings
    }
    assert not any(name.startswith("model.") for name in state)
    token_ids = random_tokens(9, 53)
    renamed, plain = Runner(build_model(pair.hf_config, state)), pair.eager()
    assert torch.equal(renamed.run(renamed.add(token_ids)), plain.run(plain.add(token_ids)))


def test_head_that_the_config_denies_is_refused() -> None:
    (fields,) = TINY_CONFIGS["mistral3"].values()
    state = Pair("mistral3", fields).oracle.state_dict()
    with pytest.raises(ModelFileError, match=r"unexpected tensor lm_head\.weight"):
        build_model(full_config("mistral3", {**fields, "tie_word_embeddings": True}), state)
