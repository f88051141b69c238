from prometheus_client.core import HistogramMetricFamily

from quire.engine.process.messages import Histogram, Statistics
from quire.server.metrics_engine import add_histogram, engine_metrics, kv_usage


def test_buckets_are_cumulative() -> None:
    family = HistogramMetricFamily("h", "text")
    add_histogram(family, [], (1.0, 2.0), Histogram([3, 0, 4], 20.5))
    found = {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples}
    assert found == {("h_bucket", "1.0"): 3, ("h_bucket", "2.0"): 3, ("h_bucket", "+Inf"): 7, ("h_count", None): 7,
                     ("h_sum", None): 20.5}  # fmt: skip


def test_every_metric_is_there_before_the_engine_has_said_anything() -> None:
    samples = [sample for family in engine_metrics(Statistics()) for sample in family.samples]
    assert {sample.value for sample in samples} == {0}
    assert len({sample.name for sample in samples}) > 20


def test_usage_is_a_share() -> None:
    assert kv_usage(Statistics()) == 0
    assert kv_usage(Statistics(num_blocks=10, num_free_blocks=4)) == 0.6
