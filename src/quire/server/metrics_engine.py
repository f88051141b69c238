"""Prometheus metrics of the engine, from the `Statistics` that come with each of its messages.

Metrics that mean the same in vLLM can be shown under vLLM's names too, for dashboards and autoscalers made for it.
Next to read: `../engine/process/statistics.py`.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from quire.engine.process.messages import Histogram, Statistics
from quire.engine.process.statistics import BOUNDS_S
from quire.types import RequestStatus

FINISH_REASONS = tuple(status.value for status in RequestStatus if status.is_finished)
"""Shown as 0 before the first: Prometheus sees no increase of a counter that begins at 1."""
VLLM_LABELS = ("model_name", "engine")

# Name, vLLM's name, help text, value.
_Row = tuple[str, str | None, str, Callable[[Statistics], float]]
GAUGES: tuple[_Row, ...] = (
    ("requests_running", "num_requests_running", "Running sequences", lambda s: s.num_running),
    ("requests_waiting", "num_requests_waiting", "Requests in the engine's queue", lambda s: s.num_waiting),
    ("kv_usage_ratio", "kv_cache_usage_perc", "Share of the KV blocks in use, 1 is all", lambda s: kv_usage(s)),
)
COUNTERS: tuple[_Row, ...] = (
    ("steps", None, "Engine steps", lambda s: s.num_steps),
    ("step_seconds", None, "Time spent in steps", lambda s: s.busy_s),
    ("computed_tokens", None, "Tokens computed in steps", lambda s: s.num_computed_tokens),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of started requests", lambda s: s.num_prompt_tokens),
    ("generation_tokens", "generation_tokens", "Generated tokens", lambda s: s.num_generated_tokens),
    ("prefix_cache_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache",
     lambda s: s.num_looked_up_tokens),
    ("prefix_cache_hits", "prefix_cache_hits", "Prompt tokens found in the prefix cache",
     lambda s: s.num_cached_tokens),
    ("preemptions", "num_preemptions", "Preempted sequences", lambda s: s.num_preemptions),
    ("lost_events", None, "Events that left the event log before they were counted", lambda s: s.num_lost_events),
)  # fmt: skip
# Name, vLLM's name, help text, key in `Statistics.histograms`.
HISTOGRAMS = (
    ("time_to_first_token_seconds", "time_to_first_token_seconds", "From arrival to the first token",
     "time_to_first_token"),
    ("inter_token_latency_seconds", "inter_token_latency_seconds", "Between two tokens of one request", "inter_token"),
    ("queue_seconds", "request_queue_time_seconds", "From arrival to the first step", "queue"),
    ("request_seconds", "e2e_request_latency_seconds", "From arrival to the end", "request"),
)  # fmt: skip


def engine_metrics(statistics: Statistics, vllm_model_name: str | None = None) -> Iterable[Metric]:
    """Return all metrics, 0 where no engine has reported; with a model's name also those of vLLM."""
    for kind, rows in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
        for name, vllm_name, text, value in rows:
            yield kind(f"quire_{name}", text, value=value(statistics))
            if vllm_name is not None and vllm_model_name is not None:
                family = kind(f"vllm:{vllm_name}", text, labels=VLLM_LABELS)
                family.add_metric([vllm_model_name, "0"], value(statistics))
                yield family
    for name, vllm_name, text, key in HISTOGRAMS:
        histogram = HistogramMetricFamily(f"quire_{name}", text)
        _add_named(histogram, [], key, statistics)
        yield histogram
        if vllm_model_name is not None:
            histogram = HistogramMetricFamily(f"vllm:{vllm_name}", text, labels=VLLM_LABELS)
            _add_named(histogram, [vllm_model_name, "0"], key, statistics)
            yield histogram
    yield from _labelled(statistics)
    if vllm_model_name is not None:
        labels = [*VLLM_LABELS, "finished_reason"]
        success = CounterMetricFamily("vllm:request_success", "Requests that ended", labels=labels)
        for reason, number in _finished(statistics).items():
            success.add_metric([vllm_model_name, "0", reason], number)
        yield success


def _labelled(statistics: Statistics) -> Iterable[Metric]:
    num_used = statistics.num_blocks - statistics.num_free_blocks
    blocks = GaugeMetricFamily("quire_kv_blocks", "KV blocks: used, cached prefix, free", labels=["state"])
    blocks.add_metric(["used"], num_used)
    blocks.add_metric(["cached"], statistics.num_cached_blocks)
    blocks.add_metric(["free"], statistics.num_free_blocks - statistics.num_cached_blocks)
    yield blocks
    finished = CounterMetricFamily("quire_requests", "Completions that ended", labels=["finish_reason"])
    for reason, number in _finished(statistics).items():
        finished.add_metric([reason], number)
    yield finished
    steps = HistogramMetricFamily("quire_step_duration_seconds", "Duration of one step", labels=["kind"])
    for kind in ("prefill", "decode"):
        _add_named(steps, [kind], f"step_{kind}", statistics)
    yield steps


def _finished(statistics: Statistics) -> dict[str, int]:
    return {**dict.fromkeys(FINISH_REASONS, 0), **statistics.num_finished}


def _add_named(family: HistogramMetricFamily, labels: Sequence[str], name: str, statistics: Statistics) -> None:
    bounds = BOUNDS_S[name]
    add_histogram(family, labels, bounds, statistics.histograms.get(name) or Histogram([0] * (len(bounds) + 1)))


def add_histogram(
    family: HistogramMetricFamily, labels: Sequence[str], bounds: Sequence[float], histogram: Histogram
) -> None:
    """Add one histogram to a family; Prometheus's buckets count everything up to their bound."""
    names = [*map(str, bounds), "+Inf"]
    sums = itertools.accumulate(histogram.counts)
    family.add_metric(list(labels), list(zip(names, sums, strict=True)), histogram.total)


def kv_usage(statistics: Statistics) -> float:
    """Return the share of the KV blocks that running requests hold, 0 to 1."""
    num_blocks = statistics.num_blocks
    return (num_blocks - statistics.num_free_blocks) / num_blocks if num_blocks else 0.0
