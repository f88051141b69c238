"""Metrics of the server in Prometheus's text format.

No label takes its value from a client. Next to read: `metrics_engine.py`, `routes/metrics.py`.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from quire import __version__
from quire.engine.process.messages import Histogram
from quire.engine.process.statistics import LATENCY_BOUNDS_S
from quire.server.admission import Admission, statistics_of
from quire.server.metrics_engine import add_histogram, engine_metrics
from quire.server.options import ServerOptions
from quire.server.supervisor import Supervisor

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
MAX_ROUTES = 200
REFUSALS = ("queue_full", "rate_limit_exceeded", "too_many_completions")
"""Shown as 0 before the first: Prometheus sees no increase of a counter that begins at 1."""
LAG_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
LAG_EVERY_S = 0.25


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
