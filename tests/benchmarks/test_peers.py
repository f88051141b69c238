"""The comparison with sides that compute nothing: cases, turns, table and JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers, side_specs
from benchmarks.peer_report import Turn
from benchmarks.side_specs import Kind, Models
from quire.cli.bench_cases import BenchCase


class FakeTokenizer:
    special_token_ids = frozenset({0})


@pytest.fixture(autouse=True)
def fake_sides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"12345")
    models = Models("m", file, 8, FakeTokenizer())  # type: ignore[arg-type]
    monkeypatch.setattr(Models, "of", lambda name, bf16: models)
    fake = Kind("tests.benchmarks.fake_side", "json", None, "gguf")
    for name in ("quire", "transformers"):
        monkeypatch.setitem(side_specs.KINDS, name, fake)


def compare(tmp_path: Path, *words: str) -> dict[str, Any]:
    path = tmp_path / "result.json"
    arguments = peers.parse_arguments(["--json", str(path), "--cases", "pp4,tg3@2+d4", *words])
    peers.write_result(peers.run(arguments).as_json(), arguments)
    value: dict[str, Any] = json.loads(path.read_text())
    return value


@pytest.mark.parametrize("name", peers.CASES)
def test_cases_are_named_as_quire_bench_names_them(name: str) -> None:
    assert peers.parse_case(name).name == name


def test_parse_case() -> None:
    assert peers.parse_case("tg64@8+d2048") == BenchCase(2048, 64, 8)
    assert peers.parse_case("tg64") == BenchCase(1, 64, 1)
    with pytest.raises(ValueError, match="'tg' is no case"):
        peers.parse_case("tg")


def test_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = compare(tmp_path, "--sides", "quire,transformers,vllm,exllama", "--repetitions", "2", "--vllm-python", "")
    assert value["schema"] == "quire.bench.peers/1"
    keys = {
        "date",
        "version",
        "commit",
        "cpu",
        "num_threads",
        "model",
        "model_bytes",
        "machine",
        "first_token_agreement",
    }
    assert keys <= set(value)
    assert value["model_bytes"] == 5
    assert [side["name"] for side in value["sides"]] == ["quire", "transformers"]
    assert {"version", "settings", "start_s", "load_s", "peak_memory_bytes"} <= set(value["sides"][0])
    assert [side["name"] for side in value["skipped"]] == ["vllm", "exllama"]
    assert value["first_token_agreement"] == {"transformers": 1.0}
    prefill, decode = value["results"]
    assert prefill["test"] == "pp4"
    assert (decode["num_prompt_tokens"], decode["num_generated_tokens"], decode["num_streams"]) == (4, 3, 2)
    sides = decode["sides"]
    assert len(sides["quire"]["samples_tokens_per_s"]) == 2 * peers.MAX_SAMPLES_PER_TURN
    ours, theirs = (sides[name]["median_tokens_per_s"] for name in ("quire", "transformers"))
    assert decode["ratios"] == {"transformers": pytest.approx(ours / theirs)}
    assert decode["share_of_limit"] == pytest.approx(ours / 1e6)
    printed = capsys.readouterr()
    lines = [line for line in printed.out.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1, "columns align"
    assert [line.split("|")[1].strip() for line in lines] == [
        "test",
        "-" * 14,
        "start (s)",
        "pp4",
        "tg3@2+d4",
        "memory (MB)",
    ]
    assert "without vllm: set QUIRE_BENCH_VLLM" in printed.err


@pytest.mark.parametrize(("fails", "reason"), [("measure", "out of memory"), ("early", "generate more tokens")])
def test_a_side_that_fails_leaves_the_others(tmp_path: Path, fails: str, reason: str) -> None:
    value = compare(tmp_path, "--sides", f"quire,transformers:fails={fails}", "--repetitions", "1")
    assert reason in value["skipped"][0]["reason"]
    assert all(list(result["sides"]) == ["quire"] and result["ratios"] == {} for result in value["results"])


def test_no_side_at_all_is_no_crash(tmp_path: Path) -> None:
    value = compare(tmp_path, "--sides", "quire:fails=load", "--repetitions", "1")
    assert value["sides"] == []
    assert value["machine"] is None


@pytest.mark.parametrize("words", [["--cases", "pp"], ["--sides", ","]])
def test_bad_options_are_usage_errors(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        peers.parse_arguments(words)


def test_a_disturbed_turn_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [Turn([1.0], 0.5, []), Turn([2.0], 0.2, []), Turn([3.0], 0.01, []), Turn([4.0], 0.0, [])]
    for retries, chosen in ((0, 0), (1, 1), (9, 2)):
        remaining = iter(turns)
        monkeypatch.setattr(peers, "measure_turn", lambda *_, remaining=remaining: next(remaining))
        assert peers.quiet_turn(None, None, [], retries) is turns[chosen]  # type: ignore[arg-type]
