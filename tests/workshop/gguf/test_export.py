"""Hugging Face models written as GGUF: the config and the logits come back, or the model is refused."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from quire.errors import UnsupportedModelError
from quire.models.hf_config import language_model
from quire.models.registry import ModelRegistry, model_types
from quire.runtime.loader import make_model, make_stored
from quire.weights.checkpoint import open_checkpoint
from quire.weights.sources import ModelFiles
from quire_workshop.cli.quantize import open_source
from quire_workshop.gguf.export import (
    architecture_for,
    completed,
    describe_config,
    from_tensors,
    name_tensors,
    read_back,
)
from quire_workshop.gguf.quantize import ModelToQuantize, quantize_gguf
from quire_workshop.importance import measure_importance
from tests.cli.tiny_directory import make_tiny_directory
from tests.models.harness import random_tokens
from tests.models.oracle import Pair
from tests.models.test_conformance import assert_close
from tests.models.test_experts import open_saved, save_mxfp4
from tests.models.test_gguf_families import CASES as READ
from tests.models.test_gguf_families import GEMMA, write_gguf
from tests.models.test_quantized_directories import matrices
from tests.models.tiny_configs import DELTA_NET, GEMMA4, GRANITE4, LLAMA, QWEN2_MOE, TINY_CONFIGS, YARN
from tests.runtime.plan.harness import PlanRunner, make_checkpoint, make_config

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
SIGLIP = TINY_CONFIGS["gemma3"]["language model of a model with images"]["vision_config"]
SIGHT = TINY_CONFIGS["gemma4"]["language model of a model with images"]["vision_config"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (model_type, fields) for name, (model_type, fields, *_) in READ.items()},
    "olmo3": ("olmo3", {**READ["olmo3"][1], "rope_scaling": {**YARN, "attention_factor": 0.1 * math.log(4) + 1}}),
    "llama3": ("llama", {**LLAMA, "rope_scaling": LLAMA3}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 7}),
    "qwen3next": ("qwen3_next", {**DELTA_NET, **QWEN2_MOE, "full_attention_interval": 2}),
    **{kind: (kind, next(iter(TINY_CONFIGS[kind].values()))) for kind in ("mistral3", "qwen3_5", "qwen3_5_moe")},
    "gemma3, sees": ("gemma3", {"text_config": {**GEMMA, "num_hidden_layers": 7}, "vision_config": SIGLIP}),
    "gemma4, sees": ("gemma4", {"text_config": {**GEMMA4, "global_head_dim": 16}, "vision_config": SIGHT}),
    "granitehybrid, attention alone": (
        "granitemoehybrid",
        {
            **GRANITE4,
            "position_embedding_type": "rope",
            "num_experts_per_tok": 0,
        },
    ),
    "qwen35": ("qwen3_5_text", {**DELTA_NET, "hidden_size": 64, "full_attention_interval": 2}),
}
OTHERWISE = {"gemma2", "gemma3", "qwen35", "olmo3", "deepseek2", "deepseek2, sigmoid"}
"""Not read and written with the same config or tensors."""
PREDICT_FURTHER = {
    "qwen3_next": ["mtp.fc.weight"], "qwen3_5": ["mtp.fc.weight"], "deepseek_v3": ["model.layers.2.eh_proj.weight"],
}  # fmt: skip
"""Tensors of published models for tokens behind the next, of which files have as many layers."""
WHOLE_STACKS = ("gpt_oss", "gemma4_text")
"""Published with all experts of a layer in one tensor."""
WITH_STATE = ("mamba2", "granitemoehybrid", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
"""Their rates are stored as exponentials, so that the last bits differ."""


def published(model_type: str, fields: dict[str, Any], *, predicts: bool = True) -> Pair:
    """Return a pair whose checkpoint has each expert's matrices apart, if they are published so."""
    pair = Pair(model_type, fields)
    if model_type not in WHOLE_STACKS:
        state = dict(matrices(pair.oracle.state_dict()))
        state |= {name: torch.ones(2, 2) for name in PREDICT_FURTHER.get(model_type, ()) if predicts}
        pair.checkpoint = make_checkpoint(pair.hf_config, state)
    return pair


def export(pair: Pair) -> tuple[ModelToQuantize, dict[str, Any]]:
    """Return the pair's checkpoint under GGUF's names, and the keys."""
    whole = ModelRegistry.resolve(pair.hf_config)
    hf_config, stored = language_model(pair.hf_config, whole, pair.checkpoint.tensors)
    model = make_stored(hf_config, stored)
    config = completed(hf_config, model.config)
    keys, factors = describe_config(config, model.config)
    named = name_tensors(config, model.config, stored, model.layout())
    return from_tensors(keys, named, factors), keys


@pytest.mark.parametrize(("name", "is_bare"), [*((name, False) for name in CASES), ("gpt2", True), ("qwen3", True)])
def test_file_has_the_config_and_logits_of_the_directory(tmp_path: Path, name: str, is_bare: bool) -> None:
    """`is_bare`: names as of a decoder saved alone."""
    pair = published(*CASES[name])
    if is_bare:
        state = pair.oracle.state_dict()
        state = {key.removeprefix("transformer.").removeprefix("model."): values for key, values in state.items()}
        state |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8)} if name == "gpt2" else {}
        pair.checkpoint = make_checkpoint(pair.hf_config, state)
    path = tmp_path / "model.gguf"
    source, keys = export(pair)
    quantize_gguf(source, path, "F32")
    expected = make_stored(pair.hf_config, pair.checkpoint.tensors).config
    checkpoint = open_checkpoint(ModelFiles("tiny", path, "gguf", "test"))
    for config in (checkpoint.hf_config, read_back(source, keys)):
        assert vars(expected).items() >= vars(ModelRegistry.resolve(config).Config.from_hf(config)).items()
    token_ids = random_tokens(33, 53)
    runner, other = PlanRunner(make_config(checkpoint.hf_config), checkpoint), pair.runner()
    found, wanted = (each.run(each.add(token_ids)) for each in (runner, other))
    if pair.hf_config["model_type"] in WITH_STATE:
        assert_close(found, wanted)
    else:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "opt"}, "model_type 'opt' is not written to GGUF"),
        ({"rope_scaling": {**YARN, "attention_factor": 1.2}}, "attention_factor=1.2 is not written"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotary scaling 'dynamic'"),
    ],
)
def test_models_that_gguf_does_not_say_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        describe_config({**LLAMA, "model_type": "llama", **changes}, None)


SAVED = (
    "gpt2",
    "gptneox",
    "mixtral",
    "gpt-oss",
    "deepseek2, apart",
    "lfm2",
    "qwen3next",
    "gemma4, experts",
    "mistral3",
)


@pytest.mark.parametrize("name", SAVED)
def test_directory_that_transformers_saves_becomes_a_file(tmp_path: Path, name: str) -> None:
    """With the names that are published, and a matrix of importance for each product of the file that it becomes."""
    (model_type, fields), vocab = CASES[name], {"vocab_size": 258}
    text = fields.get("text_config")
    pair = Pair(model_type, {**fields, **({"text_config": {**text, **vocab}} if text else vocab)})
    directory, path = make_tiny_directory(tmp_path / "model"), tmp_path / "model.gguf"
    pair.oracle.save_pretrained(directory)
    source = open_source(ModelFiles("tiny", directory, "hf", "test"))
    quantize_gguf(source, path, "F32")
    file = ModelFiles("tiny", path, "gguf", "test")
    checkpoint = open_checkpoint(file)
    token_ids = random_tokens(33, 258)
    runner, other = PlanRunner(make_config(checkpoint.hf_config), checkpoint), pair.runner()
    found, wanted = runner.run(runner.add(token_ids)), other.run(other.add(token_ids))
    assert_close(found, wanted)
    assert torch.equal(found, wanted) or model_type in WITH_STATE
    if name.startswith("gpt") and name != "gpt-oss":
        importance, num_tokens, window_len = measure_importance(
            file, open_source(file).tensors, "sphinx of black quartz " * 30
        )
        assert (num_tokens, window_len) == (635, 127), "windows are shorter than the context"
        products = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
        assert importance.keys() == {f"blk.{layer}.{part}.weight" for layer in (0, 1) for part in products}


def test_every_family_is_written_but_opt_which_gguf_does_not_know() -> None:
    assert set(model_types()) - {model_type for model_type, _ in CASES.values()} == {"opt"}
    assert not {"opt", "OPT"} & {*gguf.MODEL_ARCH_NAMES.values()}
    with pytest.raises(UnsupportedModelError, match=r"model_type .opt. is not written to GGUF here; if llama\.cpp"):
        architecture_for({"model_type": "opt"})


@pytest.mark.parametrize("name", sorted(READ.keys() - OTHERWISE))
def test_file_has_the_tensors_that_the_gguf_package_writes(tmp_path: Path, name: str) -> None:
    """Transformed as llama.cpp's converter does, which also writes nearly all of these keys."""
    model_type, fields, arch, write = READ[name]
    pair = published(model_type, fields, predicts=False)
    write_gguf(tmp_path / "expected.gguf", pair, arch, write)
    quantize_gguf(export(pair)[0], tmp_path / "found.gguf", "F32")
    expected, found = (gguf.GGUFReader(tmp_path / f"{kind}.gguf") for kind in ("expected", "found"))
    wanted = {tensor.name: tensor for tensor in expected.tensors}
    assert wanted.keys() == {tensor.name for tensor in found.tensors}
    for tensor in found.tensors:
        assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
        assert trimmed(tensor.shape) == trimmed(wanted[tensor.name].shape)
        assert np.allclose(tensor.data.ravel(), wanted[tensor.name].data.ravel(), rtol=1e-6, atol=0)
    keys = {
        key: field.contents() for key, field in expected.fields.items() if "." in key and not key.startswith("GGUF")
    }
    differing = {key for key, value in keys.items() if key in found.fields and found.fields[key].contents() != value}
    assert not differing
    assert {key for key in keys if key not in found.fields} <= {"phi3.attention.sliding_window"}  # 0


@pytest.mark.parametrize(("file_type", "kept"), [("F32", "F32"), ("Q4_K_M", "MXFP4")])
def test_mxfp4_experts_are_decoded_or_stay_as_they_are(tmp_path: Path, file_type: str, kept: str) -> None:
    pair, path = save_mxfp4(tmp_path), tmp_path / "model.gguf"
    pair.checkpoint = open_saved(tmp_path)
    formats = quantize_gguf(export(pair)[0], path, file_type)
    assert {form for name, form in formats.items() if name.endswith("_exps.weight")} == {kept}
    found = open_checkpoint(ModelFiles("tiny", path, "gguf", "test")).tensors
    for layer, expert in ((0, 0), (1, 3)):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate_up, down = (pair.oracle.state_dict()[f"{prefix}.{part}_proj"][expert].T for part in ("gate_up", "down"))
        for part, expected in (("gate", gate_up[0::2]), ("up", gate_up[1::2]), ("down", down)):
            assert np.array_equal(found[f"{prefix}.{expert}.{part}_proj.weight"].to_numpy(), expected.numpy())


def trimmed(shape: Sequence[int]) -> list[int]:
    """Return a shape without the outermost dimensions of 1, which GGUF cannot tell."""
    sizes = list(map(int, shape))
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return sizes


def test_tensor_without_a_name_is_refused() -> None:
    pair = Pair(*CASES["qwen2"])
    layout = make_model(pair.hf_config).layout()
    with pytest.raises(UnsupportedModelError, match=r"tensor model.layers.1.self_attn.q_proj.weight has no GGUF name"):
        name_tensors({**pair.hf_config, "num_hidden_layers": 1}, None, pair.checkpoint.tensors, layout)
