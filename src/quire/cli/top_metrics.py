"""What a server's `/metrics` says, and what changed between two looks at it.

Reads Prometheus's text format. Knows no HTTP and no terminal. Next to read: `top.py`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_SAMPLE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s+(\S+)(?:\s+-?\d+)?', re.ASCII)
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"', re.ASCII)
_ESCAPE = re.compile(r"\\(.)")
Labels = frozenset[tuple[str, str]]


class Metrics:
    """The samples of one page, by name and labels. `time_s` is when they were read, of a clock that never goes back."""

    def __init__(self, text: str, time_s: float) -> None:
        """What cannot be read is left out."""
        self.time_s = time_s
        self._samples: dict[str, dict[Labels, float]] = {}
        for line in text.splitlines():
            match = None if line.startswith("#") else _SAMPLE.fullmatch(line.strip())
            if match is None:
                continue
            try:
                value = float(match[3])
            except ValueError:
                continue
            labels = frozenset((name, _unescaped(text)) for name, text in _LABEL.findall(match[2] or ""))
            self._samples.setdefault(match[1], {})[labels] = value

    def __contains__(self, name: str) -> bool:
        return name in self._samples

    def value(self, name: str, **labels: str) -> float:
        """The sum of all samples of a name that have these labels; 0 without any."""
        wanted = labels.items()
        return sum(value for found, value in self._samples.get(name, {}).items() if wanted <= found)

    def labels(self, name: str) -> list[dict[str, str]]:
        """The labels of each sample of a name."""
        return [dict(found) for found in self._samples.get(name, {})]

    def buckets(self, name: str) -> dict[float, float]:
        """A histogram's counts by upper bound, smallest first; each counts all that is below."""
        found: dict[float, float] = {}
        for labels, count in self._samples.get(f"{name}_bucket", {}).items():
            bound = float(dict(labels).get("le", "nan"))
            found[bound] = found.get(bound, 0.0) + count
        return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class Load:
    """A server between two looks. None: nothing of the kind happened, or the server does not tell."""

    model: str
    seconds: float
    running: int
    waiting: int
    kv_usage_ratio: float
    cache_hit_ratio: float | None
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    requests_per_s: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    itl_p50_s: float | None
    itl_p95_s: float | None
    preemptions: int
    engine_deaths: int

    def as_json(self) -> dict[str, Any]:
        """As `--json` shows it."""
        return asdict(self)


def load_between(before: Metrics, after: Metrics) -> Load:
    """What happened between two looks. A counter that fell belongs to an engine that was started anew."""
    seconds = max(after.time_s - before.time_s, 1e-9)

    def change(name: str) -> float:
        now, then = after.value(name), before.value(name)
        return now - then if now >= then else now

    queries = change("quire_prefix_cache_queries_total")
    build = after.labels("quire_build_info")
    return Load(
        model=build[0].get("model", "") if build else "",
        seconds=seconds,
        running=int(after.value("quire_requests_running")),
        waiting=int(after.value("quire_requests_waiting")),
        kv_usage_ratio=after.value("quire_kv_usage_ratio"),
        cache_hit_ratio=change("quire_prefix_cache_hits_total") / queries if queries else None,
        prompt_tokens_per_s=change("quire_prompt_tokens_total") / seconds,
        generation_tokens_per_s=change("quire_generation_tokens_total") / seconds,
        requests_per_s=change("quire_requests_total") / seconds,
        ttft_p50_s=quantile(before, after, "quire_time_to_first_token_seconds", 0.5),
        ttft_p95_s=quantile(before, after, "quire_time_to_first_token_seconds", 0.95),
        itl_p50_s=quantile(before, after, "quire_inter_token_latency_seconds", 0.5),
        itl_p95_s=quantile(before, after, "quire_inter_token_latency_seconds", 0.95),
        preemptions=int(change("quire_preemptions_total")),
        engine_deaths=int(after.value("quire_engine_deaths_total")),
    )


def quantile(before: Metrics, after: Metrics, name: str, share: float) -> float | None:
    """A quantile of what came between two looks, within its bucket by straight line; None if nothing came.

    In the last bucket, which has no upper bound, its lower bound is the answer.
    """
    then = before.buckets(name)
    now = after.buckets(name)
    if any(count < then.get(bound, 0.0) for bound, count in now.items()):
        then = {}
    counts = {bound: count - then.get(bound, 0.0) for bound, count in now.items()}
    return _interpolated(counts, share)


def _interpolated(counts: Mapping[float, float], share: float) -> float | None:
    total = max(counts.values(), default=0.0)
    if total <= 0:
        return None
    lower, below = 0.0, 0.0
    for bound, count in counts.items():
        if count >= share * total and count > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (share * total - below) / (count - below)
        lower, below = bound, count
    return None


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], text)
