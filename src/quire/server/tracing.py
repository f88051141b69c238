"""Spans of requests for OpenTelemetry: one per request, inside of it its time in the queue, in prefill and in decode.

Off unless the extra `otel` is installed and an exporter's address is set (`OTEL_EXPORTER_OTLP_ENDPOINT` or
`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`); everything else is configured by OpenTelemetry's own variables. A span holds
counts and times, never text. Next to read: `admission.py`, which ends requests.
"""

import itertools
import logging
import time
from collections.abc import Mapping
from typing import Any

from quire.extras import install_command
from quire.outputs import RequestMetrics
from quire.server.request_record import RequestRecord

LOGGER = logging.getLogger("quire.server")
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Tracer:
    """Writer of spans after a request has ended, from the times that the engine measured."""

    def __init__(self, provider: Any) -> None:
        """`provider`: a `TracerProvider` of OpenTelemetry."""
        self._tracer = provider.get_tracer("quire")
        # The engine's times are of the monotonic clock, spans' of the wall clock.
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    @classmethod
    def load(cls, environment: Mapping[str, str]) -> "Tracer | None":
        """Return the tracer that the environment configures; None without one, or without the extra `otel`."""
        if not any(environment.get(name) for name in ENDPOINTS):
            return None
        if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            LOGGER.warning("an OpenTelemetry exporter is configured but not installed: %s", install_command("otel"))
            return None
        resource = Resource.create({SERVICE_NAME: "quire"}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def write(self, record: RequestRecord, metrics: RequestMetrics, finish_reasons: list[str]) -> None:
        """Write the spans of one request that has ended."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(dict(record.trace_headers))
        whole = self._tracer.start_span(
            "quire.request",
            context=parent,
            kind=trace.SpanKind.SERVER,
            start_time=self._ns(metrics.arrival_time_s),
            attributes={
                "gen_ai.usage.input_tokens": record.num_prompt_tokens,
                "gen_ai.usage.output_tokens": record.num_generated_tokens,
                "gen_ai.response.finish_reasons": finish_reasons,
                "quire.request_id": record.request_id,
                "quire.client_id": record.client_id,
                "quire.preemptions": metrics.num_preemptions,
            },
        )
        inside = trace.set_span_in_context(whole)
        for name, start_s, end_s in phases(metrics):
            span = self._tracer.start_span(name, context=inside, start_time=self._ns(start_s))
            span.end(end_time=self._ns(end_s))
        ended_s = metrics.finished_time_s
        whole.end(end_time=None if ended_s is None else self._ns(ended_s))

    def _ns(self, time_s: float) -> int:
        return int(time_s * 1e9) + self._offset_ns


def phases(metrics: RequestMetrics) -> list[tuple[str, float, float]]:
    """Return (name, start, end) of each phase that a request reached. Units: seconds."""
    moments = [
        ("queue", metrics.arrival_time_s),
        ("prefill", metrics.first_scheduled_time_s),
        ("decode", metrics.first_token_time_s),
        ("", metrics.finished_time_s),
    ]
    known = [(name, moment) for name, moment in moments if moment is not None]
    return [(name, start_s, max(start_s, end_s)) for (name, start_s), (_, end_s) in itertools.pairwise(known)]
