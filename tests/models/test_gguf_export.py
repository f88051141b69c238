"""Hugging Face models written as GGUF: the config and the logits come back, or the model is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.cli.quantize import open_source
from quire.errors import UnsupportedModelError
from quire.insight.importance import measure_importance
from quire.models.registry import ModelRegistry, model_types
from quire.weights.checkpoint import open_checkpoint
from quire.weights.gguf_export import architecture_for, completed, describe_config, name_tensors
from quire.weights.quantize import quantize_gguf
from quire.weights.quantize_source import from_tensors, read_back
from quire.weights.sources import ModelFiles
from tests.cli.tiny_directory import make_tiny_directory
from tests.models.harness import random_tokens
from tests.models.oracle import Pair
from tests.models.test_gguf_families import GEMMA, MINISTRAL
from tests.models.test_quantized_directories import matrices
from tests.models.tiny_configs import LLAMA, TINY_CONFIGS, YARN
from tests.runtime.plan.harness import PlanRunner, make_checkpoint, make_config

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
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 7}),
    "glm4": ("glm4", TINY_CONFIGS["glm4"]["neighbouring pairs"]),
    "phi3": ("phi3", {**LLAMA, "pad_token_id": None}),
    "starcoder2": ("starcoder2", TINY_CONFIGS["starcoder2"]["biases, window"]),
    "ministral3": ("ministral3", MINISTRAL),
    "gpt2": ("gpt2", TINY_CONFIGS["gpt2"]["three heads"]),
    "gpt_neox": ("gpt_neox", TINY_CONFIGS["gpt_neox"]["side by side"]),
    "gpt_neox, in turn": ("gpt_neox", TINY_CONFIGS["gpt_neox"]["one after the other, three heads"]),
    "mixtral": ("mixtral", TINY_CONFIGS["mixtral"]["two of four"]),
    "olmoe": ("olmoe", TINY_CONFIGS["olmoe"]["two of eight"]),
    "qwen2_moe": ("qwen2_moe", TINY_CONFIGS["qwen2_moe"]["shared expert"]),
    "qwen3_moe": ("qwen3_moe", TINY_CONFIGS["qwen3_moe"]["two of eight, head size of its own"]),
}


@pytest.mark.parametrize(("name", "is_bare"), [*((name, False) for name in CASES), ("gpt2", True), ("qwen3", True)])
def test_file_has_the_config_and_logits_of_the_directory(tmp_path: Path, name: str, is_bare: bool) -> None:
    """Each expert's matrices apart, as they are published. `is_bare`: names as of a decoder saved alone."""
    pair = Pair(*CASES[name])
    state = dict(matrices(pair.oracle.state_dict()))
    if is_bare:
        state = {key.removeprefix("transformer.").removeprefix("model."): values for key, values in state.items()}
        state |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8)} if name == "gpt2" else {}
    pair.checkpoint = make_checkpoint(pair.hf_config, state)
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
        ({"model_type": "mamba2"}, "model_type 'mamba2' is not written to GGUF"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotary scaling 'dynamic'"),
    ],
)
def test_models_that_gguf_does_not_say_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        describe_config({**LLAMA, "model_type": "llama", **changes})


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "mixtral"])
def test_directory_that_transformers_saves_becomes_a_file(tmp_path: Path, name: str) -> None:
    """With the names that are published, and a matrix of importance for each product of the file that it becomes."""
    model_type, fields = CASES[name]
    pair = Pair(model_type, {**fields, "vocab_size": 258})
    directory, path = make_tiny_directory(tmp_path / "model"), tmp_path / "model.gguf"
    pair.oracle.save_pretrained(directory)
    source = open_source(ModelFiles("tiny", directory, "hf", "test"))
    quantize_gguf(source, path, "F32")
    file = ModelFiles("tiny", path, "gguf", "test")
    checkpoint = open_checkpoint(file)
    token_ids = random_tokens(33, 258)
    runner, other = PlanRunner(make_config(checkpoint.hf_config), checkpoint), pair.runner()
    assert torch.equal(runner.run(runner.add(token_ids)), other.run(other.add(token_ids)))
    if name != "mixtral":
        importance, num_tokens, window_len = measure_importance(
            file, open_source(file).tensors, "sphinx of black quartz " * 30
        )
        assert (num_tokens, window_len) == (635, 127), "windows are shorter than the context"
        products = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
        assert importance.keys() == {f"blk.{layer}.{part}.weight" for layer in (0, 1) for part in products}


def test_every_other_family_is_refused_by_name() -> None:
    for model_type in set(model_types()) - {model_type for model_type, _ in CASES.values()}:
        with pytest.raises(UnsupportedModelError, match=f"model_type '{model_type}' is not written to GGUF here"):
            architecture_for({"model_type": model_type})


def test_tensor_without_a_name_is_refused() -> None:
    pair = Pair(*CASES["qwen2"])
    with pytest.raises(UnsupportedModelError, match=r"tensor model.layers.1.self_attn.q_proj.weight has no GGUF name"):
        name_tensors({**pair.hf_config, "num_hidden_layers": 1}, pair.checkpoint.tensors)
