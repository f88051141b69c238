"""Limits of one API key per minute, as token buckets that fill up continuously. Knows no HTTP.

Next to read: `admission.py`.
"""

from collections.abc import Callable

from quire.server.options import ServerOptions

MINUTE_S = 60.0


class Bucket:
    """Token bucket of `per_minute`. Generated tokens, known only afterwards, may overdraw it."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at_s = clock()

    @property
    def level(self) -> float:
        """Amount that is left now; below 0 if overdrawn."""
        now_s = self._clock()
        gained = max(0.0, now_s - self._at_s) * self.per_minute / MINUTE_S
        self._level, self._at_s = min(float(self.per_minute), self._level + gained), now_s
        return self._level

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `amount` is available, or the bucket is full."""
        missing = min(amount, self.per_minute) - self.level
        return max(0.0, missing) * MINUTE_S / self.per_minute

    def take(self, amount: float) -> None:
        """Use an amount, even if it is not available. Mutates: the level."""
        self._level = self.level - amount


class RateLimits:
    """Buckets of one key; None without a limit."""

    def __init__(self, options: ServerOptions, clock: Callable[[], float]) -> None:
        def bucket(per_minute: int | None) -> Bucket | None:
            return None if per_minute is None else Bucket(per_minute, clock)

        self.requests = bucket(options.requests_per_minute)
        self.tokens = bucket(options.tokens_per_minute)

    def wait_s(self, num_tokens: int) -> float:
        """Return the seconds until a request with `num_tokens` prompt tokens is allowed; 0 for now."""
        waits = [bucket.wait_s(amount) for bucket, amount in ((self.requests, 1), (self.tokens, num_tokens)) if bucket]
        return max(waits, default=0.0)

    def take(self, *, num_requests: int = 0, num_tokens: int = 0) -> None:
        """Use requests and tokens. Mutates: the buckets."""
        if self.requests is not None and num_requests:
            self.requests.take(num_requests)
        if self.tokens is not None and num_tokens:
            self.tokens.take(num_tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's `x-ratelimit-*` headers."""
        found: list[tuple[bytes, bytes]] = []
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                left = max(0, int(bucket.level))
                found += [
                    (f"x-ratelimit-limit-{name}".encode(), str(bucket.per_minute).encode()),
                    (f"x-ratelimit-remaining-{name}".encode(), str(left).encode()),
                    (f"x-ratelimit-reset-{name}".encode(), f"{bucket.wait_s(bucket.per_minute):.3f}s".encode()),
                ]
        return found
