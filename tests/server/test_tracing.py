"""Names, times and parents of spans, with a stand-in for the provider."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from quire.extras import install_command
from quire.outputs import RequestMetrics
from quire.server.request_record import Caller, RequestRecord
from quire.server.tracing import Tracer, phases
from tests.server.fake_engine import in_loop
from tests.server.served import serving

needs_api = pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry") is None, reason="opentelemetry is not installed"
)
METRICS = RequestMetrics(10.0, 10.5, 11.0, 14.0, 14.5, num_preemptions=1)


class Recorder:
    """Stand-in for `TracerProvider` that keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[SimpleNamespace] = []

    def get_tracer(self, name: str) -> "Recorder":
        return self

    def start_span(self, name: str, **given: Any) -> SimpleNamespace:
        span = SimpleNamespace(name=name, given=given, end_ns=None)
        span.end = lambda end_time=None: setattr(span, "end_ns", end_time)
        self.spans.append(span)
        return span


def test_phases_follow_each_other() -> None:
    assert phases(METRICS) == [("queue", 10.0, 10.5), ("prefill", 10.5, 11.0), ("decode", 11.0, 14.5)]


def test_request_that_never_ran_has_only_a_queue_phase() -> None:
    assert phases(RequestMetrics(10.0, finished_time_s=12.0)) == [("queue", 10.0, 12.0)]
    assert phases(RequestMetrics(10.0)) == []


def test_tracing_is_off_without_an_exporter() -> None:
    assert Tracer.load({}) is None
    assert Tracer.load({"OTEL_SERVICE_NAME": "a"}) is None
    assert Tracer.load({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1", "OTEL_SDK_DISABLED": "true"}) is None


@pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry") is not None and importlib.util.find_spec("opentelemetry.sdk") is not None,
    reason="the extra otel is installed",
)
def test_missing_exporter_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert Tracer.load({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1"}) is None
    assert install_command("otel") in caplog.text


@needs_api
def test_spans_of_a_request() -> None:
    recorder = Recorder()
    record = RequestRecord("id", "POST", "/", Caller("ann"), 7, 9)
    Tracer(recorder).write(record, METRICS, ["stop"])
    whole = recorder.spans[0]
    assert [span.name for span in recorder.spans] == ["quire.request", "queue", "prefill", "decode"]
    assert whole.given["attributes"]["gen_ai.usage.output_tokens"] == 9
    lengths = [span.end_ns - span.given["start_time"] for span in recorder.spans]
    assert lengths == [4_500_000_000, 500_000_000, 500_000_000, 3_500_000_000]


@needs_api
def test_span_belongs_to_the_trace_of_the_client() -> None:
    from opentelemetry import trace

    recorder = Recorder()
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    record = RequestRecord("id", "POST", "/", trace_headers=(("traceparent", parent),))
    Tracer(recorder).write(record, METRICS, [])
    context = trace.get_current_span(recorder.spans[0].given["context"]).get_span_context()
    assert f"{context.trace_id:032x}" == parent.split("-")[1]


@needs_api
@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_every_request_is_traced_without_its_text(stream: bool) -> None:
    async with serving() as served:
        recorder = Recorder()
        served.state.admission._tracer = Tracer(recorder)
        assert (await served.chat(text="the secret prompt", stream=stream)).status == 200
        await served.until_idle()
        assert [span.name for span in recorder.spans] == ["quire.request", "queue", "prefill", "decode"]
        attributes = recorder.spans[0].given["attributes"]
        assert attributes["gen_ai.usage.output_tokens"] == 4
        assert "secret" not in str(attributes)
