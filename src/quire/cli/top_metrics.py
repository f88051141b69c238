"""A page of a server's `/metrics`, and the changes between two of them. Knows no HTTP and no terminal.

Next to read: `top.py`.
"""

import math
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
LAST_BREAK = "quire_prefix_last_break"


class MetricsPage:
    """The samples of one page, by name and labels. `time_s`: when they were read, of a monotonic clock."""

    def __init__(self, text: str, time_s: float) -> None:
        """Raises: ValueError if the page is not in Prometheus's text format."""
        self.time_s = time_s
        self._samples: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value

    def __contains__(self, name: str) -> bool:
        return name in self._samples

    def samples(self, name: str, **labels: str) -> dict[Labels, float]:
        """Return the samples of a name that have these labels."""
        wanted = labels.items()
        return {found: value for found, value in self._samples.get(name, {}).items() if wanted <= found}

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of a name that have these labels; 0 without any."""
        return sum(self.samples(name, **labels).values())

    def label(self, name: str, label: str) -> str:
        """Return a label of the first sample of a name; empty without one."""
        return next((dict(found).get(label, "") for found in self._samples.get(name, {})), "")

    def values_of(self, name: str, label: str) -> list[str]:
        """Return the values of a label among the samples of a name, in the page's order."""
        return [dict(found).get(label, "") for found in self._samples.get(name, {})]

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return a histogram's cumulative counts by upper bound, smallest first."""
        found: dict[float, float] = {}
        for sample, count in self.samples(f"{name}_bucket", **labels).items():
            bound = float(dict(sample).get("le", "nan"))
            found[bound] = found.get(bound, 0.0) + count
        return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """A server between two pages. None: no sample, or the server does not tell.

    `drafts_per_s`: draft tokens that steps verified; `draft_gain`: generated tokens by those that were no drafts.
    `prefix_breaks`: prompts that differ early from an earlier one that they repeat, since the server's start;
    `prefix_break_tokens`: what was computed again behind such differences; `last_prefix_break`: token of the last one.
    `weights_mapped_bytes`: weights on disk, 0 if all are in memory; `expert_read_ratio`: bytes read from disk per byte
    of the experts that steps used.
    """

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
    drafts_per_s: float = 0.0
    draft_accept_ratio: float | None = None
    draft_gain: float | None = None
    prefix_breaks: int = 0
    prefix_break_tokens: int = 0
    last_prefix_break: int | None = None
    weights_mapped_bytes: int = 0
    weights_resident_bytes: int = 0
    weights_limit_bytes: int = 0
    expert_read_ratio: float | None = None
    policy: str = ""


def change_between(before: MetricsPage, after: MetricsPage, name: str, **labels: str) -> float:
    """Return the change of a counter, summed over its samples. One that fell is of an engine that was restarted."""
    then = before.samples(name, **labels)
    return sum(
        now - then.get(found, 0.0) if now >= then.get(found, 0.0) else now
        for found, now in after.samples(name, **labels).items()
    )


def load_between(before: MetricsPage, after: MetricsPage, **labels: str) -> ServerLoad:
    """Return the changes between two pages, of the samples with these labels.

    Preemptions are those of the interval, engine deaths and broken prefixes those since the server's start.
    """
    seconds = max(after.time_s - before.time_s, 1e-9)

    def value(name: str) -> float:
        return after.value(name, **labels)

    def change(name: str) -> float:
        return change_between(before, after, name, **labels)

    queries, chosen = change("quire_prefix_cache_queries_total"), change("quire_experts_chosen_bytes_total")
    drafts, accepted = change("quire_draft_tokens_total"), change("quire_accepted_tokens_total")
    generated = change("quire_generation_tokens_total")
    return ServerLoad(
        model=after.label("quire_build_info", "model"),
        policy=after.label("quire_build_info", "scheduling_policy"),
        seconds=seconds,
        running=int(value("quire_requests_running")),
        waiting=int(value("quire_requests_waiting")),
        kv_usage_ratio=value("quire_kv_usage_ratio") / max(1, len(after.samples("quire_kv_usage_ratio", **labels))),
        cache_hit_ratio=change("quire_prefix_cache_hits_total") / queries if queries else None,
        prompt_tokens_per_s=change("quire_prompt_tokens_total") / seconds,
        generation_tokens_per_s=generated / seconds,
        requests_per_s=change("quire_requests_total") / seconds,
        ttft_p50_s=quantile(before, after, "quire_time_to_first_token_seconds", 0.5, **labels),
        ttft_p95_s=quantile(before, after, "quire_time_to_first_token_seconds", 0.95, **labels),
        itl_p50_s=quantile(before, after, "quire_inter_token_latency_seconds", 0.5, **labels),
        itl_p95_s=quantile(before, after, "quire_inter_token_latency_seconds", 0.95, **labels),
        preemptions=int(change("quire_preemptions_total")),
        engine_deaths=int(value("quire_engine_deaths_total")),
        drafts_per_s=drafts / seconds,
        draft_accept_ratio=accepted / drafts if drafts else None,
        draft_gain=generated / (generated - accepted) if drafts and generated > accepted else None,
        prefix_breaks=int(value("quire_prefix_breaks_total")),
        prefix_break_tokens=int(value("quire_prefix_break_tokens_total")),
        last_prefix_break=int(after.value(LAST_BREAK)) if LAST_BREAK in after else None,
        weights_mapped_bytes=int(value("quire_weights_mapped_bytes")),
        weights_resident_bytes=int(value("quire_weights_resident_bytes")),
        weights_limit_bytes=int(value("quire_weights_limit_bytes")),
        expert_read_ratio=change("quire_weights_read_bytes_total") / chosen if chosen else None,
    )


def engines_between(before: MetricsPage, after: MetricsPage) -> list[ServerLoad]:
    """Return the changes of each engine of a server; none of a server of one engine or of several models."""
    ranks = after.values_of("quire_engine_up", "engine")
    return [load_between(before, after, engine=rank) for rank in ranks if rank]


def quantile(before: MetricsPage, after: MetricsPage, name: str, share: float, **labels: str) -> float | None:
    """Return a quantile of the samples between two pages, interpolated in its bucket; None without samples.

    In the last bucket, which has no upper bound, its lower bound is the answer.
    """
    then, now = before.buckets(name, **labels), after.buckets(name, **labels)
    if any(count < then.get(bound, 0.0) for bound, count in now.items()):
        then = {}
    counts = {bound: count - then.get(bound, 0.0) for bound, count in now.items()}
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
