"""`Fleet`: the replicas of a router, where each request goes, and which may come and go while it runs.

Knows no ASGI. Next to read: `replica.py`, `proxy.py`.
"""

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import msgspec

from quire.engine.process.prefixes import split
from quire.errors import ConfigError
from quire.server.announcements import Ended, PromptPrefix
from quire.server.errors import MESSAGES_PATH, ApiError
from quire.server.placement import Prompt, choose, waiting_work
from quire.server.router.metrics import RouterMetrics
from quire.server.router.replica import RETRY_AFTER_S, Replica

LOGGER = logging.getLogger("quire.router")
BYTES_PER_TOKEN = 4
"""Usual length of a token, for prompts that are not tokenised."""
RETIRE_CHECK_S = 0.05
PREFIX_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", MESSAGES_PATH})
"""Routes whose prompts use the prefix cache."""


class Fleet:
    """The replicas. `policy`: one of `ROUTER_POLICIES`.

    Attributes: `adapters`: by name the request that loaded an adapter while the router runs; None: it was unloaded.
    """

    def __init__(self, policy: str, metrics: RouterMetrics) -> None:
        self.policy = policy
        self.metrics = metrics
        self.replicas: list[Replica] = []
        self.adapters: dict[str, bytes | None] = {}
        metrics.watch(self.replicas)
        self._watching: dict[Replica, asyncio.Task[None]] = {}
        self._retiring: dict[Replica, asyncio.Task[None]] = {}
        self._waiting: dict[str, asyncio.Future[Ended | None]] = {}
        self._num_placed = 0

    # --- Replicas come and go ---------------------------------------------------------------------

    def add(self, name: str, url: str, key: str | None) -> Replica:
        """Add a replica and watch it. Raises: ConfigError if one has this name."""
        if any(replica.name == name for replica in self.replicas):
            raise ConfigError(f"the replica {name} is there already")
        replica = Replica(name, url, key, self._on_end, self.adapters)
        self.replicas.append(replica)
        self._watching[replica] = asyncio.create_task(replica.watch(), name=f"quire-replica-{name}")
        return replica

    def retire(self, replica: Replica) -> None:
        """Send a replica no further requests, and forget it when its last one has ended."""
        replica.retire()
        if replica not in self._retiring:
            self._retiring[replica] = asyncio.create_task(self._forget(replica), name=f"quire-retire-{replica.name}")

    async def _forget(self, replica: Replica) -> None:
        while replica.num_in_flight:
            await asyncio.sleep(RETIRE_CHECK_S)
        self.replicas.remove(replica)
        self._watching.pop(replica).cancel()
        del self._retiring[replica]

    async def stop(self) -> None:
        """Stop watching all replicas; no end of a request will be announced."""
        for future in self._waiting.values():
            if not future.done():
                future.set_result(None)
        tasks = [*self._watching.values(), *self._retiring.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def ready(self) -> list[Replica]:
        """Return the replicas that may get requests."""
        return [replica for replica in self.replicas if replica.is_ready]

    def unavailable(self, reasons: Sequence[str] = ()) -> ApiError:
        """Return the error that names all replicas and why none can answer."""
        told = list(reasons) or [f"{replica.name} {replica.reason}" for replica in self.replicas]
        message = f"no replica can answer: {'; '.join(told) or 'there is none'}; try again in a moment"
        return ApiError(503, message, code="no_replica", retry_after_s=RETRY_AFTER_S)

    # --- Placement --------------------------------------------------------------------------------

    def place(self, model: str | None, prompt: Prompt, tried: Collection[Replica]) -> Replica | None:
        """Return the replica for a request; None if every replica of the model is down or was tried.

        Raises: ApiError 404 if no replica serves the model.
        """
        ready = [replica for replica in self._serving(model) if replica not in tried]
        if not ready:
            return None
        self._num_placed += 1
        start = (self._num_placed - 1) % len(ready)
        if self.policy == "prefix":
            return choose(ready, prompt, start)
        rotated = [*ready[start:], *ready[:start]]
        return rotated[0] if self.policy == "round-robin" else min(rotated, key=waiting_work)

    def _serving(self, model: str | None) -> list[Replica]:
        ready = self.ready
        if model is None:
            return ready
        found = [replica for replica in ready if model in replica.models]
        known = {name for replica in self.replicas for name in replica.models}
        if not found and ready and model not in known:
            raise unknown_model(model, known)
        return found

    async def read_prompt(
        self, path: str, headers: list[tuple[bytes, bytes]], body: bytes, model: str | None
    ) -> Prompt:
        """Return the prompt of a request: a replica tokenises it if the policy needs that and there is a choice."""
        guess = Prompt(max(1, len(body) // BYTES_PER_TOKEN))
        if self.policy != "prefix" or path not in PREFIX_PATHS:
            return guess
        asked = [replica for replica in self._serving(model) if replica.load.block_size]
        if len(asked) < 2:
            return guess
        replica = asked[self._num_placed % len(asked)]
        answer = await replica.ask(f"/replica/prefix{path}", headers, body)
        if answer is None:  # the replica that gets the request will tell the client what is wrong
            return guess
        found = msgspec.json.decode(answer, type=PromptPrefix)
        return Prompt(found.num_tokens, found.block_size, tuple(split(bytes.fromhex(found.digests))))

    # --- Ends of requests -------------------------------------------------------------------------

    @contextmanager
    def awaiting_end(self, request_id: str) -> Iterator["asyncio.Future[Ended | None]"]:
        """Yield a future of the announcement that a request has ended; None if there will be none."""
        ended = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        try:
            yield ended
        finally:
            if self._waiting.get(request_id) is ended:
                del self._waiting[request_id]

    def _on_end(self, ended: Ended) -> None:
        future = self._waiting.get(ended.request_id)
        if future is not None and not future.done():
            future.set_result(ended)


def unknown_model(name: str, known: Collection[str]) -> ApiError:
    """Return the error for a model that no replica serves."""
    message = f'the model "{name[:100]}" does not exist; the replicas have {", ".join(sorted(known))}'
    return ApiError(404, message, code="model_not_found", param="model")


def check_url(url: str) -> str:
    """Return the address of a replica. Raises: ConfigError if it is none."""
    if "://" not in url:
        raise ConfigError(f"the replica {url!r} has no scheme: http://{url} works")
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.query:
            if parts.path.rstrip("/"):
                raise ConfigError(f"the replica {url!r} has a path: {parts.scheme}://{parts.netloc} works")
            return url.rstrip("/")
    raise ConfigError(f"the replica {url!r} is not the address of a server: http://host:port works")
