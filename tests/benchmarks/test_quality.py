"""KL and agreement against values computed by hand; and a whole run on sides whose logits are known."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks import quality, side_specs
from benchmarks.quality import Comparison, cut_windows, log_softmax
from benchmarks.side_specs import Kind, Models


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


class LetterTokenizer:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 8 for letter in text]


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    models = Models("m", tmp_path / "m.gguf", 8, LetterTokenizer())  # type: ignore[arg-type]
    monkeypatch.setattr(Models, "of", lambda name, bf16: models)
    for name in ("quire", "transformers"):
        monkeypatch.setitem(side_specs.KINDS, name, Kind("tests.benchmarks.fake_side", "json", None, "gguf"))
    text, result = tmp_path / "text", tmp_path / "result.json"
    text.write_text("abcdefgh" * 300)
    arguments = quality.parse_arguments(
        ["--sides", "quire,quire:sharpness=2.0,quire:fails=load", "--text", str(text), "--json", str(result)]
    )
    quality.write_result(quality.run(arguments), arguments)
    value = json.loads(result.read_text())
    assert value["schema"] == "quire.bench.quality/1"
    assert value["num_windows"] == 2
    same, sharper = value["results"]
    assert same["mean_kl_nats"] == pytest.approx(0, abs=1e-9)
    assert sharper["mean_kl_nats"] > 0.1
    assert sharper["top1_agreement"] == 1
    assert same["num_positions"] == 2 * quality.WINDOW_LEN
    assert [side["name"] for side in value["skipped"]] == ["quire:fails=load"]
    assert "quire:sharpness=2.0" in capsys.readouterr().out
