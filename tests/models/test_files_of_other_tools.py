"""Directories as other tools write them: one name of tied weights, no `architectures`. Transformers reads the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file, save_model

from quire.errors import ModelFileError, UnsupportedModelError
from quire.models.registry import ModelRegistry
from quire.runtime.loader import make_model, plan_share
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.sources import ModelFiles
from tests.models.oracle import make_oracle
from tests.models.tiny_configs import LLAMA, TINY_CONFIGS
from tests.runtime.plan.harness import PlanRunner, make_config

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TOLERANCE = 1e-4
COMPARED = ("llama", "qwen2", "gpt2", "gpt_neox", "opt", "mamba2")


def save_tied(path: Path, model_type: str) -> Any:
    """Write a tied model as `safetensors.torch.save_model` does, without `architectures`; return the oracle."""
    fields = next(iter(TINY_CONFIGS[model_type].values()))
    text = {"text_config": {**fields["text_config"], "tie_word_embeddings": True}} if "text_config" in fields else {}
    model = make_oracle(model_type, {**fields, **text, "tie_word_embeddings": True}).eval()
    model.tie_weights()
    save_model(model, str(path / "model.safetensors"))
    config = {name: value for name, value in model.config.to_dict().items() if name != "architectures"}
    config["_model_name_or_path"] = "someone/model"
    (path / "config.json").write_text(json.dumps(config))
    return model


def open_directory(path: Path) -> Checkpoint:
    return open_checkpoint(ModelFiles("tied", path, "hf", "local"))


def place(checkpoint: Checkpoint) -> None:
    with torch.device("meta"):
        model = make_model(ModelRegistry.make_model_config(checkpoint.hf_config).hf_config)
    plan_share(model, checkpoint.tensors)


@pytest.mark.parametrize("model_type", TINY_CONFIGS)
def test_tied_model_is_found_by_its_type_and_filled_from_either_name(tmp_path: Path, model_type: str) -> None:
    oracle = save_tied(tmp_path, model_type)
    checkpoint = open_directory(tmp_path)
    place(checkpoint)
    if model_type not in COMPARED:
        return
    with torch.inference_mode():
        again = type(oracle).from_pretrained(tmp_path).eval()(torch.tensor([PROMPT]), use_cache=False).logits[0]
    runner = PlanRunner(make_config(checkpoint.hf_config), checkpoint)
    logits = runner.run(runner.add(PROMPT))
    assert (logits - again).abs().max() <= TOLERANCE * again.abs().max()


def test_model_that_ties_nothing_needs_both(tmp_path: Path) -> None:
    oracle = make_oracle("llama", {**LLAMA, "tie_word_embeddings": False})
    tensors = {name: value for name, value in oracle.state_dict().items() if "embed_tokens" not in name}
    save_file(tensors, tmp_path / "model.safetensors")
    for ties in ({"tie_word_embeddings": False}, {}):
        config = {"model_type": "llama", **LLAMA, **ties}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelFileError, match=r"lacks tensor (embed_tokens|lm_head)\.weight"):
            place(open_directory(tmp_path))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2", "stablelm"])
def test_type_without_architectures_names_the_class_that_transformers_takes(model_type: str) -> None:
    fields = transformers.CONFIG_MAPPING[model_type](vocab_size=64).to_dict() | {"architectures": None}
    expected = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[transformers.CONFIG_MAPPING[model_type]].__name__
    assert ModelRegistry.resolve(fields).__name__ in (expected, "TransformersForCausalLM")
    assert ModelRegistry.resolve(fields) is ModelRegistry.resolve({**fields, "architectures": [expected]})


def test_unknown_type_is_named() -> None:
    with pytest.raises((ModelFileError, UnsupportedModelError), match="martian"):
        ModelRegistry.resolve({"model_type": "martian"})
