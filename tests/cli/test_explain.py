"""`quire explain` and `quire doctor --calibrate` on the command line."""

import json
from pathlib import Path

import pytest

from quire.insight.explain import explanation, measure
from quire.insight.explain.device import Calibration, calibration_path, read_calibration
from quire.insight.explain.measure import MeasuredVariant
from quire.runtime.hardware import detect_hardware
from tests.cli.command_line import call, parsed
from tests.cli.tiny_directory import make_tiny_directory
from tests.insight.explain.test_explanation import this_cpu


def test_measured_figures_stand_beside_the_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanation, "find_device", lambda name: this_cpu())
    monkeypatch.setattr(measure, "NUM_DECODED", 8)
    directory = make_tiny_directory(tmp_path)
    value = parsed(call("explain", str(directory), "--measure", "--ctx", "32", "--batch", "1,2", "--json"))
    measured = value["sections"][-1]
    assert measured["title"] == "Measured"
    assert [row[0] for row in measured["rows"]] == [
        "prefill of 32 tokens", "decode of 1 stream at 32", "decode of 2 streams at 32"
    ]  # fmt: skip
    assert all(floor < seconds for _, floor, _, seconds, _ in measured["rows"])


def test_calibration_is_kept_and_belongs_to_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CONTEXT", 64)
    monkeypatch.setattr(measure, "ROWS", (1, 8, 64))
    monkeypatch.setattr(measure, "WIDTH", 128)
    monkeypatch.setattr(measure, "WORKING_SETS", (1 << 20, 2 << 20))
    monkeypatch.setattr(measure, "VARIANTS", (MeasuredVariant("bfloat16", "int4", "bfloat16", 2, 2),))
    result = call("doctor", "--calibrate", "--json")
    assert parsed(result)["schema"] == "quire.calibration/1"
    found = read_calibration(detect_hardware("cpu"))
    assert isinstance(found, Calibration)
    assert [rows for rows, _ in found.products["q4m"]] == [1, 8, 64]
    assert all(seconds > 0 for _, seconds in found.products["q4m"])
    assert {"Norm", "WriteKv", "Embed", "Rotary"} <= set(found.others)
    assert found.attention["bf16"][2] > 0
    path = calibration_path()
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_threads": 999}))
    assert read_calibration(detect_hardware("cpu")) is None
    path.write_text("{")
    assert read_calibration(detect_hardware("cpu")) is None


def test_lists_of_settings_are_compared_and_bad_ones_refused() -> None:
    options = ("--device", "L4", "--batch", "1", "--gpu-memory-utilization", "0.9,0.3", "--max-model-len", "256,128")
    value = parsed(call("explain", "tinyllama", *options, "--json"))
    assert value["facts"]["ctx"] == 256
    (table,) = [part for part in value["sections"] if part["title"] == "Settings side by side"]
    assert [row[0:4:3] for row in table["rows"]] == [["0.9", 256], ["0.9", 128], ["0.3", 256], ["0.3", 128]]
    for option, text in (("--gpu-memory-utilization", "1.5"), ("--kv-dtype", "int7"), ("--max-num-seqs", "0")):
        result = call("explain", "tinyllama", "--device", "L4", option, text)
        assert result.exit_code == 2
        assert text in result.stderr
