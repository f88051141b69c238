"""The whole way with a real engine and a tiny model: an answer, and every refusal as one line with its exit code."""

import os
import sys
from pathlib import Path

import pytest

from quire.cli.main import cli
from quire.runtime.machine_limits import MachineLimits
from tests.cli.command_line import Terminal, call, parsed


def test_tiny_model_answers(tiny: str) -> None:
    arguments = ("run", tiny, "Hi there", "--max-tokens", "5", "--temperature", "0", "--dtype", "float32")
    value = parsed(call(*arguments, "--json", "--logprobs", "2", "--prompt-logprobs", "0"))
    assert value["prompt_logprobs"][0] is None
    assert value["prompt_logprobs"][1][0]["text"] == "u"
    assert value["num_prompt_tokens"] == len("<user>Hi there<a>")
    assert len(value["token_ids"]) == 5
    assert value["finish_reason"] == "length"
    logprobs = value["completions"][0]["logprobs"]
    assert [position[0]["token_id"] for position in logprobs] == value["token_ids"]
    result = call(*arguments)
    assert result.stdout == value["text"] + "\n"
    assert "[length] prompt 17 tok · 5 new" in result.stderr
    assert "ctx 22/128 (17%)" in result.stderr


def test_missing_instruction_set_warns_and_debug_log_shows_events(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire._native.requested_isa_missing", True)
    monkeypatch.setenv("QUIRE_ISA", "mmx")
    monkeypatch.setattr("quire._native.unbuilt_isa", "amx")
    arguments = ("run", tiny, "Hi there", "--max-tokens", "1")
    result = call(*arguments)
    assert "WARNING quire.engine: QUIRE_ISA=mmx is unknown or not available here" in result.stderr
    assert "WARNING quire.engine: Quire was built without the kernels for amx" in result.stderr
    assert "DEBUG" not in result.stderr
    result = call(*arguments, "-vv")
    assert "  device = cpu" in result.stderr
    assert "total: " in result.stderr
    assert "DEBUG quire.engine: device = cpu" in result.stderr
    assert "DEBUG quire.scheduler: finish" in result.stderr
    assert "QUIRE_LOGGING_LEVEL" not in os.environ, "servers of later tests would log more"


@pytest.mark.model
def test_quantization_of_a_quantised_file_warns(smollm2_path: Path) -> None:
    result = call("run", str(smollm2_path), "Hi there", "--max-tokens", "1", "--quantization", "int8")
    assert result.exit_code == 0
    assert "quantization=int8 has no effect on weights that are stored in 8 bit or less" in result.stderr


def test_gpu_memory_utilization_on_a_cpu_warns_and_names_the_option_to_use(tiny: str) -> None:
    result = call("run", tiny, "Hi", "--max-tokens", "1", "--gpu-memory-utilization", "0.5")
    assert "gpu_memory_utilization=0.5 has no effect on a CPU: kv_cache_memory_bytes chooses" in result.stderr
    assert "no effect" not in call("run", tiny, "Hi", "--max-tokens", "1").stderr


def test_bench_of_a_real_engine(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = MachineLimits(1e9, dict.fromkeys(("bf16", "fp32", "int8"), 1e12))
    monkeypatch.setattr("quire.insight.explain.phases.measure_limits", lambda device, names, working_set: limits)
    value = parsed(call("bench", tiny, "-p", "8,16", "-n", "4", "-c", "1,3", "-r", "1", "--json"))
    assert [row["test"] for row in value["results"]] == ["pp8", "pp16", "tg4", "tg4@3"]
    assert all(row["mean_tokens_per_s"] > 0 for row in value["results"])


def test_run_on_a_terminal_is_a_chat(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("Hi\n/stats\n/exit\n"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", tiny, "--max-tokens", "3"])
    errors = capsys.readouterr().err
    assert ended.value.code == 0, errors
    assert "[length] prompt 11 tok · 3 new" in errors
    assert "turns: 1" in errors
