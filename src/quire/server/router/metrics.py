"""Metrics of a router in Prometheus's text format: requests and tokens by replica.

No label takes its value from a client. Next to read: `../metrics.py`, whose metrics of HTTP are the same here.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import prometheus_client
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.server.announcements import Ended
from quire.server.metrics import HttpMetrics

if TYPE_CHECKING:
    from quire.server.router.replica import Replica

LABELS = ("replica", "policy")
Gauge = tuple[str, str, Callable[["Replica"], float | None]]
"""Name, help text, value; None for what a replica does not tell."""
GAUGES: tuple[Gauge, ...] = (
    ("up", "1 while the replica may get requests", lambda replica: replica.is_ready),
    ("running", "Sequences that the replica computes, of all its clients", lambda replica: replica.num_running),
    ("waiting", "Requests that wait there", lambda replica: replica.load.num_waiting),
    ("generation_tokens", "Tokens that it has generated since its engine's start, for all its clients",
     lambda replica: None if replica.is_silent else replica.load.num_generated_tokens),
    ("in_flight", "Requests of this router that the replica computes", lambda replica: replica.num_in_flight),
    ("queued_tokens", "Prompt tokens that wait there", lambda replica: replica.load.num_queued_tokens),
    ("cached_blocks", "Prefix blocks that the replica has announced", lambda replica: len(replica.digests)),
)  # fmt: skip


class RouterMetrics(HttpMetrics, Collector):
    """The content of a router's `/metrics`. For one event loop."""

    def __init__(self, policy: str) -> None:
        super().__init__()
        self._policy = policy
        self._replicas: Sequence[Replica] = ()

        def counter(name: str, text: str) -> prometheus_client.Counter:
            return prometheus_client.Counter(f"quire_router_{name}", text, LABELS, registry=self.registry)

        self._requests = counter("requests", "Requests that were sent to a replica")
        self._failures = counter("failures", "Requests that a replica failed before the first byte of an answer")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of ended requests")
        self._hit_tokens = counter("hit_tokens", "Prompt tokens that the replica found in its prefix cache")
        self._generated_tokens = counter("generation_tokens", "Generated tokens of ended requests")
        self.registry.register(self)

    def watch(self, replicas: "Sequence[Replica]") -> None:
        """Show these replicas."""
        self._replicas = replicas

    def sent(self, name: str) -> None:
        """Count a request that was sent to a replica."""
        self._requests.labels(name, self._policy).inc()

    def failed(self, name: str) -> None:
        """Count a request that a replica failed before the first byte of its answer."""
        self._failures.labels(name, self._policy).inc()

    def ended(self, name: str, ended: Ended) -> None:
        """Count the tokens of a request."""
        self._prompt_tokens.labels(name, self._policy).inc(ended.num_prompt_tokens)
        self._hit_tokens.labels(name, self._policy).inc(ended.num_cached_tokens)
        self._generated_tokens.labels(name, self._policy).inc(ended.num_generated_tokens)

    def collect(self) -> Iterable[Metric]:
        """Yield the gauges of all replicas, and the sums that `quire ps` shows."""
        for name, text, value in GAUGES:
            family = GaugeMetricFamily(f"quire_router_replica_{name}", text, labels=("replica",))
            for replica in self._replicas:
                if (found := value(replica)) is not None:
                    family.add_metric((replica.name,), float(found))
            yield family
        num_running = sum(replica.num_running for replica in self._replicas)
        num_waiting = sum(replica.load.num_waiting for replica in self._replicas)
        yield GaugeMetricFamily("quire_requests_running", "Running sequences", num_running)
        yield GaugeMetricFamily("quire_requests_waiting", "Waiting requests", num_waiting)
