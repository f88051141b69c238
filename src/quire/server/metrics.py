"""Metrics of the server in Prometheus's text format.

No label takes its value from a client. Metrics of the engine come from the `Statistics` in each of its messages; those
that mean the same in vLLM can be shown under vLLM's names too, for dashboards and autoscalers made for it.
Next to read: `../engine/process/statistics.py`.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence

import prometheus_client
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from quire import __version__
from quire.engine.process.messages import Histogram, Statistics
from quire.engine.process.statistics import BOUNDS_S, LATENCY_BOUNDS_S
from quire.server.admission import Admission
from quire.server.engines import Engines
from quire.server.options import ServerOptions
from quire.server.prefix_breaks import PrefixBreaks
from quire.server.supervisor import Supervisor
from quire.types import RequestStatus

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NO_REFUSALS = dict.fromkeys(("queue_full", "rate_limit_exceeded", "too_many_completions"), 0)
"""Shown as 0 before the first: Prometheus sees no increase of a counter that begins at 1."""
LAG_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
LAG_EVERY_S = 0.25
_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily
FINISH_REASONS = tuple(status.value for status in RequestStatus if status.is_finished)
VLLM_LABELS = ("model_name", "engine")
# Series of the times at which counters began double the page.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

# Name, vLLM's name, help text, value.
_Row = tuple[str, str | None, str, Callable[[Statistics], float]]
GAUGES: tuple[_Row, ...] = (
    ("requests_running", "num_requests_running", "Running sequences", lambda s: s.num_running),
    ("requests_waiting", "num_requests_waiting", "Requests in the engine's queue", lambda s: s.num_waiting),
    ("kv_usage_ratio", "kv_cache_usage_perc", "Share of the KV blocks in use, 1 is all", lambda s: kv_usage(s)),
    (
        "weights_mapped_bytes",
        None,
        "Weights on disk, larger than memory; 0: all are in memory",
        lambda s: s.weights_mapped_bytes,
    ),
    (
        "weights_resident_bytes",
        None,
        "Of mapped files, what is in the engine's memory",
        lambda s: s.weights_resident_bytes,
    ),
    ("weights_limit_bytes", None, "Room in memory for weights on disk", lambda s: s.weights_limit_bytes),
)
COUNTERS: tuple[_Row, ...] = (
    ("steps", None, "Engine steps", lambda s: s.num_steps),
    ("step_seconds", None, "Time spent in steps", lambda s: s.busy_s),
    ("computed_tokens", None, "Tokens computed in steps", lambda s: s.num_computed_tokens),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of started requests", lambda s: s.num_prompt_tokens),
    ("generation_tokens", "generation_tokens", "Generated tokens", lambda s: s.num_generated_tokens),
    (
        "prefix_cache_queries",
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache",
        lambda s: s.num_looked_up_tokens,
    ),
    (
        "prefix_cache_hits",
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache",
        lambda s: s.num_cached_tokens,
    ),
    ("kv_disk_hits", None, "Tokens whose KV blocks were read back from disk", lambda s: s.num_disk_tokens),
    ("kv_disk_read_bytes", None, "KV blocks read from disk", lambda s: s.num_disk_bytes_read),
    ("kv_disk_written_bytes", None, "KV blocks written to disk", lambda s: s.num_disk_bytes_written),
    (
        "kv_swapped_in_tokens",
        None,
        "Tokens of preempted requests whose KV blocks came back from host memory",
        lambda s: s.num_swapped_tokens,
    ),
    ("drafts", "spec_decode_num_drafts", "Drafts that steps verified", lambda s: s.num_drafts),
    ("draft_tokens", "spec_decode_num_draft_tokens", "Draft tokens that steps verified", lambda s: s.num_draft_tokens),
    (
        "accepted_tokens",
        "spec_decode_num_accepted_tokens",
        "Draft tokens that were right",
        lambda s: s.num_accepted_tokens,
    ),
    (
        "weights_read_bytes",
        None,
        "Read from disk where weights are larger than memory, KV blocks left out",
        lambda s: s.weights_read_bytes,
    ),
    (
        "experts_chosen_bytes",
        None,
        "Experts on disk that steps read, from memory or from disk",
        lambda s: s.experts_chosen_bytes,
    ),
    ("preemptions", "num_preemptions", "Preempted sequences", lambda s: s.num_preemptions),
    ("lost_events", None, "Events that left the event log before they were counted", lambda s: s.num_lost_events),
)
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

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._models: list[tuple[str, Engines, Admission, PrefixBreaks]] = []
        self._lag_timer: asyncio.TimerHandle | None = None
        self.registry = registry = CollectorRegistry(auto_describe=False)
        self._http = prometheus_client.Counter(
            "quire_http_requests", "HTTP requests", ("method", "route", "status"), registry=registry
        )
        self._http_s = prometheus_client.Histogram(
            "quire_http_request_seconds",
            "Until the last byte of the answer",
            ("route",),
            registry=registry,
            buckets=LATENCY_BOUNDS_S,
        )
        self._lag = prometheus_client.Histogram(
            "quire_event_loop_lag_seconds",
            "How late the server's event loop is",
            registry=registry,
            buckets=LAG_BOUNDS_S,
        )
        ProcessCollector(registry=registry)
        registry.register(self)

    def render(self) -> bytes:
        """Return the page."""
        return generate_latest(self.registry)

    # --- Calls of the gate ----------------------------------------------------------------------

    def http_request(self, method: str, route: str | None, status: int, duration_s: float) -> None:
        """Count a request. `route`: the template of its path; None if the gate refused it or no route matched."""
        name = route or "none"
        self._http.labels(method if method in METHODS else "other", name, str(status)).inc()
        self._http_s.labels(name).observe(duration_s)

    def watch_loop(self) -> None:
        """Measure from now on how late the running event loop is. A second call does nothing."""
        if self._lag_timer is None:
            self._measure_lag(asyncio.get_running_loop(), None)

    def _measure_lag(self, loop: asyncio.AbstractEventLoop, due_s: float | None) -> None:
        now_s = loop.time()
        if due_s is not None:
            self._lag.observe(max(0.0, now_s - due_s))
        next_s = now_s + LAG_EVERY_S
        self._lag_timer = loop.call_at(next_s, self._measure_lag, loop, next_s)

    def add_model(self, name: str, engines: Engines, admission: Admission, breaks: PrefixBreaks) -> None:
        """Show the metrics of a model too. Of several models each has its name as the label `model`, of
        several engines each its number as the label `engine`."""
        self._models.append((name, engines, admission, breaks))

    # --- Calls of Prometheus's client -----------------------------------------------------------

    def collect(self) -> Iterable[Metric]:
        """Return every metric as it is now."""
        versions = [((__version__, name, engine.options.scheduling_policy), 1) for name, engine, _, _ in self._models]
        labels = ("version", "model", "scheduling_policy")
        yield _family(_GAUGE, "quire_build_info", "Version, model and order of its queue", labels, versions)
        if len(self._models) == 1:
            yield from self._of_model(*self._models[0])
        else:
            yield from _labelled("model", ((model[0], self._of_model(*model)) for model in self._models))

    def _of_model(self, name: str, engines: Engines, admission: Admission, breaks: PrefixBreaks) -> Iterable[Metric]:
        yield _GAUGE("quire_admitted_requests", "Completions, waiting or running", admission.num_requests)
        refused = [((reason,), number) for reason, number in {**_NO_REFUSALS, **admission.num_refused}.items()]
        yield _family(_COUNTER, "quire_refused_requests", "Refused requests", ("reason",), refused)
        yield _COUNTER("quire_prefix_breaks", "Prompts that differ early from one that they repeat", breaks.num_breaks)
        yield _COUNTER("quire_prefix_break_tokens", "Prompt tokens behind such a difference", breaks.num_lost_tokens)
        if breaks.last_at is not None:
            yield _GAUGE("quire_prefix_last_break", "Token at which the last such prompt differs", breaks.last_at)
        vllm_name = name if self._options.metrics_names == "vllm" else None
        of_engines = [
            _of_engine(*pair, vllm_name, str(rank))
            for rank, pair in enumerate(zip(engines.supervisors, engines.statistics, strict=True))
        ]
        yield from of_engines[0] if len(of_engines) == 1 else _labelled("engine", enumerate(of_engines))


# --- Metrics of the engine ----------------------------------------------------------------------


def _of_engine(
    supervisor: Supervisor, statistics: Statistics, vllm_model_name: str | None, rank: str
) -> Iterable[Metric]:
    yield _GAUGE("quire_engine_up", "1 while the engine takes requests", supervisor.is_ready)
    yield _COUNTER("quire_engine_deaths", "Engine processes that ended unexpectedly", supervisor.num_deaths)
    yield from engine_metrics(statistics, vllm_model_name, rank)


def engine_metrics(statistics: Statistics, vllm_model_name: str | None = None, rank: str = "0") -> Iterable[Metric]:
    """Return all metrics, 0 where no engine has reported; with a model's name also those of vLLM."""
    of_vllm = () if vllm_model_name is None else (vllm_model_name, rank)
    for kind, rows in ((_GAUGE, GAUGES), (_COUNTER, COUNTERS)):
        for name, vllm_name, text, value in rows:
            yield kind(f"quire_{name}", text, value(statistics))
            if vllm_name and of_vllm:
                yield _family(kind, f"vllm:{vllm_name}", text, VLLM_LABELS, [(of_vllm, value(statistics))])
    for name, vllm_name, text, key in HISTOGRAMS:
        yield _histogram(f"quire_{name}", text, (), [((), key)], statistics)
        if of_vllm:
            yield _histogram(f"vllm:{vllm_name}", text, VLLM_LABELS, [(of_vllm, key)], statistics)
    accepted = [(str(position), count) for position, count in enumerate(statistics.num_accepted_at)]
    name, text = "accepted_tokens_per_position", "Right draft tokens by position in the draft, from 0"
    yield _family(_COUNTER, f"quire_{name}", text, ("position",), [((at,), count) for at, count in accepted])
    if of_vllm:
        of_positions = [((*of_vllm, at), count) for at, count in accepted]
        labels, vllm_name = (*VLLM_LABELS, "position"), "vllm:spec_decode_num_accepted_tokens_per_pos"
        yield _family(_COUNTER, vllm_name, text, labels, of_positions)
    num_free, num_cached = statistics.num_free_blocks, statistics.num_cached_blocks
    states = {"used": statistics.num_blocks - num_free, "cached": num_cached, "free": num_free - num_cached}
    blocks = [((state,), number) for state, number in states.items()]
    yield _family(_GAUGE, "quire_kv_blocks", "KV blocks: used, cached prefix, free", ("state",), blocks)
    kinds = [((kind,), f"step_{kind}") for kind in ("prefill", "decode")]
    yield _histogram("quire_step_duration_seconds", "Duration of one step", ("kind",), kinds, statistics)
    finished = {**dict.fromkeys(FINISH_REASONS, 0), **statistics.num_finished}
    by_reason = [((reason,), number) for reason, number in finished.items()]
    yield _family(_COUNTER, "quire_requests", "Completions that ended", ("finish_reason",), by_reason)
    if of_vllm:
        of_models = [((*of_vllm, reason), number) for reason, number in finished.items()]
        labels = (*VLLM_LABELS, "finished_reason")
        yield _family(_COUNTER, "vllm:request_success", "Requests that ended", labels, of_models)


def _labelled(label_name: str, items: Iterable[tuple[str | int, Iterable[Metric]]]) -> Iterable[Metric]:
    """Merge the metrics of several models or engines, with their name as a label. vLLM's have both of their own."""
    merged: dict[str, Metric] = {}
    for name, metrics in items:
        for metric in metrics:
            family = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            label = {} if metric.name.startswith("vllm:") else {label_name: str(name)}
            family.samples += [sample._replace(labels={**label, **sample.labels}) for sample in metric.samples]
    return merged.values()


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    text: str,
    labels: Sequence[str],
    rows: Iterable[tuple[tuple[str, ...], float]],
) -> Metric:
    family = kind(name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _histogram(
    name: str, text: str, labels: Sequence[str], keys: Iterable[tuple[tuple[str, ...], str]], statistics: Statistics
) -> Metric:
    """Return a histogram of the engine's; `keys`: values of the labels, and the key in `Statistics.histograms`."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, key in keys:
        bounds = BOUNDS_S[key]
        histogram = statistics.histograms.get(key) or Histogram([0] * (len(bounds) + 1))
        # A bucket of Prometheus counts everything up to its bound.
        buckets = zip([*map(str, bounds), "+Inf"], itertools.accumulate(histogram.counts), strict=True)
        family.add_metric(values, list(buckets), histogram.total)
    return family


def kv_usage(statistics: Statistics) -> float:
    """Return the share of the KV blocks that running requests hold, 0 to 1."""
    num_blocks = statistics.num_blocks
    return (num_blocks - statistics.num_free_blocks) / num_blocks if num_blocks else 0.0
