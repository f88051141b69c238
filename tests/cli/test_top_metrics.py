"""Prometheus's text format, and what two pages of it say."""

import pytest

from quire.cli.top_metrics import Metrics, load_between, quantile
from tests.cli.metrics_page import page

PAGE = r"""
# TYPE a counter
a_total{x="1",y="two words"} 3
a_total{x="2",y="}\"\\\n"} 4e0 1700000000000
b 2.5
c NaN
d +Inf
broken
e{x="1} 3
f three
"""


def test_samples_and_labels() -> None:
    metrics = Metrics(PAGE, 0.0)
    assert metrics.value("a_total") == 7
    assert metrics.value("a_total", x="1") == 3
    assert metrics.value("a_total", x="1", y="other") == 0
    assert {"x": "2", "y": '}"\\\n'} in metrics.labels("a_total")
    assert metrics.value("b") == 2.5
    assert metrics.value("d") == float("inf")
    assert "c" in metrics
    assert not any(name in metrics for name in ("e", "f", "broken", "missing"))


def test_what_happened_between_two_looks() -> None:
    before = Metrics(page(tokens=100, requests=4, hits=10, queries=20), 10.0)
    text = page(tokens=150, requests=14, slow=5, hits=25, queries=40, running=3, waiting=2, kv=0.25, deaths=1)
    load = load_between(before, Metrics(text, 12.0))
    assert (load.model, load.seconds, load.running, load.waiting) == ('ti"ny', 2.0, 3, 2)
    assert (load.generation_tokens_per_s, load.prompt_tokens_per_s, load.requests_per_s) == (25.0, 50.0, 5.0)
    assert (load.kv_usage_ratio, load.cache_hit_ratio, load.engine_deaths) == (0.25, 0.75, 1)
    assert load.ttft_p50_s == pytest.approx(0.1)
    assert load.ttft_p95_s == pytest.approx(0.1 + 0.4 * 0.9)
    assert load.itl_p50_s is None


def test_nothing_happened() -> None:
    load = load_between(Metrics(page(tokens=5), 0.0), Metrics(page(tokens=5), 1.0))
    assert load.generation_tokens_per_s == 0
    assert (load.cache_hit_ratio, load.ttft_p50_s) == (None, None)


def test_an_engine_that_was_started_anew_counts_from_zero() -> None:
    load = load_between(Metrics(page(tokens=1000, requests=50), 0.0), Metrics(page(tokens=20, requests=4), 1.0))
    assert load.generation_tokens_per_s == 20
    assert load.ttft_p50_s == pytest.approx(0.05)


def test_an_empty_page() -> None:
    load = load_between(Metrics("", 0.0), Metrics("", 0.0))
    assert (load.model, load.running, load.ttft_p95_s) == ("", 0, None)


def test_quantiles_stay_in_their_bucket() -> None:
    text = 'h_bucket{le="1"} 0\nh_bucket{le="2"} 10\nh_bucket{le="+Inf"} 12\n'
    before, after = Metrics("", 0.0), Metrics(text, 1.0)
    assert quantile(before, after, "h", 0.5) == pytest.approx(1.6)
    assert quantile(before, after, "h", 0.99) == 2.0
