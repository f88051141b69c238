"""KL and agreement against values computed by hand."""

import math

import numpy as np
import pytest

from benchmarks import quality
from benchmarks.quality import Comparison, cut_windows, log_softmax


def test_log_softmax_is_exact_for_large_logits() -> None:
    found = log_softmax(np.array([[1000.0, 1000.0, -1000.0]], np.float32))
    assert found[0, :2] == pytest.approx([-math.log(2)] * 2, abs=1e-15)


def test_kl_of_two_known_distributions() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    comparison = Comparison()
    comparison.add(np.log(p)[None].repeat(3, 0).astype("f4"), np.log(q)[None].repeat(3, 0).astype("f4"), [0, 1, 0])
    found = comparison.as_json()
    assert found["mean_kl_nats"] == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2), abs=1e-6)
    assert found["top1_agreement"] == 0
    assert found["num_positions"] == 3
    # Tokens 1 and 0 are predicted with 0.5 and 0.25; the first by nothing.
    assert found["perplexity"] == pytest.approx(math.sqrt(2 * 4))


def test_equal_logits_of_more_than_one_chunk() -> None:
    logits = np.random.default_rng(0).normal(size=(quality.CHUNK_ROWS + 5, 11)).astype(np.float32)
    comparison = Comparison()
    comparison.add(logits, logits + 3, list(range(11)) * 13)
    found = comparison.as_json()
    assert found["mean_kl_nats"] == pytest.approx(0, abs=1e-6)
    assert found["top1_agreement"] == 1


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="reference"):
        Comparison().add(np.zeros((2, 3)), np.zeros((2, 4)), [0, 1])


def test_windows_are_full() -> None:
    assert cut_windows(range(10), 6, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cut_windows(range(10), 1, 4) == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match="has 3 tokens"):
        cut_windows(range(3), 1, 4)
