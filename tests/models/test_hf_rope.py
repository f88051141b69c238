"""Rotary angles read from configs, beside Transformers': at positions inside and beyond the original context."""

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.layers.rotary import RopeConfig, RotaryEmbedding
from quire.models.hf_llama import LlamaConfig
from tests.models.harness import random_tokens
from tests.models.oracle import Pair
from tests.models.test_conformance import assert_close
from tests.models.tiny_configs import LLAMA

CONTEXT, ORIGINAL, HEAD_SIZE = 131072, 4096, 64
FACTORS = {
    "short_factor": [1.0 + 0.01 * i for i in range(HEAD_SIZE // 2)],
    "long_factor": [1.0 + i for i in range(HEAD_SIZE // 2)],
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": ORIGINAL}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL, **FACTORS}
FIXED = {
    "yarn": YARN,
    "yarn, no original context": {"rope_type": "yarn", "factor": 8.0},
    "yarn, other ramp": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn, ramp of one step": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn, factor of cosines": {**YARN, "attention_factor": 0.7},
    "yarn, two scales": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.4},
    "yarn, equal scales": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn, part of each head": {**YARN, "partial_rotary_factor": 0.5},
}


def read(parameters: dict[str, Any], max_len: int | None = None) -> RopeConfig:
    fields = {**LLAMA, "hidden_size": 2 * HEAD_SIZE, "num_attention_heads": 2, "max_position_embeddings": CONTEXT}
    config = LlamaConfig.from_hf({**fields, "rope_parameters": {"rope_theta": 5e5, **parameters}})
    return config.rope if max_len is None else config.for_length(max_len).rope


def oracle(parameters: dict[str, Any], positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin [T, C] of Transformers for a forward whose last position is the last of these."""
    config = transformers.LlamaConfig(
        hidden_size=2 * HEAD_SIZE, num_attention_heads=2, max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": 5e5, **parameters},
    )  # fmt: skip
    cos, sin = LlamaRotaryEmbedding(config)(torch.ones(1), positions[None])
    return cos[0], sin[0]


def check(rope: RopeConfig, parameters: dict[str, Any], positions: list[int]) -> None:
    at = torch.tensor(positions)
    cos, sin = RotaryEmbedding.of(rope, HEAD_SIZE)(at)
    their_cos, their_sin = oracle(parameters, at)
    half = cos.shape[1] // 2
    # PyTorch's powers are not always the nearest fp32 value, and an angle has its frequency's error times the position.
    tolerance = 1e-6 + 2.0**-23 * at[:, None] * torch.from_numpy(rope.frequencies(HEAD_SIZE)).repeat(2)
    their_sin[:, :half] *= -1
    assert ((cos - their_cos).abs() <= tolerance).all()
    assert ((sin - their_sin).abs() <= tolerance).all()


@pytest.mark.parametrize("name", FIXED)
def test_fixed_angles_are_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = FIXED[name]
    if "partial_rotary_factor" in parameters:
        monkeypatch.setattr(LlamaConfig, "rope_options", {"rotates_part": True})
    check(read(parameters), parameters, [0, 1, 77, ORIGINAL - 1, ORIGINAL, 3 * ORIGINAL, CONTEXT - 1])


@pytest.mark.parametrize(
    ("max_len", "last"), [(ORIGINAL, 77), (ORIGINAL, ORIGINAL - 1), (CONTEXT, ORIGINAL), (ORIGINAL + 1, 9000)]
)
def test_longrope_takes_short_or_long_factors_by_the_longest_sequence(max_len: int, last: int) -> None:
    """Equal to Transformers for sequences that are as long or short as the longest one."""
    for given in ({}, {"attention_factor": 1.25}, {"factor": 4.0}):
        check(read({**LONGROPE, **given}, max_len), {**LONGROPE, **given}, [0, 1, last])


def test_longrope_without_a_limit_takes_the_factors_of_the_whole_context() -> None:
    assert read(LONGROPE) == read(LONGROPE, CONTEXT)
    assert read(LONGROPE).attention_factor > 1


@pytest.mark.parametrize("max_len", [100, CONTEXT, CONTEXT + 1, 2 * CONTEXT])
def test_dynamic_takes_the_frequencies_of_the_longest_sequence(max_len: int) -> None:
    """Equal to Transformers for a sequence of that length, and for all within the original context."""
    parameters = {"rope_type": "dynamic", "factor": 2.0}
    check(read(parameters, max_len), parameters, [0, 1, 9000, max_len - 1])


def test_context_is_that_which_the_angles_are_made_for() -> None:
    fields = {**LLAMA, "max_position_embeddings": 100}
    for parameters, expected in (
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50}, 200),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 25}, 100),
        ({"rope_type": "dynamic", "factor": 4.0}, 400),
        ({"rope_type": "linear", "factor": 4.0}, 100),
    ):
        config = LlamaConfig.from_hf({**fields, "rope_parameters": parameters})
        assert config.context_len == expected


FACTORS_OF_6 = {"short_factor": [1.0, 1.2, 1.4, 1.6, 1.8, 2.0], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}


@pytest.mark.parametrize(
    ("parameters", "max_model_len", "num_tokens"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, 128, 67),
        ({"rope_type": "dynamic", "factor": 4.0}, 200, 200),
        ({"rope_type": "longrope", "original_max_position_embeddings": 64, **FACTORS_OF_6}, 64, 60),
        ({"rope_type": "longrope", "original_max_position_embeddings": 64, **FACTORS_OF_6}, 100, 67),
    ],
)
def test_max_model_len_chooses_frequencies_planned_and_op_by_op(
    parameters: dict[str, Any], max_model_len: int, num_tokens: int
) -> None:
    pair = Pair("llama", {**LLAMA, "rope_parameters": parameters})
    token_ids = random_tokens(num_tokens, 53)
    expected = pair.expected(token_ids)
    for runner in pair.runners(max_model_len=max_model_len):
        assert_close(runner.run(runner.add(token_ids), chunk=50), expected)
