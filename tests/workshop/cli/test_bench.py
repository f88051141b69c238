"""`quire bench`: the table, the JSON, and what is refused."""

from pathlib import Path

import pytest

from quire.config import EngineOptions
from quire.engine.build import resolve_config
from quire.insight.explain.explanation import explain
from quire.insight.explain.subject import Settings
from quire.kernels.tracing import NotTraceableError
from quire.runtime.machine_limits import MachineLimits
from quire.weights.checkpoint import open_checkpoint
from quire.weights.sources import resolve_source
from quire_workshop.bench_cases import BenchCase
from quire_workshop.cli import bench
from tests.cli.command_line import FakeEngine, call, parsed
from tests.cli.tiny_directory import make_tiny_directory

ROOFLINES = bench.rooflines


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known limits, found without a second of measuring."""
    machine = MachineLimits(1e9, {"bf16": 1e12, "fp32": 1e12, "int8": 1e12})
    monkeypatch.setattr(bench, "rooflines", lambda config, cases: (machine, {case.name: 1e6 for case in cases}))


def test_limit_of_a_case_is_the_work_that_explain_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = MachineLimits(1e9, {"fp32": 1e9})
    monkeypatch.setattr("quire.insight.explain.phases.measure_limits", lambda device, names, working_set: machine)
    options = EngineOptions(model=str(make_tiny_directory(tmp_path)), dtype="float32")
    checkpoint = open_checkpoint(resolve_source(options.model))
    config = resolve_config(options, checkpoint)
    cases = [BenchCase(16, 0), BenchCase(12, 6, 2)]
    found = ROOFLINES(config, cases)
    explained = explain(checkpoint, Settings(batches=(2,), ctx=16, dtype="float32"))
    work = [max(phase.num_bytes, phase.flops) for phase in explained.phases]
    assert found == (machine, {"pp16": pytest.approx(16e9 / work[0]), "tg6@2+d12": pytest.approx(2e9 / work[1])})
    monkeypatch.setattr("quire.insight.explain.subject.trace_share", raise_not_traceable)
    assert ROOFLINES(config, cases) == (machine, {})


def raise_not_traceable(*arguments: object) -> None:
    raise NotTraceableError("a branch on values")


SMALL = ("-p", "4", "-n", "3", "-c", "1,2", "-r", "2")


def test_json(engines: list[FakeEngine]) -> None:
    value = parsed(call("bench", *SMALL, "--json"))
    assert engines[0].config.options.enable_prefix_caching is False
    assert value["schema"] == "quire.bench/1"
    assert {"model", "num_parameters", "dtype", "device", "num_threads", "version", "commit"} <= set(value)
    assert [row["test"] for row in value["results"]] == ["pp4", "tg3", "tg3@2"]
    assert value["limits"] == {"read_bytes_per_s": 1e9, "flops_per_s": {"bf16": 1e12, "fp32": 1e12, "int8": 1e12}}
    row = value["results"][2]
    assert row["share_of_limit"] == row["mean_tokens_per_s"] / row["limit_tokens_per_s"]
    assert (row["num_prompt_tokens"], row["num_generated_tokens"], row["num_streams"]) == (1, 3, 2)
    assert len(row["samples_tokens_per_s"]) == 2
    assert row["mean_tokens_per_s"] == pytest.approx(sum(row["samples_tokens_per_s"]) / 2)


def test_enough_sequences_for_the_largest_concurrency(engines: list[FakeEngine]) -> None:
    call("bench", "-p", "0", "-n", "2", "-c", "300", "-r", "1", "--no-warm-up")
    assert engines[0].config.options.max_num_seqs == 300
    result = call("bench", "-c", "300", "--max-num-seqs", "8")
    assert (result.exit_code, "--concurrency 300 exceeds max_num_seqs=8" in result.stderr) == (2, True)
    assert call("bench", "-p", "0", "-n", "0").exit_code == 2
    assert call("bench", "-c", "0,8").exit_code == 2


def test_warm_up_and_row_longer_than_the_context(engines: list[FakeEngine]) -> None:
    call("bench", "-p", "4", "-n", "0", "-r", "2")
    call("bench", "-p", "4", "-n", "0", "-r", "2", "--no-warm-up")
    assert [len(engine.prompts) for engine in engines] == [3, 2]
    result = call("bench", "-p", "4K", "-n", "2", "--max-model-len", "2048")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "pp4096 needs a context of 4097 tokens, max_model_len is 2048" in result.stderr
