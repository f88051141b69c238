"""Options of the server: each field is a flag of `quire serve` and an environment variable.

API keys are no options, so that a list of processes never shows one: `keys.py` reads them from a file or from
`QUIRE_API_KEY`. Engine options are in `config.py`. Knows no HTTP. Next to read: `run.py`, `gate.py`.
"""

import ipaddress
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from quire.config import EngineOptions
from quire.errors import ConfigError
from quire.option_fields import check_options, option

LOG_FORMATS = ("text", "json")
METRICS_NAMES = ("quire", "vllm")
REASONING_FORMATS = ("auto", "none")
DEFAULT_KEEP_ALIVE = "5m"
"""Of a server of several models; one model stays loaded."""
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
MAX_LIMIT = 2**53
"""Whole numbers up to here are exact as floating point."""
MAX_TIME_S = 10**9


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Address, access and limits of the server. Times are in seconds, sizes in bytes."""

    host: str = option("127.0.0.1", "address to listen on", group="server")
    port: int = option(8000, "port to listen on; 0: any free one", group="server", low=0, high=65535)
    served_model_name: str | None = option(None, "the model's name in the API; unset: the model option", group="server")
    keep_alive: str | None = option(
        None,
        "time that an idle model stays loaded, such as 5m; 0: until its request ends; -1: as long as there is "
        "room; then it is loaded on demand",
        group="server",
    )
    models_memory_bytes: int | None = option(
        None, "memory for all loaded models together", group="server", high=MAX_LIMIT
    )
    drain_timeout_s: float = option(
        30.0, "after SIGTERM, time that running requests have to finish", group="server", low=0, high=MAX_TIME_S
    )
    log_format: str = option("text", "log lines as text or as JSON", choices=LOG_FORMATS, group="server")
    metrics_names: str = option(
        "quire", "names at /metrics; vllm: vLLM's beside Quire's", choices=METRICS_NAMES, group="server"
    )
    reasoning_format: str = option(
        "auto",
        "reasoning of models that think: apart from the answer, or none: within it",
        choices=REASONING_FORMATS,
        group="server",
    )
    reasoning_budget: int | None = option(
        None,
        "most tokens of reasoning before its end is forced; unset: no limit",
        group="server",
        low=0,
        high=MAX_LIMIT,
    )
    api_key_file: str | None = option(
        None, "file with one API key, or name:key, per line; beside QUIRE_API_KEY", group="access"
    )
    xray_text: bool = option(False, "send prompts and answers to the live view too, not only numbers", group="access")
    insecure: bool = option(False, "allow a public address without an API key", group="access")
    any_client_is_admin: bool = option(
        False,
        "let every client load and unload models and adapters; else only the API key named "
        "admin, and clients of a server on this machine without keys",
        group="access",
    )
    allowed_hosts: Sequence[str] = option((), "host name that clients may call the server by", group="access")
    allowed_origins: Sequence[str] = option(
        (), "web page origin that may call from a browser; * is any", group="access"
    )
    max_body_bytes: int = option(4 << 20, "largest request body", group="limits", high=MAX_LIMIT)
    max_queued_requests: int = option(256, "completions that may wait to be computed", group="limits", high=MAX_LIMIT)
    max_queued_tokens: int = option(
        1 << 18, "prompt tokens that may wait to be computed", group="limits", high=MAX_LIMIT
    )
    requests_per_minute: int | None = option(
        None, "POST requests per minute of one API key, refused ones included", group="limits", high=MAX_LIMIT
    )
    tokens_per_minute: int | None = option(
        None, "prompt and generated tokens per minute of one API key", group="limits", high=MAX_LIMIT
    )
    queue_timeout_s: float = option(
        120.0, "time a request may wait for its first step; 0: no limit", group="limits", low=0, high=MAX_TIME_S
    )
    request_timeout_s: float = option(
        1800.0, "time a request may take in all; 0: no limit", group="limits", low=0, high=MAX_TIME_S
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.keep_alive is not None:
            parse_keep_alive(self.keep_alive)

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


def parse_keep_alive(value: str | float) -> float:
    """Return the seconds of Ollama's `keep_alive`: a number of seconds or a duration such as "1h30m"; inf below 0.

    Raises: ConfigError.
    """
    text = str(value).strip()
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    try:
        seconds = float(digits)
    except ValueError:
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _DURATION.findall(digits))
        if not digits or _DURATION.sub("", digits):
            seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"keep_alive={value!r} is no duration: seconds, or a text such as 5m, 1h30m, 0 or -1")
    return math.inf if sign * seconds < 0 else seconds
