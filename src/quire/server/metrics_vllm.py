"""Quire's numbers under vLLM's names, so that dashboards and autoscalers made for it go on working.

Only what means the same is here. Next to read: `metrics_engine.py`.
"""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from quire.engine.process.messages import Statistics
from quire.server.metrics_engine import add_named, kv_usage

LABELS = ["model_name", "engine"]


def vllm_metrics(statistics: Statistics, model_name: str) -> Iterable[Metric]:
    """The common ones of vLLM's metrics."""
    labels = [model_name, "0"]
    for name, text, value in (
        ("num_requests_running", "Requests in execution", float(statistics.num_running)),
        ("num_requests_waiting", "Requests in the queue", float(statistics.num_waiting)),
        ("kv_cache_usage_perc", "Share of KV blocks in use, 1 is all", kv_usage(statistics)),
    ):
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        gauge.add_metric(labels, value)
        yield gauge
    for name, text, number in (
        ("prefix_cache_queries", "Prompt tokens looked up", statistics.num_looked_up_tokens),
        ("prefix_cache_hits", "Prompt tokens found", statistics.num_cached_tokens),
        ("num_preemptions", "Preemptions", statistics.num_preemptions),
        ("prompt_tokens", "Prompt tokens", statistics.num_prompt_tokens),
        ("generation_tokens", "Generated tokens", statistics.num_generated_tokens),
    ):
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
        counter.add_metric(labels, number)
        yield counter
    success = CounterMetricFamily("vllm:request_success", "Requests that ended", labels=[*LABELS, "finished_reason"])
    for reason, number in statistics.num_finished.items():
        success.add_metric([*labels, reason], number)
    yield success
    for name, key, text in (
        ("time_to_first_token_seconds", "time_to_first_token", "Until the first token"),
        ("inter_token_latency_seconds", "inter_token", "Between two tokens"),
        ("e2e_request_latency_seconds", "request", "Whole requests"),
        ("request_queue_time_seconds", "queue", "In the queue"),
    ):
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
        add_named(family, labels, key, statistics)
        yield family
