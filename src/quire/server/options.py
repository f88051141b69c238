"""What an operator may choose of the server: one field is one flag of `quire serve` and one environment variable.

Engine settings are in `config.py`. Knows no HTTP. Next to read: `app.py`.
"""

from dataclasses import dataclass
from typing import Any

from quire.config import EngineOptions, option
from quire.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where the server listens, who may use it and how much it takes. Times are in seconds, sizes in bytes."""

    host: str = option("127.0.0.1", "address to listen on", group="server")
    port: int = option(8000, "port to listen on; 0: any free one", group="server")
    served_model_name: str | None = option(None, "the model's name in the API; unset: the model option", group="server")
    drain_timeout_s: float = option(30.0, "after SIGTERM, time that running requests have to finish", group="server")

    def __post_init__(self) -> None:
        if not isinstance(self.port, int) or isinstance(self.port, bool) or not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port!r} is not in 0 … 65535")
        for name in ("drain_timeout_s",):
            value: Any = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e9:
                raise ConfigError(f"{name}={value!r} is not a number of seconds of at least 0")

    def model_name(self, engine: EngineOptions) -> str:
        """What clients call the model."""
        return self.served_model_name or engine.model
