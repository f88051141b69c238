"""The engine's metrics: names for the numbers of `Statistics`, which come with each of its messages.

Next to read: `../engine/process/statistics.py`.
"""

import itertools
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from quire.engine.process.messages import Histogram, Statistics
from quire.engine.process.statistics import BOUNDS_S
from quire.types import RequestStatus

FINISH_REASONS = tuple(status.value for status in RequestStatus if status.is_finished)
"""Shown as 0 before the first: Prometheus sees no increase of a counter that begins at 1."""


def engine_metrics(statistics: Statistics) -> Iterable[Metric]:
    """All of them; those that no engine has reported yet are 0."""
    yield from _gauges(statistics)
    yield from _counters(statistics)
    yield from _histograms(statistics)


def _gauges(statistics: Statistics) -> Iterable[Metric]:
    yield GaugeMetricFamily("quire_requests_running", "Sequences that are computed", value=statistics.num_running)
    yield GaugeMetricFamily("quire_requests_waiting", "Requests that the engine queues", value=statistics.num_waiting)
    num_used = statistics.num_blocks - statistics.num_free_blocks
    blocks = GaugeMetricFamily("quire_kv_blocks", "KV blocks by what they are for", labels=["state"])
    blocks.add_metric(["used"], num_used)
    blocks.add_metric(["cached"], statistics.num_cached_blocks)
    blocks.add_metric(["free"], statistics.num_free_blocks - statistics.num_cached_blocks)
    yield blocks
    yield GaugeMetricFamily("quire_kv_usage_ratio", "Share of the KV blocks in use", value=kv_usage(statistics))


def _counters(statistics: Statistics) -> Iterable[Metric]:
    for name, text, value in (
        ("quire_steps", "Steps of the engine", statistics.num_steps),
        ("quire_step_seconds", "Time spent in steps", statistics.busy_s),
        ("quire_computed_tokens", "Tokens computed in steps", statistics.num_computed_tokens),
        ("quire_prompt_tokens", "Prompt tokens of requests that were begun", statistics.num_prompt_tokens),
        ("quire_generation_tokens", "Tokens generated", statistics.num_generated_tokens),
        ("quire_prefix_cache_queries", "Prompt tokens looked up in the prefix cache", statistics.num_looked_up_tokens),
        ("quire_prefix_cache_hits", "Prompt tokens found in the prefix cache", statistics.num_cached_tokens),
        ("quire_preemptions", "Sequences that had to give up their KV blocks", statistics.num_preemptions),
        ("quire_lost_events", "Events that left the event log before they were counted", statistics.num_lost_events),
    ):
        yield CounterMetricFamily(name, text, value=value)
    finished = CounterMetricFamily("quire_requests", "Completions that ended", labels=["finish_reason"])
    for reason, number in {**dict.fromkeys(FINISH_REASONS, 0), **statistics.num_finished}.items():
        finished.add_metric([reason], number)
    yield finished


def _histograms(statistics: Statistics) -> Iterable[Metric]:
    steps = HistogramMetricFamily("quire_step_duration_seconds", "Duration of one step", labels=["kind"])
    for kind in ("prefill", "decode"):
        add_named(steps, [kind], f"step_{kind}", statistics)
    yield steps
    for name, key, text in (
        ("quire_time_to_first_token_seconds", "time_to_first_token", "From arrival to the first token"),
        ("quire_inter_token_latency_seconds", "inter_token", "Between two tokens of one request"),
        ("quire_queue_seconds", "queue", "From arrival to the first step"),
        ("quire_request_seconds", "request", "From arrival to the end"),
    ):
        family = HistogramMetricFamily(name, text)
        add_named(family, [], key, statistics)
        yield family


def add_named(family: HistogramMetricFamily, labels: Sequence[str], name: str, statistics: Statistics) -> None:
    """Add the histogram of this name to a family."""
    bounds = BOUNDS_S[name]
    histogram = statistics.histograms.get(name) or Histogram([0] * (len(bounds) + 1))
    add_histogram(family, labels, bounds, histogram)


def add_histogram(
    family: HistogramMetricFamily, labels: Sequence[str], bounds: Sequence[float], histogram: Histogram
) -> None:
    """Add one histogram to a family: Prometheus's buckets count everything up to their bound."""
    names = [*map(str, bounds), "+Inf"]
    sums = itertools.accumulate(histogram.counts)
    family.add_metric(list(labels), list(zip(names, sums, strict=True)), histogram.total)


def kv_usage(statistics: Statistics) -> float:
    """The share of KV blocks that requests own."""
    num_blocks = statistics.num_blocks
    return (num_blocks - statistics.num_free_blocks) / num_blocks if num_blocks else 0.0
