"""Announcements of a replica to routers: its cached prefixes, its load, and the tokens of each request that ended.

A router follows `GET /replica/events` of every replica and keeps what it says; `router/replica.py` is the reader.
Digests are those of `engine/process/prefixes.py`. Next to read: `routes/replica.py`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

import msgspec

from quire.engine.process.client import EngineClient
from quire.server.admission import Admission
from quire.server.engines import Engines
from quire.server.keys import ROUTER
from quire.server.request_record import RequestRecord

EVERY_S = 0.05
"""Time between two looks at what is new."""
SILENT_S = 1.0
"""Without news an announcement comes after this time: it shows that the replica lives."""
MAX_ENDED = 4096
"""Ended requests that a slow router may leave unread; older ones are dropped."""


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """A request that ended, and its tokens."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int


class Announcement(msgspec.Struct, omit_defaults=True):
    """Event of the stream. `is_whole`: `cached` is the whole cache, and what was announced before is void.

    `cached` and `evicted` are hexadecimal digests without separators. `num_queued_tokens`: prompt tokens of requests
    that no step has computed yet. `num_generated_tokens`: since the engine's start; alone it is no news.
    """

    block_size: int
    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    num_generated_tokens: int = 0
    is_whole: bool = False
    cached: str = ""
    evicted: str = ""
    ended: list[Ended] = []


class PromptPrefix(msgspec.Struct):
    """Answer of `POST /replica/prefix/…`: the prompt's length and the digests of its full blocks, hexadecimal."""

    block_size: int
    num_tokens: int
    digests: str


class Announcer:
    """Source of a server's announcements."""

    def __init__(self, engines: Engines, admission: Admission) -> None:
        self._engines = engines
        self._admission = admission
        self._ended: list[tuple[str, deque[Ended]]] = []
        """Of each reader: its name, and the requests that it has not read."""

    def note_end(self, record: RequestRecord) -> None:
        """Announce the end of a request that was computed."""
        if self._ended and record.num_prompt_tokens:
            ended = Ended(
                record.request_id, record.num_prompt_tokens, record.num_cached_tokens, record.num_generated_tokens
            )
            for reader, queue in self._ended:
                if reader in (ROUTER, record.client_id):
                    queue.append(ended)

    async def watch(self, reader: str) -> AsyncGenerator[Announcement, None]:
        """Yield announcements until the engine ends; the first one is whole.

        Requests that ended are those of the reader's own key; the key named `ROUTER` gets those of all.
        Raises: ApiError 503, EngineDeadError without an engine.
        """
        client = self._engines.client
        client.check_alive()
        ended: deque[Ended] = deque(maxlen=MAX_ENDED)
        self._ended.append((reader, ended))
        try:
            with client.prefixes.watch() as changes:
                last = self._load(client)
                yield self._taken(client, last, changes, ended, is_whole=True)
                silent_s = 0.0
                while client.dead_error is None:
                    await asyncio.sleep(EVERY_S)
                    silent_s += EVERY_S
                    load = self._load(client)
                    if changes or ended or load != last or silent_s >= SILENT_S:
                        last, silent_s = load, 0.0
                        yield self._taken(client, load, changes, ended)
        finally:
            self._ended = [item for item in self._ended if item[1] is not ended]

    def _load(self, client: EngineClient) -> tuple[int, int, int]:
        statistics = client.statistics
        return statistics.num_running, statistics.num_waiting, self._admission.num_queued_tokens

    def _taken(
        self, client: EngineClient, load: tuple[int, int, int], changes: dict[bytes, bool], ended: deque[Ended], *,
        is_whole: bool = False,
    ) -> Announcement:  # fmt: skip
        """Return an announcement of the changes. Mutates: they are taken."""
        found = {kind: b"".join(digest for digest, is_in in changes.items() if is_in is kind) for kind in (True, False)}
        announced = Announcement(
            self._engines.front_end.config.scheduler.block_size, *load, client.statistics.num_generated_tokens,
            is_whole=is_whole, cached=found[True].hex(), evicted=found[False].hex(), ended=list(ended),
        )  # fmt: skip
        changes.clear()
        ended.clear()
        return announced
