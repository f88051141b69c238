"""Report of a comparison: a table row by row, and the JSON that `README.md` describes. Measures nothing itself.

Next to read: `peers.py`.
"""

import datetime
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.command_line import cpu_name
from benchmarks.side_process import SideError, SideProcess
from benchmarks.side_specs import Models
from quire import __version__
from quire_workshop.bench_cases import BenchCase
from quire_workshop.cli.bench import source_commit

SCHEMA = "quire.bench.peers/1"
LIMITS_TIMEOUT_S = 120.0
NOISY_SHARE = 0.05
"""A turn is noisy when other processes had more of the machine's CPU time than this."""


@dataclass(frozen=True)
class Turn:
    """Result of a side's turn in a case."""

    tokens_per_s: list[float]
    cpu_elsewhere: float
    """Share of the machine's CPU time that went to others."""
    token_ids: list[list[int]]
    """Tokens that each stream generated."""


@dataclass(frozen=True)
class Sweep:
    """Settings that a side has its turns in a case with: the fastest of those that it tried."""

    settings: dict[str, Any]
    """Differences from the side's usual settings."""
    tried: Sequence[tuple[dict[str, Any], float]]
    """Settings and tokens per second, a turn each; 0: refused."""


class Report:
    """Collects samples per case and side; ratios are those of the first side loaded to each other."""

    def __init__(self, models: Models, num_threads: int, cases: Sequence[BenchCase]) -> None:
        self._cpu = cpu_name()
        self._models, self._num_threads, self._cases = models, num_threads, cases
        self._sides: list[dict[str, Any]] = []
        self._skipped: list[dict[str, str]] = []
        self._machine: dict[str, float] | None = None
        self._limits: dict[str, float] = {}
        self._turns: dict[str, dict[str, list[Turn]]] = {case.name: {} for case in cases}
        self._sweeps: dict[str, dict[str, Sweep]] = {case.name: {} for case in cases}
        self._names: list[str] = []
        self._widths: list[int] = []

    # --- What happens ---------------------------------------------------------------------

    def skip(self, name: str, reason: str) -> None:
        """A side takes no part, or no further."""
        self._skipped.append({"name": name, "reason": reason})
        print(f"without {name}: {reason}", file=sys.stderr)

    def loaded(self, side: SideProcess) -> None:
        """A side is ready."""
        self._sides.append({name: getattr(side, name) for name in ("name", "version", "settings", "load_s", "start_s")})

    def find_limits(self, sides: Sequence[SideProcess]) -> None:
        """Ask the first Quire side for the roofline of each case."""
        for side in sides:
            if side.name.partition(":")[0] == "quire":
                cases = [[case.num_prompt, case.num_generated, case.num_streams] for case in self._cases]
                try:
                    answer = side.request("limits", timeout_s=LIMITS_TIMEOUT_S, cases=cases)
                except SideError as error:
                    print(f"without limits: {error}", file=sys.stderr)
                    return
                self._machine = answer["machine"]
                names = [case.name for case in self._cases]
                self._limits = dict(zip(names, answer["tokens_per_s"], strict=True))
                return

    def add(self, name: str, case: BenchCase, turn: Turn) -> None:
        """A side had its turn."""
        self._turns[case.name].setdefault(name, []).append(turn)

    def swept(self, name: str, case: BenchCase, sweep: Sweep) -> None:
        """A side has chosen its settings in a case."""
        if sweep.tried:
            self._sweeps[case.name][name] = sweep

    # --- The table ------------------------------------------------------------------------

    def begin(self, names: Sequence[str]) -> None:
        """The environment and the head of the table."""
        self._names = list(names)
        print(
            f"quire {__version__} ({source_commit()}) · {self._cpu} · {self._num_threads} threads · {self._models.name}"
        )
        if self._machine:
            print("machine: " + ", ".join(f"{key} {value:.3g}" for key, value in self._machine.items()))
        for side in self._sides:
            print(f"{side['name']} {side['version']}: {words(side['settings'])}")
        print(f"\ntokens/s, medians; in brackets {self._names[0] if names else 'quire'} / peer")
        titles = ["test", *self._names, "of limit"]
        self._widths = [max(14, len(title)) for title in titles]
        self._line(titles)
        self._line(["-" * width for width in self._widths])
        self._line(["start (s)", *(f"{side['start_s']:.1f}" for side in self._sides), ""])

    def row(self, case: BenchCase) -> None:
        """Report a case of all sides."""
        result = self._result(case)
        cells = [case.name]
        for name in self._names:
            found = result["sides"].get(name)
            ratio = result["ratios"].get(name)
            text = f"{found['median_tokens_per_s']:.4g}" if found else "-"
            noisy = "*" if found and found["cpu_elsewhere"] > NOISY_SHARE else ""
            cells.append(text + noisy + (f" ({ratio:.2f}x)" if ratio else ""))
        share = result["share_of_limit"]
        self._line([*cells, f"{100 * share:.0f} %" if share else ""])

    def end(self, sides: Sequence[SideProcess]) -> None:
        """Memory, what the stars mean, and how often peers choose other tokens: on random prompts some always do."""
        peaks = {side.name: side.peak_memory_bytes for side in sides}
        for entry in self._sides:
            entry["peak_memory_bytes"] = peaks.get(entry["name"])
        if self._names:
            cells = [f"{peaks[name] / 1e6:.0f}" if peaks.get(name) else "-" for name in self._names]
            self._line(["memory (MB)", *cells, ""])
        print(f"* others used more than {100 * NOISY_SHARE:.0f} % of the CPUs: measure again on an idle machine")
        for case, sweeps in self._sweeps.items():
            for name, sweep in sweeps.items():
                print(f"best of {len(sweep.tried)} settings in {case}: {name} {words(sweep.settings) or 'as above'}")
        for name, share in self._agreement().items():
            print(f"first tokens as {self._names[0]}: {name} {100 * share:.0f} %")

    def _line(self, cells: Sequence[str]) -> None:
        padded = [
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(cells, self._widths, strict=True))
        ]
        print("| " + " | ".join(padded) + " |", flush=True)

    # --- JSON -----------------------------------------------------------------------------

    def _result(self, case: BenchCase) -> dict[str, Any]:
        sides = {name: _summary(turns) for name, turns in self._turns[case.name].items()}
        ours = sides.get(self._names[0]) if self._names else None
        ratios, share = {}, None
        for name, sweep in self._sweeps[case.name].items():
            tried = [{"settings": settings, "tokens_per_s": speed} for settings, speed in sweep.tried]
            sides.get(name, {}).update(settings=sweep.settings, tried=tried)
        limit = self._limits.get(case.name)
        if ours is not None:
            mine = ours["median_tokens_per_s"]
            ratios = {n: mine / side["median_tokens_per_s"] for n, side in sides.items() if n != self._names[0]}
            share = mine / limit if limit else None
        return {
            "test": case.name,
            "num_prompt_tokens": case.num_prompt,
            "num_generated_tokens": case.num_generated,
            "num_streams": case.num_streams,
            "sides": sides,
            "ratios": ratios,
            "limit_tokens_per_s": limit,
            "share_of_limit": share,
        }

    def _agreement(self) -> dict[str, float]:
        """Per side, the share of streams whose first token is that of the first side."""
        equal: dict[str, list[bool]] = {name: [] for name in self._names[1:]}
        for by_name in self._turns.values():
            for name, found in equal.items():
                for ours, theirs in zip(by_name.get(self._names[0], []), by_name.get(name, []), strict=False):
                    found += [a[:1] == b[:1] for a, b in zip(ours.token_ids, theirs.token_ids, strict=False)]
        return {name: statistics.fmean(found) for name, found in equal.items() if found}

    def as_json(self) -> dict[str, Any]:
        """Everything, as `README.md` describes it."""
        return {
            "schema": SCHEMA,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "version": __version__,
            "commit": source_commit(),
            "cpu": self._cpu,
            "num_threads": self._num_threads,
            "model": self._models.name,
            "model_bytes": self._models.gguf.stat().st_size,
            "machine": self._machine,
            "sides": self._sides,
            "skipped": self._skipped,
            "first_token_agreement": self._agreement(),
            "results": [self._result(case) for case in self._cases],
        }


def words(settings: Mapping[str, Any]) -> str:
    """Return settings as one line."""
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def _summary(turns: Sequence[Turn]) -> dict[str, Any]:
    samples = [sample for turn in turns for sample in turn.tokens_per_s]
    return {
        "median_tokens_per_s": statistics.median(samples),
        "samples_tokens_per_s": samples,
        "cpu_elsewhere": statistics.median([turn.cpu_elsewhere for turn in turns]),
    }
