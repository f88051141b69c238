import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.errors import ModelFileError, UnsupportedModelError
from quire.runtime.loader import ModelShare, make_model, plan_share
from quire.weights.checkpoint import open_checkpoint
from quire.weights.gguf_config import translate_config, translate_generation_config
from quire.weights.gguf_file import read_gguf
from quire.weights.gguf_rope import llama3_factors
from quire.weights.sources import ModelFiles
from tests.weights.gguf_builder import VOCAB_SIZE, TinyModel


def config_of(path: Path, model: TinyModel) -> dict[str, Any]:
    model.write(path / "model.gguf")
    return translate_config(read_gguf(path / "model.gguf"))


def test_tied_head_biases_and_head_size(tmp_path: Path) -> None:
    config = config_of(tmp_path, TinyModel(tied=True, bias=True, head_size=32))
    assert config["tie_word_embeddings"] is True
    assert config["attention_bias"] is True
    assert config["head_dim"] == 32


def test_qwen2_with_a_sliding_window_slides_in_every_layer(tmp_path: Path) -> None:
    config = config_of(tmp_path, TinyModel("qwen2", bias=True, changes={"qwen2.attention.sliding_window": 32}))
    assert (config["use_sliding_window"], config["sliding_window"], config["max_window_layers"]) == (True, 32, 0)


def test_llama3_rope_factors(tmp_path: Path) -> None:
    factors = llama3_factors(8.0, head_size=16, theta=500000.0).astype(np.float32)
    model = TinyModel(tensors={"rope_freqs.weight": factors}, changes={"llama.rope.freq_base": 500000.0})
    assert config_of(tmp_path, model)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"type": "none"}, None),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "linear", "factor": 1.0}, None),
        ({"type": "linear", "factor": 0.0}, None),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, keys: dict[str, Any], expected: dict[str, Any] | None) -> None:
    model = TinyModel(changes={f"llama.rope.scaling.{key}": value for key, value in keys.items()})
    assert config_of(tmp_path, model)["rope_scaling"] == expected


def test_generation_config(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.eot_token_id": 5, "general.sampling.temp": 0.7, "general.sampling.top_k": 20}
    TinyModel(changes=changes).write(tmp_path / "model.gguf")
    file = read_gguf(tmp_path / "model.gguf")
    assert translate_generation_config(file, VOCAB_SIZE) == {
        "eos_token_id": [2, 5],
        "temperature": 0.7,
        "top_k": 20,
    }


@pytest.mark.parametrize("absent", [None, 0xFFFFFFFF, VOCAB_SIZE, "2"])
def test_model_without_an_end_token(tmp_path: Path, absent: int | None) -> None:
    model = TinyModel(changes={"tokenizer.ggml.eos_token_id": absent})
    assert config_of(tmp_path, model)["eos_token_id"] is None
    assert translate_generation_config(read_gguf(tmp_path / "model.gguf"), VOCAB_SIZE) == {"eos_token_id": []}


def test_values_of_other_types_that_say_the_same_are_read(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    changes = {"llama.embedding_length": 64.0, "llama.attention.causal": 1, "llama.rope.scale_linear": 0.0}
    assert config_of(tmp_path / "other", TinyModel(changes=changes)) == config_of(tmp_path, TinyModel())


BAD = {
    "experts without a number per token": ({"llama.expert_count": 8}, r"llama\.expert_used_count is missing"),
    "missing": ({"llama.context_length": None}, r"llama\.context_length is missing"),
    "type": ({"llama.embedding_length": "64"}, "not a positive integer"),
    "predictors": ({"llama.nextn_predict_layers": 2**32 - 1}, "nextn_predict_layers is 4294967295, not less than the"),
    "architecture": ({"general.architecture": 7}, "general.architecture is missing, or no text"),
    "zero": ({"llama.attention.head_count": 0}, "not a positive integer"),
    "layers huge": ({"llama.block_count": 2**32 - 1}, "4,294,967,295 layers"),
    "heads huge": ({"llama.attention.head_count": 2**32 - 1}, "multiple"),
    "kv heads": ({"llama.attention.head_count_kv": 3}, "4 query heads are not a multiple of 3"),
    "head size odd": ({"llama.attention.key_length": 15}, "odd"),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "not a positive number"),
    "theta": ({"llama.rope.freq_base": -1.0}, "not a positive number"),
    "flag": ({"llama.attention.causal": "yes"}, "not true or false"),
    "half": ({"llama.embedding_length": 64.5}, "not a positive integer"),
    "window": ({"llama.attention.sliding_window": "x"}, "not a positive integer"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=list(BAD))
def test_metadata_that_contradict_the_tensors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        config_of(tmp_path, TinyModel(changes=changes))
    assert "model.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


MISFITS = {
    "experts that are not there": (
        {"llama.expert_count": 8, "llama.expert_used_count": 2},
        r"lacks tensors layers\.0\.mlp\.gate\.weight",
    ),
    "layers": ({"llama.block_count": 3}, r"lacks tensors layers\.2\.input_layernorm\.weight"),
    "width": ({"llama.embedding_length": 128}, r"embed_tokens\.weight \[40, 64\], .* \[40, 128\]"),
    "mlp width": ({"llama.feed_forward_length": 97}, r"gate_proj\.weight \[96, 64\], .* \[194, 64\]"),
    "heads": ({"llama.attention.head_count": 2}, r"k_proj\.weight \[32, 64\], .* \[192, 64\]"),
    "key heads cut": (
        {"llama.attention.key_length": 24},
        r"rows of 'blk\.0\.attn_q\.weight' are not whole heads of 24",
    ),
}


def place(path: Path, model: TinyModel) -> ModelShare:
    """Plan the places of the file's tensors in the model that its metadata make."""
    model.write(path / "model.gguf")
    checkpoint = open_checkpoint(ModelFiles("tiny", path / "model.gguf", "gguf", "local"))
    with torch.device("meta"):
        built = make_model(checkpoint.hf_config)
    return plan_share(built, checkpoint.tensors)


def test_tensors_of_the_model_have_their_places(tmp_path: Path) -> None:
    share = place(tmp_path, TinyModel(bias=True))
    assert {placement.parameter_name for placement in share.placements} == set(share.parameters)


@pytest.mark.parametrize(("changes", "message"), MISFITS.values(), ids=list(MISFITS))
def test_metadata_that_the_tensors_do_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    if "llama.attention.key_length" in changes:
        changes = changes | {"llama.attention.value_length": 24, "llama.rope.dimension_count": 24}
    with pytest.raises(ModelFileError, match=message):
        place(tmp_path, TinyModel(changes=changes))


UNSUPPORTED = {
    "unknown key": ({"llama.attention.clamp_kqv": 8.0}, r"llama\.attention\.clamp_kqv.*mathematics"),
    "not causal": ({"llama.attention.causal": False}, "not causal"),
    "longrope": ({"llama.rope.scaling.type": "longrope"}, "longrope.*linear"),
    "partial rope": ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8"),
    "value size": ({"llama.attention.value_length": 32}, "value_length is 32"),
    "heads per layer": ({"llama.attention.head_count": [4, 2]}, "differs between layers"),
}


@pytest.mark.parametrize(("changes", "message"), UNSUPPORTED.values(), ids=list(UNSUPPORTED))
def test_metadata_that_change_the_mathematics_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_of(tmp_path, TinyModel(changes=changes))


def test_unknown_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"'qwen' is not supported.*did you mean 'qwen.*llama, qwen2, qwen3"
    ):
        config_of(tmp_path, TinyModel("qwen"))


def test_tensors_without_a_place(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_rot_embd\.weight' has no place in Quire's llama"):
        place(tmp_path, TinyModel(tensors={"blk.0.attn_rot_embd.weight": np.zeros(4, np.float32)}))
    with pytest.raises(ModelFileError, match=r"unexpected tensor model\.layers\.0\.self_attn\.q_norm\.weight"):
        place(tmp_path, TinyModel(tensors={"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}))
    with pytest.raises(ModelFileError, match=r"lacks tensors? .*bias"):
        place(tmp_path, TinyModel(bias=True, tensors={"blk.1.attn_v.bias": None}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("token_embd.weight", "token_embd.weight"),
        ("output_norm.weight", r"lacks tensor norm\.weight"),
        ("blk.1.ffn_up.weight", r"lacks tensor layers\.1\.mlp\.up_proj"),
    ],
)
def test_missing_tensors(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        place(tmp_path, TinyModel(tensors={name: None}))


def test_strange_rope_factors(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="not those of Llama 3"):
        config_of(tmp_path, TinyModel(tensors={"rope_freqs.weight": np.linspace(1, 2, 8, dtype=np.float32)}))
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight"):
        config_of(tmp_path, TinyModel(tensors={"rope_freqs.weight": np.ones(9, np.float32)}))


@pytest.mark.parametrize(("factor", "head_size", "theta"), [(8.0, 128, 500000.0), (32.0, 64, 500000.0), (4.0, 64, 1e4)])
def test_factors_divide_the_frequencies_of_transformers(factor: float, head_size: int, theta: float) -> None:
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": theta,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=head_size, num_attention_heads=1, head_dim=head_size, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / theta ** (np.arange(0, head_size, 2) / head_size)
    factors = llama3_factors(factor, head_size=head_size, theta=theta)
    assert np.allclose(plain / factors, scaled.double().numpy(), rtol=1e-5)


def test_ones_mean_no_scaling(tmp_path: Path) -> None:
    model = TinyModel(tensors={"rope_freqs.weight": np.ones(8, np.float32)})
    assert config_of(tmp_path, model)["rope_scaling"] is None


@pytest.mark.parametrize("bad", [2.0, 0.5, -1.0, 0.0, math.nan, math.inf])
def test_other_factors_are_refused(tmp_path: Path, bad: float) -> None:
    factors = llama3_factors(8.0, head_size=16, theta=500000.0).astype(np.float32)
    factors[3] = bad
    model = TinyModel(tensors={"rope_freqs.weight": factors}, changes={"llama.rope.freq_base": 500000.0})
    with pytest.raises(UnsupportedModelError, match="RoPE factors"):
        config_of(tmp_path, model)
