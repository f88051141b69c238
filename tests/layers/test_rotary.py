"""`RotaryEmbedding` and `RopeConfig`: angles by hand, and beside Transformers'."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.layers.rotary import RopeConfig, RotaryEmbedding

LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RopeConfig(theta=5e5), {"rope_type": "default"}),
        (RopeConfig(theta=5e5, kind="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192.0),
            {"rope_type": "llama3", **LLAMA3},
        ),
    ],
)
def test_angles_are_those_of_transformers(ours: RopeConfig, theirs: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=131072,
        rope_parameters={"rope_theta": 5e5, **theirs},
    )  # fmt: skip
    positions = torch.tensor([0, 1, 77, 8191, 8192, 131071])
    cos, sin = LlamaRotaryEmbedding(config)(torch.ones(1), positions[None])
    our_cos, our_sin = RotaryEmbedding(ours.frequencies(64))(positions)
    torch.testing.assert_close(our_cos, cos[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(our_sin[:, 32:], sin[0][:, 32:], atol=1e-6, rtol=0)
    torch.testing.assert_close(our_sin[:, :32], -sin[0][:, :32], atol=1e-6, rtol=0)


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e7])
def test_frequencies_have_the_same_bits_on_every_processor(theta: float) -> None:
    expected = [1 / np.float32(theta ** float(np.float32(i) / np.float32(128))) for i in range(0, 128, 2)]
    np.testing.assert_array_equal(RopeConfig(theta).frequencies(128), expected)


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    scaled = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192.0).frequencies(128)
    plain = RopeConfig(5e5).frequencies(128)
    wavelengths = 2 * math.pi / plain
    np.testing.assert_array_equal(scaled[wavelengths < 2048], plain[wavelengths < 2048])
    np.testing.assert_allclose(scaled[wavelengths > 8192], plain[wavelengths > 8192] / 8, rtol=1e-6)
    between = (wavelengths > 2048) & (wavelengths < 8192)
    assert between.any()
    assert (scaled[between] < plain[between]).all()
    assert (scaled[between] > plain[between] / 8).all()


def test_frequencies_survive_the_meta_device() -> None:
    with torch.device("meta"):
        rotary = RotaryEmbedding(RopeConfig().frequencies(64))
    np.testing.assert_array_equal(rotary.frequencies, RopeConfig().frequencies(64))
