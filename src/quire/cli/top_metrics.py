"""A page of a server's `/metrics`, and the changes between two of them. Knows no HTTP and no terminal.

Next to read: `top.py`.
"""

import math
from dataclasses import dataclass
from functools import partial

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
LAST_BREAK = "quire_prefix_last_break"
REPLICA = "quire_router_replica"
"""Beginning of the names of a router's gauges."""


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

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of a name that have these labels; 0 without any."""
        wanted = labels.items()
        return sum(value for found, value in self._samples.get(name, {}).items() if wanted <= found)

    def label(self, name: str, label: str) -> str:
        """Return a label of the first sample of a name; empty without one."""
        return next((dict(found).get(label, "") for found in self._samples.get(name, {})), "")

    def values_of(self, name: str, label: str) -> list[str]:
        """Return the values of a label among the samples of a name, in the page's order."""
        return [dict(found).get(label, "") for found in self._samples.get(name, {})]

    def buckets(self, name: str) -> dict[float, float]:
        """Return a histogram's cumulative counts by upper bound, smallest first."""
        found: dict[float, float] = {}
        for labels, count in self._samples.get(f"{name}_bucket", {}).items():
            bound = float(dict(labels).get("le", "nan"))
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
    """Return the change of a counter. One that fell belongs to an engine that was restarted."""
    now, then = after.value(name, **labels), before.value(name, **labels)
    return now - then if now >= then else now


def load_between(before: MetricsPage, after: MetricsPage) -> ServerLoad:
    """Return the changes between two pages.

    Preemptions are those of the interval, engine deaths and broken prefixes those since the server's start.
    """
    seconds = max(after.time_s - before.time_s, 1e-9)
    change = partial(change_between, before, after)
    queries, chosen = change("quire_prefix_cache_queries_total"), change("quire_experts_chosen_bytes_total")
    drafts, accepted = change("quire_draft_tokens_total"), change("quire_accepted_tokens_total")
    generated = change("quire_generation_tokens_total")
    return ServerLoad(
        model=after.label("quire_build_info", "model"),
        policy=after.label("quire_build_info", "scheduling_policy"),
        seconds=seconds,
        running=int(after.value("quire_requests_running")),
        waiting=int(after.value("quire_requests_waiting")),
        kv_usage_ratio=after.value("quire_kv_usage_ratio"),
        cache_hit_ratio=change("quire_prefix_cache_hits_total") / queries if queries else None,
        prompt_tokens_per_s=change("quire_prompt_tokens_total") / seconds,
        generation_tokens_per_s=generated / seconds,
        requests_per_s=change("quire_requests_total") / seconds,
        ttft_p50_s=quantile(before, after, "quire_time_to_first_token_seconds", 0.5),
        ttft_p95_s=quantile(before, after, "quire_time_to_first_token_seconds", 0.95),
        itl_p50_s=quantile(before, after, "quire_inter_token_latency_seconds", 0.5),
        itl_p95_s=quantile(before, after, "quire_inter_token_latency_seconds", 0.95),
        preemptions=int(change("quire_preemptions_total")),
        engine_deaths=int(after.value("quire_engine_deaths_total")),
        drafts_per_s=drafts / seconds,
        draft_accept_ratio=accepted / drafts if drafts else None,
        draft_gain=generated / (generated - accepted) if drafts and generated > accepted else None,
        prefix_breaks=int(after.value("quire_prefix_breaks_total")),
        prefix_break_tokens=int(after.value("quire_prefix_break_tokens_total")),
        last_prefix_break=int(after.value(LAST_BREAK)) if LAST_BREAK in after else None,
        weights_mapped_bytes=int(after.value("quire_weights_mapped_bytes")),
        weights_resident_bytes=int(after.value("quire_weights_resident_bytes")),
        weights_limit_bytes=int(after.value("quire_weights_limit_bytes")),
        expert_read_ratio=change("quire_weights_read_bytes_total") / chosen if chosen else None,
    )


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica between two pages of its router. None: no sample, or the replica does not tell."""

    name: str
    is_ready: bool
    running: int
    waiting: int
    cache_hit_ratio: float | None
    prompt_tokens_per_s: float
    generation_tokens_per_s: float | None
    failures: int


def replicas_between(before: MetricsPage, after: MetricsPage) -> list[ReplicaLoad]:
    """Return the changes of each replica between two pages of a router, then those of all together.

    Prompt tokens, hits and failures are those of the router's requests, prompts counted when a request ends; the
    others are of all clients of the replica. Failures are those since the router's start. All together are ready if one
    replica is.
    """
    names = after.values_of(f"{REPLICA}_up", "replica")
    telling = frozenset(after.values_of(f"{REPLICA}_generation_tokens", "replica"))
    replicas = [_replica_between(before, after, name, name in telling, replica=name) for name in names]
    return [*replicas, _replica_between(before, after, f"all {len(names)}", True)]


def _replica_between(
    before: MetricsPage, after: MetricsPage, name: str, tells_tokens: bool, **labels: str
) -> ReplicaLoad:
    seconds = max(after.time_s - before.time_s, 1e-9)

    def change(metric: str) -> float:
        return change_between(before, after, metric, **labels)

    prompt_tokens = change("quire_router_prompt_tokens_total")
    return ReplicaLoad(
        name=name,
        is_ready=bool(after.value(f"{REPLICA}_up", **labels)),
        running=int(after.value(f"{REPLICA}_running", **labels)),
        waiting=int(after.value(f"{REPLICA}_waiting", **labels)),
        cache_hit_ratio=change("quire_router_hit_tokens_total") / prompt_tokens if prompt_tokens else None,
        prompt_tokens_per_s=prompt_tokens / seconds,
        generation_tokens_per_s=change(f"{REPLICA}_generation_tokens") / seconds if tells_tokens else None,
        failures=int(after.value("quire_router_failures_total", **labels)),
    )


def quantile(before: MetricsPage, after: MetricsPage, name: str, share: float) -> float | None:
    """Return a quantile of the samples between two pages, interpolated in its bucket; None without samples.

    In the last bucket, which has no upper bound, its lower bound is the answer.
    """
    then, now = before.buckets(name), after.buckets(name)
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
