"""Hugging Face models written as GGUF: the config and the logits come back, or the model is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import UnsupportedModelError
from quire.models.registry import ModelRegistry
from quire.weights.checkpoint import open_checkpoint
from quire.weights.gguf_export import completed, describe_config, name_tensors
from quire.weights.quantize import quantize_gguf
from quire.weights.quantize_source import from_tensors, read_back
from quire.weights.sources import ModelFiles
from tests.models.harness import random_tokens
from tests.models.oracle import Pair
from tests.models.tiny_configs import LLAMA, TINY_CONFIGS, YARN
from tests.runtime.plan.harness import PlanRunner, make_config

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", TINY_CONFIGS["llama"]["all biases"]),
    "llama, yarn": ("llama", {**LLAMA, "rope_scaling": YARN}),
    "llama3": ("llama", {**LLAMA, "rope_scaling": LLAMA3}),
    "mistral": ("mistral", {**LLAMA, "sliding_window": 5}),
    "qwen2": ("qwen2", TINY_CONFIGS["qwen2"]["plain"]),
    "qwen3": ("qwen3", TINY_CONFIGS["qwen3"]["head size of its own"]),
    "smollm3": ("smollm3", {**LLAMA, "num_hidden_layers": 4, "pad_token_id": None}),
    "olmo2": ("olmo2", TINY_CONFIGS["olmo2"]["three heads, odd sizes"]),
    "granite": ("granite", TINY_CONFIGS["granite"]["multiples"]),
}


@pytest.mark.parametrize("name", CASES)
def test_file_has_the_config_and_logits_of_the_directory(tmp_path: Path, name: str) -> None:
    pair = Pair(*CASES[name])
    config_class = ModelRegistry.resolve(pair.hf_config).Config
    expected = config_class.from_hf(pair.hf_config)
    config = completed(pair.hf_config, expected)
    keys, factors = describe_config(config)
    source = from_tensors(keys, name_tensors(config, pair.checkpoint.tensors), factors)
    path = tmp_path / "model.gguf"
    quantize_gguf(source, path, "F32")
    checkpoint = open_checkpoint(ModelFiles("tiny", path, "gguf", "test"))
    assert config_class.from_hf(checkpoint.hf_config) == expected
    assert config_class.from_hf(read_back(source, keys)) == expected
    token_ids = random_tokens(33, 53)
    runner, other = PlanRunner(make_config(checkpoint.hf_config), checkpoint), pair.runner()
    found, wanted = (each.run(each.add(token_ids)) for each in (runner, other))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' has no GGUF names"),
        ({"model_type": "mamba2"}, "model_type 'mamba2' has no GGUF names"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotary scaling 'dynamic'"),
    ],
)
def test_models_that_gguf_does_not_say_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        describe_config({**LLAMA, "model_type": "llama", **changes})


def test_tensor_without_a_name_is_refused() -> None:
    pair = Pair(*CASES["qwen2"])
    with pytest.raises(UnsupportedModelError, match=r"tensor model.layers.1.self_attn.q_proj.weight has no GGUF name"):
        name_tensors({**pair.hf_config, "num_hidden_layers": 1}, pair.checkpoint.tensors)
