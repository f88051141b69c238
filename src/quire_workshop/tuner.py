"""`tune`: settings that are faster on this machine for a model, measured beside the defaults by turns.

A setting is kept only if its median gain is above 1 with `CONFIDENCE`, whatever the noise is like: a busy machine keeps
the defaults. Next to read: `quire/runtime/tuning.py`, which keeps the result; `bench_cases.py` has what is measured.
"""

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from quire.config import EngineConfig, EngineOptions, Hardware
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError
from quire.runtime.hardware import detect_hardware
from quire.runtime.tuning import Tuning
from quire_workshop.bench_cases import BenchCase, measure, random_prompts

MIN_GAIN = 0.02
"""Smallest gain that is kept, as a share."""
CONFIDENCE = 0.99
"""That a gain is none of the noise: about a dozen settings are tried, and each could be kept by chance."""
MIN_ROUNDS = 7
"""Fewest rounds that can decide: by chance alone all of 7 are above 1 once in 128 times."""
THREAD_CASES = (BenchCase(512, 0), BenchCase(64, 32), BenchCase(64, 32, 8))
AHEAD_CASES = (BenchCase(1024, 32, 8), BenchCase(128, 16, 64))
AHEAD_BYTES = (1 << 20, 2 << 20, 4 << 20, 8 << 20)
TILE_ROWS = (4, 6, 8, 10, 12, 14, 16, 20, 24, 32)
BLOCK_SIZES = (16, 64)
BLOCK_CASES = (BenchCase(512, 0), BenchCase(1024, 32, 8))
STREAMS = (1, 2, 4, 8, 16, 32, 64, 128)
ENOUGH = 0.95
"""Share of the highest throughput at which more streams are not worth their latency."""
MODEL_LEN = 2048
"""Longest context that the advice on memory counts with."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Speed of a setting as a share of the default's: the median of paired measurements, and bounds of the true median.

    low, high: measurements of which the true median is above one, and below the other, each with `CONFIDENCE`.
    """

    setting: str
    median: float
    low: float
    high: float

    @property
    def is_decided(self) -> bool:
        """Return True if the difference is above the noise."""
        return abs(self.median - 1) > MIN_GAIN and not self.low <= 1 <= self.high

    @property
    def is_faster(self) -> bool:
        """Return True if the gain is above the noise."""
        return self.median > 1 and self.is_decided

    @classmethod
    def of(cls, setting: str, values: Sequence[float]) -> "Ratio":
        """Summarise at least `MIN_ROUNDS` paired measurements.

        Of n measurements the number below the true median is binomial, B(n, 1/2), for noise of any kind. So the k-th
        smallest exceeds it with the probability that fewer than k are below it, and k is the largest number for which
        this is at most 1 - `CONFIDENCE` (the sign test).
        """
        ordered, num_values = sorted(values), len(values)
        few = [sum(math.comb(num_values, below) for below in range(k)) / 2**num_values for k in range(1, num_values)]
        rank = sum(probability <= 1 - CONFIDENCE for probability in few)
        return cls(setting, statistics.median(values), ordered[rank - 1], ordered[-rank])


@dataclass(frozen=True, slots=True)
class Advice:
    """Measurements that set nothing, because the best value depends on the load.

    curve: streams → tokens per second of all.
    """

    block_sizes: tuple[Ratio, ...]
    curve: tuple[tuple[int, float], ...]
    num_streams: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result. tuning: None if the defaults are the fastest."""

    tuning: Tuning | None
    ratios: tuple[Ratio, ...]
    advice: Advice


class Tuner:
    """Measures one model. `note` is told what is measured; `rounds`: repetitions of each case."""

    def __init__(self, options: EngineOptions, note: Callable[[str], None], rounds: int = MIN_ROUNDS) -> None:
        self._options = replace(options, enable_prefix_caching=False, speculative="off")
        self._note = note
        self._rounds = rounds
        self.hardware = detect_hardware("cpu")

    def run(self) -> Tuned:
        """Measure all settings; the next ones are measured with those that were found before."""
        best, ratios, found = self.hardware, [], []
        settings = [
            (f"{number} threads", THREAD_CASES, {"num_threads": number}) for number in thread_counts(best.num_threads)
        ] + [(f"{size >> 20} MiB of KV fetched ahead", AHEAD_CASES, {"kv_ahead_bytes": size}) for size in AHEAD_BYTES]
        for name, cases, changes in settings:
            candidate = replace(best, **changes)  # type: ignore[arg-type]
            ratios.append(self._compare(name, cases, best, candidate))
            if ratios[-1].is_faster:
                best = candidate
                found.append(f"{name} {ratios[-1].median:.2f} × as fast")
        of_tiles = list(self._compare_tiles(best))
        ratios += of_tiles
        rows = first_faster(dict(zip(TILE_ROWS, of_tiles, strict=False)), best.tile_rows)
        if rows != best.tile_rows:
            best = replace(best, tile_rows=rows)
            found.append(f"bf16 tiles from {rows} tokens on, not {self.hardware.tile_rows}")
        kept = (best.num_threads, best.tile_rows, best.kv_ahead_bytes)
        tuning = Tuning(*kept, "; ".join(found), self._options.model) if found else None
        return Tuned(tuning, tuple(ratios), self._advise(best))

    @contextmanager
    def _engine(self, hardware: Hardware, **changes: int) -> Iterator[LLMEngine]:
        engine = LLMEngine.build(replace(self._options, **changes), hardware=hardware)  # type: ignore[arg-type]
        try:
            yield engine
        finally:
            engine.shutdown()

    def _compare(
        self, setting: str, cases: Sequence[BenchCase], default: Hardware, candidate: Hardware, **changes: int
    ) -> Ratio:
        """Measure a setting beside the default, by turns: a round's value is the geometric mean over the cases."""
        self._note(setting)
        with self._engine(default) as first, self._engine(candidate, **changes) as second:
            return Ratio.of(setting, self._turns(first, second, cases))

    def _turns(self, first: LLMEngine, second: LLMEngine, cases: Sequence[BenchCase]) -> list[float]:
        values, limit = [], first.config.scheduler.max_model_len
        fitting = [case for case in cases if case.len_needed <= limit]
        if not fitting:
            raise ConfigError(f"a context of {limit} tokens is too short to measure in: give a larger --max-model-len")
        for turn in range(self._rounds + 1):
            ratios = [self._ratio(first, second, case, turn) for case in fitting]
            values.append(statistics.geometric_mean(ratios))
        return values[1:]  # the first warms up

    def _ratio(self, first: LLMEngine, second: LLMEngine, case: BenchCase, turn: int) -> float:
        """Return the second's speed as a share of the first's. Each begins every other turn: the earlier may lose."""
        engines = (first, second) if turn % 2 else (second, first)
        speeds = [self._speed(engine, case, turn) for engine in engines]
        return speeds[1] / speeds[0] if turn % 2 else speeds[0] / speeds[1]

    def _speed(self, engine: LLMEngine, case: BenchCase, seed: int) -> float:
        prompts = random_prompts(case, engine.config.model.vocab_size, frozenset(), random.Random(seed))
        return measure(engine, case, prompts)

    def _compare_tiles(self, hardware: Hardware) -> Iterator[Ratio]:
        """Measure decode steps of `TILE_ROWS` streams in tiles, beside the kernels of few rows."""
        always, never = replace(hardware, tile_rows=1), replace(hardware, tile_rows=1 << 30)
        with self._engine(never) as first, self._engine(always) as second:
            if first.config.tile_rows == 0:
                return
            for rows in TILE_ROWS:
                setting = f"tiles in steps of {rows} tokens"
                self._note(setting)
                yield Ratio.of(setting, self._turns(first, second, (BenchCase(64, 16, rows),)))

    def _advise(self, hardware: Hardware) -> Advice:
        sizes = [
            self._compare(f"blocks of {size} tokens", BLOCK_CASES, hardware, hardware, block_size=size)
            for size in BLOCK_SIZES
            if self._options.block_size is None
        ]
        with self._engine(hardware, max_num_seqs=max(STREAMS)) as engine:
            curve = []
            for number in STREAMS:
                self._note(f"{number} streams")
                case = BenchCase(min(128, engine.config.scheduler.max_model_len // 2), 16, number)
                curve.append((number, statistics.median(self._speed(engine, case, turn) for turn in range(3))))
            number = enough_streams(curve)
            return Advice(tuple(sizes), tuple(curve), number, _kv_bytes(engine.config, number))


def thread_counts(most: int) -> list[int]:
    """Return numbers of threads to try beside `most`, the larger ones first."""
    return sorted({most - 1, most * 3 // 4, most // 2} - {0, most}, reverse=True)


def first_faster(ratios: dict[int, Ratio], default: int) -> int:
    """Return the number of rows from which on tiles are faster at every measured number; `default` if within the noise.

    ratios: by rows, speed with tiles as a share of that without.
    """
    slower = [rows for rows, ratio in ratios.items() if ratio.median <= 1]
    faster = [rows for rows in ratios if not slower or rows > max(slower)]
    if not faster:
        return default
    between = [ratio for rows, ratio in ratios.items() if min(faster[0], default) <= rows < max(faster[0], default)]
    return faster[0] if any(ratio.is_decided for ratio in between) else default


def enough_streams(curve: Sequence[tuple[int, float]]) -> int:
    """Return the smallest number of streams with `ENOUGH` of the highest throughput."""
    best = max(speed for _, speed in curve)
    return min(number for number, speed in curve if speed >= ENOUGH * best)


def _kv_bytes(config: EngineConfig, num_streams: int) -> int:
    """Return the bytes of KV of `num_streams` full contexts."""
    scheduler = config.scheduler
    size, length = scheduler.block_size, min(scheduler.max_model_len, MODEL_LEN)
    groups = scheduler.kv_cache_groups
    return num_streams * sum(group.spec.table_len(length, size) * group.page_bytes(size) for group in groups)
