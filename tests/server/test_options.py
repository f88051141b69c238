import pytest

from quire.errors import ConfigError
from quire.server.options import ServerOptions


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", -1), ("port", 65_536), ("port", True), ("port", "80"),
        ("drain_timeout_s", -1), ("queue_timeout_s", float("nan")), ("request_timeout_s", float("inf")),
        ("request_timeout_s", True), ("max_body_bytes", 0), ("max_queued_requests", -1), ("max_queued_tokens", 1.5),
        ("requests_per_minute", 0), ("tokens_per_minute", False), ("log_format", "xml"), ("metrics_names", "all"),
    ],
)  # fmt: skip
def test_error_names_the_option_with_a_bad_value(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        ServerOptions(**{name: value})


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("LocalHost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("example.org", False), ("", False), ("localhost.example", False)],
)  # fmt: skip
def test_loopback_addresses_are_local(host: str, is_local: bool) -> None:
    assert ServerOptions(host=host).is_local is is_local
