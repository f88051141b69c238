"""Options of the server: each field is a flag of `quire serve` and an environment variable.

API keys are no options, so that a list of processes never shows one: `keys.py` reads them from a file or from
`QUIRE_API_KEY`. Engine options are in `config.py`. Knows no HTTP. Next to read: `run.py`, `gate.py`.
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from quire.config import EngineOptions, option
from quire.errors import ConfigError

LOG_FORMATS = ("text", "json")
METRICS_NAMES = ("quire", "vllm")
REASONING_FORMATS = ("auto", "none")
ROUTER_POLICIES = ("prefix", "round-robin", "least-loaded")
MAX_LIMIT = 2**53
"""Whole numbers up to here are exact as floating point."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Address, access and limits of the server. Times are in seconds, sizes in bytes."""

    host: str = option("127.0.0.1", "address to listen on", group="server")
    port: int = option(8000, "port to listen on; 0: any free one", group="server")
    served_model_name: str | None = option(None, "the model's name in the API; unset: the model option", group="server")
    drain_timeout_s: float = option(30.0, "after SIGTERM, time that running requests have to finish", group="server")
    log_format: str = option("text", "log lines as text or as JSON", choices=LOG_FORMATS, group="server")
    metrics_names: str = option(
        "quire", "names at /metrics; vllm: vLLM's beside Quire's", choices=METRICS_NAMES, group="server"
    )
    reasoning_format: str = option(
        "auto", "reasoning of models that think: apart from the answer, or none: within it", choices=REASONING_FORMATS,
        group="server",
    )  # fmt: skip
    router_policy: str = option(
        "prefix", "replica of a request: that with most of its prompt cached, the next, or the least loaded",
        choices=ROUTER_POLICIES, group="server",
    )  # fmt: skip
    api_key_file: str | None = option(
        None, "file with one API key, or name:key, per line; beside QUIRE_API_KEY", group="access"
    )
    xray_text: bool = option(False, "send prompts and answers to the live view too, not only numbers", group="access")
    insecure: bool = option(False, "allow a public address without an API key", group="access")
    allowed_hosts: Sequence[str] = option((), "host name that clients may call the server by", group="access")
    allowed_origins: Sequence[str] = option(
        (), "web page origin that may call from a browser; * is any", group="access"
    )
    max_body_bytes: int = option(4 << 20, "largest request body", group="limits")
    max_queued_requests: int = option(256, "completions that may wait to be computed", group="limits")
    max_queued_tokens: int = option(1 << 18, "prompt tokens that may wait to be computed", group="limits")
    requests_per_minute: int | None = option(None, "requests per minute of one API key", group="limits")
    tokens_per_minute: int | None = option(
        None, "prompt and generated tokens per minute of one API key", group="limits"
    )
    queue_timeout_s: float = option(120.0, "time a request may wait for its first step; 0: no limit", group="limits")
    request_timeout_s: float = option(1800.0, "time a request may take in all; 0: no limit", group="limits")

    def __post_init__(self) -> None:
        if not isinstance(self.port, int) or isinstance(self.port, bool) or not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port!r} is not in 0 … 65535")
        for name in ("drain_timeout_s", "queue_timeout_s", "request_timeout_s"):
            value: Any = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e9:
                raise ConfigError(f"{name}={value!r} is not a number of seconds of at least 0")
        for name in ("max_body_bytes", "max_queued_requests", "max_queued_tokens", "requests_per_minute",
                     "tokens_per_minute"):  # fmt: skip
            value = getattr(self, name)
            if value is None and name.endswith("_per_minute"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_LIMIT:
                raise ConfigError(f"{name}={value!r} is not a whole number in 1 … {MAX_LIMIT}")
        for item in fields(self):
            value, choices = getattr(self, item.name), item.metadata["choices"]
            if choices and value not in choices:
                raise ConfigError(f"{item.name}={value!r} is not one of {', '.join(choices)}")

    def model_name(self, engine: EngineOptions) -> str:
        """Return the model's name in the API."""
        return self.served_model_name or engine.model

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the server."""
        if self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
