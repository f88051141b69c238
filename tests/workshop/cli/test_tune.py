"""`quire tune`: what it keeps, where later starts find it, and what it advises."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.sides.quire import prompt_logits
from quire.cli.doctor import check_tuning
from quire.config import EngineOptions
from quire.engine.build import resolve_config
from quire.engine.llm_engine import LLMEngine
from quire.models.registry import ModelRegistry
from quire.runtime.hardware import detect_hardware
from quire.runtime.tuning import SETTINGS, Tuning, keep_tuning, kept_tunings
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.sources import resolve_source
from quire_workshop import tuner
from quire_workshop.bench_cases import BenchCase
from quire_workshop.tuner import MIN_ROUNDS, Ratio, enough_streams, first_faster, thread_counts
from tests.cli.command_line import call, parsed
from tests.cli.tiny_directory import make_tiny_directory
from tests.hostile_files import HOSTILE


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a tiny model, and a directory that keeps what is found for it."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(ModelRegistry, "_registered", {})
    return str(make_tiny_directory(tmp_path / "model"))


def opened(model: str) -> tuple[EngineOptions, Checkpoint]:
    return EngineOptions(model=model), open_checkpoint(resolve_source(model))


def test_later_starts_use_what_was_kept_and_say_so(model: str) -> None:
    options, checkpoint = opened(model)
    hardware = detect_hardware("cpu")
    tuning = Tuning(1, 20, 3 << 20, "1 threads 1.10 × as fast", model)
    assert keep_tuning(tuning, hardware, options, checkpoint)
    config = resolve_config(options, checkpoint)
    assert [getattr(config.hardware, name) for name in SETTINGS] == [1, 20, 3 << 20]
    assert config.tile_rows == (0 if config.batch_invariant else 20)
    (decision,) = [item for item in config.decisions if item.name == "num_threads"]
    assert decision.reason == "quire tune: 1 threads 1.10 × as fast"
    assert f"{model}: 1 threads 1.10 × as fast" in check_tuning().found
    assert " 1 thread (tuned) " in call("run", model, "hi", "--max-tokens", "1").stderr
    # Of another version of the code, or another machine.
    assert kept_tunings(replace(hardware, name="other")) == []
    other = resolve_config(replace(options, dtype="float32"), checkpoint)
    assert not other.hardware.tuned  # measured with other products
    result = call("tune", model, "--clear")
    assert (result.exit_code, "the defaults hold again" in result.output) == (0, True)
    assert not resolve_config(options, checkpoint).hardware.tuned
    assert check_tuning().found == "defaults"


def test_tuning_that_another_user_may_have_written_is_not_used(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hardware = detect_hardware("cpu")
    for reason, spoil in HOSTILE.items():
        assert keep_tuning(Tuning(1, 20, None, "x", model), hardware, *opened(model))
        (path,) = (tmp_path / "cache" / "tuning").glob("*.json")
        spoil(path)
        caplog.clear()
        assert kept_tunings(hardware) == []
        assert reason in caplog.text


def test_bytes_fetched_ahead_change_no_bit(model: str) -> None:
    options = EngineOptions(model=model, max_model_len=128, block_size=16)
    answers = []
    for num_bytes in (None, 0, 8 << 20):
        engine = LLMEngine.build(options, hardware=replace(detect_hardware("cpu"), kv_ahead_bytes=num_bytes))
        answers.append(list(prompt_logits(engine, [*b"The quick brown fox jumps over the lazy dog"]).ravel()))
        engine.shutdown()
    assert answers[0] == answers[1] == answers[2]


def test_tuning_of_more_threads_than_there_are_is_not_used(model: str) -> None:
    options, checkpoint = opened(model)
    hardware = detect_hardware("cpu")
    assert keep_tuning(Tuning(hardware.num_threads + 1, 8, None, ""), hardware, options, checkpoint)
    assert resolve_config(options, checkpoint).hardware.num_threads == hardware.num_threads


def test_nothing_is_kept_where_the_cache_cannot_be_written(model: str, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    options, checkpoint = opened(model)
    assert not keep_tuning(Tuning(1, 8, None, "found"), detect_hardware("cpu"), options, checkpoint)


def test_verb_measures_a_model_and_prints_what_it_found(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "THREAD_CASES", (BenchCase(8, 0), BenchCase(4, 3), BenchCase(512, 0)))
    monkeypatch.setattr(tuner, "AHEAD_CASES", (BenchCase(8, 2, 2),))
    monkeypatch.setattr(tuner, "BLOCK_CASES", (BenchCase(8, 0),))
    monkeypatch.setattr(tuner, "TILE_ROWS", (2, 4))
    monkeypatch.setattr(tuner, "STREAMS", (1, 2))
    found = parsed(call("tune", model, "--json"))
    settings = [ratio["setting"] for ratio in found["ratios"]]
    assert [name for name in settings if "threads" in name] == [
        f"{number} threads" for number in thread_counts(detect_hardware("cpu").num_threads)
    ]
    assert f"{max(tuner.AHEAD_BYTES) >> 20} MiB of KV fetched ahead" in settings
    assert all(ratio["median"] > 0 for ratio in found["ratios"])
    assert [number for number, _ in found["advice"]["curve"]] == [1, 2]
    assert found["advice"]["num_streams"] in (1, 2)
    assert found["is_kept"]


@pytest.mark.parametrize(
    ("median", "low", "expected"), [(1.10, 1.01, True), (1.10, 0.98, False), (1.01, 1.005, False), (0.9, 0.85, False)]
)
def test_gain_counts_only_above_the_noise(median: float, low: float, expected: bool) -> None:
    assert Ratio("", median, low, median).is_faster is expected


NOISES: dict[str, Callable[[random.Random], float]] = {
    "even": lambda source: source.uniform(0.9, 1.1),
    "a program that disturbs one of three": lambda source: 0.5 if source.random() < 1 / 3 else source.gauss(1, 0.01),
    "seldom far off": lambda source: source.gauss(1, 0.02) / max(source.random(), 0.02) ** 0.5,
}


def measured_ratios(noise: Callable[[random.Random], float], gain: float, source: random.Random, rounds: int) -> Ratio:
    """Return the ratio of a setting that is `gain` times as fast, both sides with the same noise."""
    return Ratio.of("", [gain * noise(source) / noise(source) for _ in range(rounds)])


@pytest.mark.parametrize("rounds", [MIN_ROUNDS, 12, 25])
@pytest.mark.parametrize("noise", NOISES)
def test_noise_is_kept_at_most_once_in_a_hundred_times(noise: str, rounds: int) -> None:
    source = random.Random(rounds)
    ratios = [measured_ratios(NOISES[noise], 1.0, source, rounds) for _ in range(4000)]
    assert sum(ratio.is_faster for ratio in ratios) <= 40 + 3 * 40**0.5


def test_gain_above_the_noise_is_kept() -> None:
    source = random.Random(0)
    ratios = [measured_ratios(lambda source: source.gauss(1, 0.02), 1.1, source, MIN_ROUNDS) for _ in range(1000)]
    assert sum(ratio.is_faster for ratio in ratios) >= 990


@pytest.mark.parametrize(
    ("medians", "expected"),
    [
        ({4: 0.7, 8: 0.9, 12: 1.1, 16: 1.2}, 12),
        ({4: 0.7, 8: 1.1, 12: 1.2, 16: 1.2}, 8),
        ({4: 0.7, 8: 0.8, 12: 0.9, 16: 1.2}, 16),
        ({4: 0.7, 8: 1.005, 12: 1.2, 16: 1.2}, 12),  # within the noise: the default stays
        ({4: 0.7, 8: 0.8, 12: 0.8, 16: 0.9}, 12),  # never faster: nothing to start from
        ({}, 12),
    ],
)
def test_tiles_start_where_all_longer_steps_are_faster(medians: dict[int, float], expected: int) -> None:
    assert (
        first_faster({rows: Ratio("", median, median - 0.002, median + 0.002) for rows, median in medians.items()}, 12)
        == expected
    )


def test_ratio_is_the_median_with_its_bounds() -> None:
    values = [1.0, 9.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    assert Ratio.of("x", values) == Ratio("x", 1.3, 1.0, 9.0)
    # The second of 12: fewer than 3 are below the true median in 79 of 4,096 cases, fewer than 2 in 13.
    assert Ratio.of("x", [*values, 1.6, 1.7, 1.8, 1.9, 2.0]) == Ratio("x", 1.55, 1.1, 2.0)


def test_streams_are_enough_near_the_highest_throughput() -> None:
    assert enough_streams([(1, 10.0), (2, 19.0), (4, 38.5), (8, 40.0)]) == 4
