"""KV cache of MHA, GQA, MQA, MLA and windows: known sizes, and times of the real kernel."""

import os

import pytest

from quire.errors import ConfigError
from quire.insight.compare import run
from quire.insight.compare.results import Settings


def test_sizes_of_llama_2_7b_and_measured_times() -> None:
    comparison = run("attention", Settings(context=128))
    names = [name for name, _ in comparison.columns]
    rows = {row[0]: dict(zip(names, row, strict=True)) for row in comparison.rows}
    per_token = {kind: row["KV per token"] for kind, row in rows.items()}
    kib = 1024
    assert per_token == {
        "MHA": 512 * kib, "GQA (8 KV heads)": 128 * kib, "MQA": 16 * kib, "MHA, window 32": 512 * kib,
        "MLA (512 + 64)": 32 * 576 * 2,
    }  # fmt: skip
    assert rows["MHA"]["KV of 128"] == rows["MHA"]["a decode reads"] == 128 * 512 * kib
    assert rows["MHA, window 32"]["a decode reads"] == 32 * 512 * kib
    measured = {kind: row["measured, 1 layer × 32"] for kind, row in rows.items()}
    assert measured.pop("MLA (512 + 64)") is None
    assert all(seconds > 0 for seconds in measured.values())
    assert comparison.outputs_equal is None
    assert "QUIRE_TRACE" not in os.environ


def test_fake_model_has_no_kernels_to_measure() -> None:
    with pytest.raises(ConfigError, match="fake"):
        run("attention", Settings(model="fake"))
