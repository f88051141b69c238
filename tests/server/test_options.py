import math

import pytest

from quire.errors import ConfigError
from quire.server.options import ServerOptions, parse_keep_alive


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", -1), ("port", 65_536), ("port", True), ("port", "80"),
        ("drain_timeout_s", -1), ("queue_timeout_s", float("nan")), ("request_timeout_s", float("inf")),
        ("request_timeout_s", True), ("max_body_bytes", 0), ("max_queued_requests", -1), ("max_queued_tokens", 1.5),
        ("requests_per_minute", 0), ("tokens_per_minute", False), ("log_format", "xml"), ("metrics_names", "all"),
        ("keep_alive", "soon"), ("keep_alive", ""), ("keep_alive", "5m ago"), ("keep_alive", "nan"),
        ("models_memory_bytes", 0), ("reasoning_budget", -1), ("reasoning_budget", 1.5),
    ],
)  # fmt: skip
def test_error_names_the_option_with_a_bad_value(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        ServerOptions(**{name: value})


def test_reasoning_has_no_budget_or_one_of_any_size() -> None:
    assert ServerOptions().reasoning_budget is None
    assert [ServerOptions(reasoning_budget=value).reasoning_budget for value in (0, 4096)] == [0, 4096]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("1.5h", 5400), ("300", 300), (300, 300), (".5s", 0.5), ("250ms", 0.25), (0, 0),
     ("0", 0), (-1, math.inf), ("-1", math.inf), ("-5m", math.inf)],
)  # fmt: skip
def test_keep_alive_is_read_as_ollama_reads_it(value: str | float, seconds: float) -> None:
    assert parse_keep_alive(value) == seconds


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("LocalHost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("example.org", False), ("", False), ("localhost.example", False)],
)  # fmt: skip
def test_loopback_addresses_are_local(host: str, is_local: bool) -> None:
    assert ServerOptions(host=host).is_local is is_local
