"""The rows of keys in both directions, for every architecture: config.json -> keys -> config.json. Needs no PyTorch."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import astuple, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.errors import ModelError, ModelFileError, UnsupportedModelError
from quire.models.registry import ModelRegistry
from quire.weights.gguf_architectures import ARCHITECTURES
from quire.weights.gguf_config import translate_config, translate_generation_config
from quire.weights.gguf_file import GGUFFile, GGUFTensor
from quire.weights.weight_tensor import BLOCK_FORMATS
from quire_workshop.gguf.export import architecture_for, completed, describe_config
from tests.models.tiny_configs import (
    DEEPSEEK,
    DELTA_NET,
    GEMMA,
    GEMMA4,
    LLAMA,
    QWEN2_MOE,
    TINY_CONFIGS,
    YARN,
)

NOT_SAID: dict[str, tuple[str, ...]] = {
    "llama": ("llama3 rope scaling", "rope parameters of transformers 5"),  # another original context than Llama 3's
    "qwen2": ("window in the upper layer", "layer types"),
    "qwen2_moe": ("no biases, one layer dense, odd sizes",),
    "qwen3_moe": ("not renormalised, one layer dense", "every other layer sparse, all experts, odd sizes"),
    "qwen3_next": (
        "one layer of three attends, a dense layer, groups of 2",
        "attention first, one key head, odd sizes",  # weights of experts are not renormalised
    ),
    "lfm2": ("biases, no adjusted width, odd sizes",),
    "mamba2": ("one group, biases, tied, odd sizes",),
    "olmoe": ("renormalised, one KV head, odd sizes",),
    "gpt_oss": ("no biases of attention, one KV head, odd sizes",),  # the first layer has no window
    "phi3": ("short factors", "long factors"),  # a share of heads that is no share of whole pairs
    "smollm3": ("layers listed, window, odd sizes",),
    "olmo3": ("scaled where there is no window",),  # a factor of attention that YaRN does not have by itself
    "granitemoehybrid": ("state spaces alone, groups of 2, odd sizes",),
    "gemma2": (  # scores are scaled by another number than the head size
        "window in the lower layer", "one KV head, untied, odd sizes", "no caps, no window, biases", "strong caps",
    ),
    "gemma3_text": ("two bases", "linear scaling, logits capped, one KV head"),
    "gemma4_text": (  # another share of rotated pairs
        "keys of earlier layers, inputs of each layer, odd sizes", "experts, values that are keys, one KV head",
        "angles given, biases, untied, one layer of own keys of each kind",
    ),
    "deepseek_v2": ("greedy, yarn",),  # mscale is not mscale_all_dim
    "deepseek_v3": ("sigmoid, two of four groups, yarn", "one group, halves rotated, not normalised, always absorbed"),
    "starcoder2": ("one KV head, no biases, untied, relu",),
    "gpt2": ("scores by layer", "untied, relu, inner size"),
    "gpt_neox": ("no biases, tied, tanh",),
}  # fmt: skip
"""By model type: configs that no GGUF file says. They are refused, or another config is read back."""
CASES = {
    (model_type, name): {"model_type": model_type, **fields}
    for model_type, configs in TINY_CONFIGS.items()
    for name, fields in configs.items()
    if model_type != "opt" and "text_config" not in fields
}


def gguf_of(config: Mapping[str, Any], read: Any) -> GGUFFile:
    """Return a file with the keys, and those tensors without values that a reader of keys looks at."""
    keys, factors = describe_config(completed(config, read), read)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (read.vocab_size, read.hidden_size)}
    shapes |= {f"blk.{layer}.attn_norm.weight": (read.hidden_size,) for layer in range(read.num_layers)}
    state, shares_values = getattr(read, "state_space", None), getattr(read, "shares_values", False)
    for layer in range(read.num_layers):
        present = {
            "attn_q.bias": getattr(read, "qkv_bias", False), "ffn_up.bias": getattr(read, "mlp_bias", False),
            "ssm_conv1d.bias": state is not None and state.conv_bias,
            "attn_q_norm.weight": getattr(read, "has_head_norms", False),
            "attn_v.weight": not (shares_values and read.windows[layer] is None),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{part}": (1,) for part, is_there in present.items() if is_there}
    if not read.tie_word_embeddings:
        shapes["output.weight"] = (read.vocab_size, read.hidden_size)
    if getattr(read, "per_layer_size", 0):
        shapes["per_layer_token_embd.weight"] = (read.per_layer_vocab, 1)
    data, tensors = np.empty(0, np.uint8), {}
    for name, shape in shapes.items():
        tensors[name] = GGUFTensor(name, shape, BLOCK_FORMATS["F32"], 0, 0)
    for name, values in factors.items():
        tensors[name] = GGUFTensor(name, values.shape, BLOCK_FORMATS["F32"], len(data), values.nbytes)
        data = np.concatenate([data, values.view(np.uint8)])
    return GGUFFile(Path("keys.gguf"), 3, keys, tensors, data)


def in_fp32(value: Any) -> Any:
    """Return a value of a config with its numbers as GGUF has them."""
    if is_dataclass(value) and not isinstance(value, type):
        value = astuple(value)
    if isinstance(value, tuple | list):
        return tuple(map(in_fp32, value))
    return np.float32(value) if isinstance(value, float) else value


def read_back(config: Mapping[str, Any]) -> bool:
    """Return whether the keys of a config are read as the same one."""
    model = ModelRegistry.resolve(config)
    read = model.Config.from_hf(config)
    try:
        found = translate_config(gguf_of(config, read))
        other = ModelRegistry.resolve(found)
        again = vars(other.Config.from_hf(found))
    except (ModelFileError, UnsupportedModelError):
        return False
    expected = {name: in_fp32(value) for name, value in vars(read).items()}
    return issubclass(model, other) and all(in_fp32(value) == expected.get(name) for name, value in again.items())


@pytest.mark.parametrize("case", CASES, ids=": ".join)
def test_config_written_as_keys_is_read_back_unless_no_file_says_it(case: tuple[str, str]) -> None:
    model_type, name = case
    assert read_back(CASES[case]) is (name not in NOT_SAID.get(model_type, ()))


CLOSE = {
    "gemma2": {**GEMMA, "query_pre_attn_scalar": 16},
    "gemma3_text": {**GEMMA, "query_pre_attn_scalar": 16, "num_hidden_layers": 7},
    "gemma4_text": {**GEMMA4, "global_head_dim": 16},
    "granitemoehybrid": TINY_CONFIGS["granitemoehybrid"][
        "state spaces with one wide head and experts beside attention"
    ],
    "gpt_oss": {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": {**YARN, "truncate": False}},
    "phi3": {**LLAMA, "partial_rotary_factor": 8 / 12},
    "deepseek_v3": {**DEEPSEEK, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "norm_topk_prob": True},
    "qwen3_next": {**DELTA_NET, **QWEN2_MOE, "full_attention_interval": 2},
    "qwen3_5_text": {**DELTA_NET, "layer_types": ["full_attention", "linear_attention"]},
}
"""Configs of types of which few or none of the above can be written."""


WRONG = (
    [],
    [1],
    ["x"],
    "x",
    -1,
    0,
    1,
    2,
    2**31,
    2**64 - 1,
    0.5,
    math.nan,
    math.inf,
    1e30,
    True,
    [0] * 2,
    [math.nan] * 6,
)


@pytest.mark.parametrize("model_type", sorted({model_type for model_type, _ in CASES}))
def test_no_value_of_any_key_raises_anything_but_a_model_error(model_type: str) -> None:
    """Files without some keys are refused, and so are those with values of other kinds, or read."""
    said = [CASES[case] for case in CASES if case[0] == model_type and case[1] not in NOT_SAID.get(model_type, ())]
    fields = said[0] if said else CLOSE[model_type]
    config = {"model_type": model_type, **fields}
    file = gguf_of(config, ModelRegistry.resolve(config).Config.from_hf(config))
    messages = []
    for key, value in itertools.product(file.metadata, (None, *WRONG)):
        metadata = {name: value if name == key else known for name, known in file.metadata.items()}
        metadata = {name: value for name, value in metadata.items() if value is not None}
        try:
            found = translate_config(replace(file, metadata=metadata))
            ModelRegistry.make_model_config(found, translate_generation_config(file, found["vocab_size"]))
        except ModelError as error:
            messages.append(str(error))
    assert len(messages) > 20
    assert [text for text in messages if not text.isprintable()] == []


SAID = [
    *(config for (model_type, name), config in CASES.items() if name not in NOT_SAID.get(model_type, ())),
    *({"model_type": model_type, **fields} for model_type, fields in CLOSE.items()),
]


@pytest.mark.parametrize("model_type", CLOSE)
def test_config_of_a_type_with_keys_of_its_own_is_read_back(model_type: str) -> None:
    assert read_back({"model_type": model_type, **CLOSE[model_type]})


def test_every_architecture_has_a_config_that_is_read_back() -> None:
    # mistral3 is written for Ministral 3, Mistral is stored as llama.
    assert {architecture_for(config)[0] for config in SAID} == set(ARCHITECTURES)


WRONG = ("x", -1, 0, [], [0, 1, 0], 1.5, 2**30, None)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_key_of_another_type_or_range_is_refused_or_without_effect(architecture: str) -> None:
    """No such key, None standing for one that is missing, ends in another error than those of files."""
    config = next(config for config in SAID if architecture_for(config)[0] == architecture)
    file = gguf_of(config, ModelRegistry.resolve(config).Config.from_hf(config))
    num_refused = 0
    for key, value in itertools.product(file.metadata, WRONG):
        changed = {name: each for name, each in {**file.metadata, key: value}.items() if each is not None}
        try:
            translate_config(replace(file, metadata=changed))
        except (ModelFileError, UnsupportedModelError):
            num_refused += 1
    assert num_refused > 3 * len(file.metadata)
