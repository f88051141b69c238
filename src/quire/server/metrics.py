"""Metrics of the server in Prometheus's text format.

No label takes its value from a client. Metrics of the engine come from the `Statistics` in each of its messages; those
that mean the same in vLLM can be shown under vLLM's names too, for dashboards and autoscalers made for it.
Next to read: `../engine/process/statistics.py`.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from quire import __version__
from quire.engine.process.messages import Histogram, Statistics
from quire.engine.process.statistics import BOUNDS_S, LATENCY_BOUNDS_S
from quire.server.admission import Admission, statistics_of
from quire.server.options import ServerOptions
from quire.server.supervisor import Supervisor
from quire.types import RequestStatus

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
MAX_ROUTES = 200
REFUSALS = ("queue_full", "rate_limit_exceeded", "too_many_completions")
"""Shown as 0 before the first: Prometheus sees no increase of a counter that begins at 1."""
LAG_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
LAG_EVERY_S = 0.25
FINISH_REASONS = tuple(status.value for status in RequestStatus if status.is_finished)
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


class Metrics(Collector):
    """The content of `/metrics`. For one event loop."""

    def __init__(self, options: ServerOptions, model_name: str, supervisor: Supervisor, admission: Admission) -> None:
        self._options = options
        self._model_name = model_name
        self._supervisor = supervisor
        self._admission = admission
        self._http: Counter[tuple[str, str, str]] = Counter()
        self._http_s: dict[str, Histogram] = {}
        self._lag = Histogram([0] * (len(LAG_BOUNDS_S) + 1))
        self._lag_timer: asyncio.TimerHandle | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """Return the page."""
        return generate_latest(self._registry)

    # --- Calls of the gate ----------------------------------------------------------------------

    def http_request(self, method: str, route: str | None, status: int, duration_s: float) -> None:
        """Count a request. `route`: the template of its path; None if the gate refused it or no route matched."""
        name = route or "none"
        if name not in self._http_s and len(self._http_s) >= MAX_ROUTES:
            name = "other"
        self._http[method if method in METHODS else "other", name, str(status)] += 1
        histogram = self._http_s.get(name)
        if histogram is None:
            histogram = self._http_s[name] = Histogram([0] * (len(LATENCY_BOUNDS_S) + 1))
        histogram.add(LATENCY_BOUNDS_S, duration_s)

    def watch_loop(self) -> None:
        """Measure from now on how late the running event loop is. A second call does nothing."""
        if self._lag_timer is None:
            self._measure_lag(asyncio.get_running_loop(), None)

    def _measure_lag(self, loop: asyncio.AbstractEventLoop, due_s: float | None) -> None:
        now_s = loop.time()
        if due_s is not None:
            self._lag.add(LAG_BOUNDS_S, max(0.0, now_s - due_s))
        next_s = now_s + LAG_EVERY_S
        self._lag_timer = loop.call_at(next_s, self._measure_lag, loop, next_s)

    # --- Calls of Prometheus's client -----------------------------------------------------------

    def collect(self) -> Iterable[Metric]:
        """Return every metric as it is now."""
        vllm_model_name = self._model_name if self._options.metrics_names == "vllm" else None
        yield from self._server_metrics()
        yield from engine_metrics(statistics_of(self._supervisor), vllm_model_name)

    def _server_metrics(self) -> Iterable[Metric]:
        build = GaugeMetricFamily("quire_build_info", "Version and model", labels=["version", "model"])
        build.add_metric([__version__, self._model_name], 1)
        yield build
        is_ready = self._supervisor.is_ready
        yield GaugeMetricFamily("quire_engine_up", "1 while the engine takes requests", value=is_ready)
        deaths = self._supervisor.num_deaths
        yield CounterMetricFamily("quire_engine_deaths", "Engine processes that ended unexpectedly", value=deaths)
        yield GaugeMetricFamily(
            "quire_admitted_requests",
            "Completions in the server, waiting or running",
            value=self._admission.num_requests,
        )
        refused = CounterMetricFamily("quire_refused_requests", "Refused requests", labels=["reason"])
        for reason, number in {**dict.fromkeys(REFUSALS, 0), **self._admission.num_refused}.items():
            refused.add_metric([reason], number)
        yield refused
        requests = CounterMetricFamily("quire_http_requests", "HTTP requests", labels=["method", "route", "status"])
        for labels, number in self._http.items():
            requests.add_metric(list(labels), number)
        yield requests
        durations = HistogramMetricFamily(
            "quire_http_request_seconds", "Until the last byte of the answer", labels=["route"]
        )
        for route, histogram in self._http_s.items():
            add_histogram(durations, [route], LATENCY_BOUNDS_S, histogram)
        yield durations
        lag = HistogramMetricFamily("quire_event_loop_lag_seconds", "How late the server's event loop is")
        add_histogram(lag, [], LAG_BOUNDS_S, self._lag)
        yield lag


# --- Metrics of the engine ----------------------------------------------------------------------


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
