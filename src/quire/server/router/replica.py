"""`Replica`: one server behind the router: its health, what it announces, and what the router has sent it.

Two tasks watch it: one asks for its health, one follows its announcements. A replica that refuses connections or says
that it is not ready gets no further requests until it is ready again. Next to read: `fleet.py`, `../announcements.py`.
"""

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

import httpx2
import msgspec

from quire.engine.process.prefixes import split
from quire.errors import printable
from quire.server.announcements import Announcement, Ended
from quire.server.errors import ApiError
from quire.server.placement import Prompt
from quire.server.router.upstream import Upstream, UpstreamAnswer

LOGGER = logging.getLogger("quire.router")
CHECK_EVERY_S = 1.0
CHECK_S = 5.0
"""Longest time of a health check."""
MAX_TIMEOUTS = 3
"""Health checks in a row that may run out of time; then the replica is lost, and its requests go elsewhere."""
SILENT_S = 10.0
"""Announcements come at least once a second; a stream without any for this time is opened again."""
ANNOUNCED_WITHIN_S = 0.25
"""After this time the blocks of a request that has ended are announced, if they are cached."""
RETRY_AFTER_S = 2
NOT_READY_CODES = frozenset({"engine_not_ready", "engine_dead", "draining"})
"""Codes of status 503 that are about the replica; others, such as too little KV memory, are about one request."""
ADAPTERS_S = 120.0
"""Longest time in which a replica checks the files of an adapter."""
LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
READY_PATHS = ("/health/ready", "/health")
"""Other servers have only the second."""


class ReplicaState(enum.Enum):
    """State of a replica as the router sees it."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    LEAVING = "leaving"


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]] = []


class _Reason(msgspec.Struct):
    message: str
    code: str | None = None


class _Refusal(msgspec.Struct):
    error: _Reason


class ReplicaFailedError(Exception):
    """A replica failed a request before the first byte of its answer. The message names it.

    `refusal`: its answer, if that is about the request and not about the replica.
    """

    def __init__(self, message: str, refusal: ApiError | None = None) -> None:
        super().__init__(message)
        self.refusal = refusal


def refusal_of(answer: UpstreamAnswer) -> ApiError:
    """Return the error that a body of status 503 tells."""
    try:
        error = msgspec.json.decode(answer.first, type=_Refusal).error
    except msgspec.MsgspecError:
        return ApiError(answer.status, f"status {answer.status}", code="replica_refused", retry_after_s=RETRY_AFTER_S)
    return ApiError(answer.status, printable(error.message), code=error.code, retry_after_s=RETRY_AFTER_S)


class Carried:
    """Request that a replica computes. `num_hit_tokens`: tokens of its prompt that were cached there."""

    def __init__(self, replica: "Replica", prompt: Prompt) -> None:
        self.num_hit_tokens = replica.num_hit_tokens(prompt)
        self._replica = replica
        self._num_queued = prompt.num_tokens - self.num_hit_tokens
        replica.num_own_tokens += self._num_queued

    def begin(self) -> None:
        """Note that its first token has come: no more of its prompt is queued. A second call does nothing."""
        self._replica.num_own_tokens -= self._num_queued
        self._num_queued = 0


class Replica:
    """A server, and the connections to it. `name` is for logs and metrics."""

    def __init__(
        self, name: str, url: str, key: str | None = None, on_end: Callable[[Ended], None] | None = None,
        adapters: Mapping[str, bytes | None] | None = None,
    ):  # fmt: skip
        """`url` "": that of a process that is being started. `adapters`: see `Fleet`."""
        self.name = name
        self.is_local = not url
        self.state = ReplicaState.STARTING
        self.reason = "has not been asked yet"
        self.models: dict[str, Any] = {}
        self.load = Announcement(0)
        self.digests: set[bytes] = set()
        self.num_in_flight = 0
        self.num_own_tokens = 0
        """Prompt tokens that this router has sent and that no first token has come for."""
        self.is_silent = False
        """True if it announces nothing: a server of another engine."""
        self._key = key
        self._on_end = on_end
        self._adapters = {} if adapters is None else adapters
        self._expected: Counter[bytes] = Counter()
        self._unanswered: set[UpstreamAnswer] = set()
        self._num_timeouts = 0
        self._is_noted = False
        self._ready = asyncio.Event()
        self.was_checked = asyncio.Event()
        self.url = url.rstrip("/")
        self._upstream = Upstream(url, key)

    def connect(self, url: str) -> None:
        """Use this address from now on."""
        self.url = url
        self._upstream.close()
        self._upstream = Upstream(url, self._key)

    # --- Placement --------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """True if it may get requests."""
        return self.state is ReplicaState.READY

    @property
    def num_requests(self) -> int:
        """Return the requests that it has. Other routers and clients send it some too: the larger count holds."""
        return max(self.num_in_flight, self.load.num_running + self.load.num_waiting)

    @property
    def num_running(self) -> int:
        """Return the running sequences; of a replica that announces nothing, the requests of this router."""
        return self.num_in_flight if self.is_silent else self.load.num_running

    @property
    def num_queued_tokens(self) -> int:
        """Return the prompt tokens that wait there."""
        return max(self.num_own_tokens, self.load.num_queued_tokens)

    def num_hit_tokens(self, prompt: Prompt) -> int:
        """Return the tokens of a prompt's beginning that it has cached, or computes now for another request."""
        if prompt.block_size != self.load.block_size:
            return 0
        num_blocks = 0
        for digest in prompt.digests:
            if digest not in self.digests and digest not in self._expected:
                break
            num_blocks += 1
        return num_blocks * prompt.block_size

    @contextmanager
    def carry(self, prompt: Prompt) -> Iterator[Carried]:
        """Count a request while it is computed here. Its blocks count as cached."""
        carried = Carried(self, prompt)
        self.num_in_flight += 1
        self._expected.update(prompt.digests)
        try:
            yield carried
        finally:
            carried.begin()
            self.num_in_flight -= 1
            asyncio.get_running_loop().call_later(ANNOUNCED_WITHIN_S, self._expect_no_longer, prompt.digests)

    def _expect_no_longer(self, digests: Sequence[bytes]) -> None:
        self._expected.subtract(digests)
        for digest in digests:
            if not self._expected[digest]:
                del self._expected[digest]

    # --- Requests ---------------------------------------------------------------------------------

    async def send(self, method: str, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> UpstreamAnswer:
        """Send a request. `target`: path and query. Returns: its answer, of which the first bytes have come.

        Raises: ReplicaFailedError if the connection fails before them, or the replica is not ready. It then gets no
        further requests until it answers a health check. ApiError 400 for a bad path.
        """
        if not target.startswith(b"/"):
            raise ApiError(400, "this is no path of a URL", code="malformed_request")
        try:
            answer = await self._begin(method, target, headers, body)
        except httpx2.TransportError as error:
            self.note_failure(error)
            raise ReplicaFailedError(f"{self.name} {self.reason}") from error
        if answer.status == 401 and self._key is not None:  # the router has checked the client's own key
            answer.close()
            self._leave(ReplicaState.DOWN, "refuses the router's key")
            raise ReplicaFailedError(f"{self.name} {self.reason}")
        if answer.status == 503:
            answer.close()
            refusal = refusal_of(answer)
            reason = f'answers "{refusal.message}"'
            if refusal.code not in NOT_READY_CODES:
                raise ReplicaFailedError(f"{self.name} {reason}", refusal)
            self._leave(ReplicaState.DOWN, reason)
            raise ReplicaFailedError(f"{self.name} {reason}")
        return answer

    async def _begin(
        self, method: str, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> UpstreamAnswer:
        answer = await self._upstream.begin(method, target, self._authorized(headers), body)
        self._unanswered.add(answer)
        try:
            answer.first = await answer.read()
        except BaseException:
            answer.close()
            raise
        finally:
            self._unanswered.discard(answer)
        return answer

    async def ask(self, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes | None:
        """Send a request whose answer is small; None if it fails, or its status is not 200."""
        try:
            status, answer = await self._fetch("POST", path, headers, body)
        except httpx2.ReadTimeout:
            return None  # long prompts take time
        except httpx2.TransportError as error:
            self.note_failure(error)
            return None
        return answer if status == 200 else None

    async def tell(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Return status and body of the answer to a POST of JSON; 503 if the connection fails."""
        try:
            return await self._fetch("POST", path, [(b"content-type", b"application/json")], body, ADAPTERS_S)
        except httpx2.TransportError as error:
            self.note_failure(error)
            return 503, b""

    async def _fetch(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]] | None = None, body: bytes = b"",
        limit_s: float = CHECK_S,
    ) -> tuple[int, bytes]:  # fmt: skip
        """Return the status and the body of a small answer. Raises: httpx2.TransportError."""
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._begin(method, path.encode(), headers or [], body)
                with closing(answer):
                    parts = [answer.first]
                    while not answer.is_read:
                        parts.append(await answer.read())
        except TimeoutError:
            raise httpx2.ReadTimeout(f"no answer within {limit_s:g} s") from None
        return answer.status, b"".join(parts)

    def _authorized(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return the headers of a request, with the router's key for the replica if there is one."""
        if self._key is None:
            return headers
        return [item for item in headers if item[0] not in (b"authorization", b"x-api-key")]

    def note_failure(self, error: Exception) -> None:
        """Send it no further requests until it answers a health check: a connection failed."""
        self._leave(ReplicaState.DOWN, f"does not answer ({type(error).__name__})")

    def _leave(self, state: ReplicaState, reason: str) -> None:
        if self.state is ReplicaState.LEAVING:
            return
        if self.is_ready or not self._is_noted:
            LOGGER.warning("replica %s %s: it gets no requests", self.name, reason)
        self.state, self.reason, self._is_noted = state, reason, True
        self._ready.clear()

    def note_end(self, how: str) -> None:
        """Send it no further requests until another process of it runs."""
        self.url = ""
        self._leave(ReplicaState.DOWN, f"is being started again: {how}")

    def retire(self) -> None:
        """Send it no further requests, ever."""
        self.state, self.reason = ReplicaState.LEAVING, "is leaving"

    # --- Watching ---------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Ask for its health and follow its announcements until cancelled."""
        try:
            await asyncio.gather(self._check_always(), self._follow_always())
        finally:
            self._upstream.close()

    async def _check_always(self) -> None:
        while True:
            if self.url:
                await self.check()
                self.was_checked.set()
            await asyncio.sleep(CHECK_EVERY_S)

    async def check(self) -> None:
        """Ask for its health once. Mutates: its state."""
        try:
            for path in READY_PATHS:
                status, _ = await self._fetch("GET", path)
                if status != 404:
                    break
            if status == 200 and not self.is_ready:
                if not await self.read_models():
                    return self._leave(ReplicaState.DOWN, "refuses the key: set QUIRE_UPSTREAM_API_KEY to one of its")
                if self._adapters:
                    await self._take_adapters()
        except httpx2.TimeoutException as error:
            self._num_timeouts += 1
            if not self.is_ready or self._num_timeouts >= MAX_TIMEOUTS:
                self.note_failure(error)
                self._give_up()
        except (httpx2.TransportError, msgspec.MsgspecError) as error:
            self.note_failure(error)
        else:
            self._num_timeouts = 0
            if status != 200:
                self._leave(ReplicaState.DOWN, f"is not ready (status {status})")
            elif self.state is not ReplicaState.LEAVING and not self.is_ready:
                LOGGER.log(logging.INFO if self._is_noted else logging.DEBUG, "replica %s is ready", self.name)
                self.state, self.reason = ReplicaState.READY, "is ready"
                self._ready.set()

    async def read_models(self) -> bool:
        """Ask for its models. Returns: False if it refuses the key. Raises: httpx2.TransportError, MsgspecError."""
        status, models = await self._fetch("GET", "/v1/models")
        if status != 401:
            cards = msgspec.json.decode(models, type=_ModelList).data
            self.models = {str(card.get("id")): card for card in cards}
        return status != 401

    async def _take_adapters(self) -> None:
        """Load and unload the adapters that came and went while it was not ready."""
        for name, body in self._adapters.items():
            if body is not None:
                status, answer = await self.tell(LOAD_PATH, body)
                if status != 200:
                    LOGGER.warning(
                        "replica %s has no adapter %s: %s", self.name, printable(name), answer.decode()[:300]
                    )
            elif name in self.models:
                await self.tell(UNLOAD_PATH, msgspec.json.encode({"lora_name": name}))
        await self.read_models()

    def _give_up(self) -> None:
        """End the requests that have got nothing: another replica computes them."""
        for answer in [*self._unanswered]:
            answer.fail(httpx2.ReadTimeout("no answer to health checks"))

    async def _follow_always(self) -> None:
        while True:
            await self._ready.wait()
            with suppress(TimeoutError, httpx2.TransportError, msgspec.MsgspecError):
                await self._follow()
            self.digests.clear()
            self.load = Announcement(0)
            await asyncio.sleep(CHECK_EVERY_S)

    async def _follow(self) -> None:
        async with asyncio.timeout(SILENT_S):
            answer = await self._begin("GET", b"/replica/events", [], b"")
        with closing(answer):
            if answer.status == 404:
                LOGGER.warning("replica %s announces no cached prefixes: its requests are placed by load", self.name)
                self.is_silent = True
                await asyncio.Event().wait()
            if answer.status != 200:
                return
            rest, data = b"", answer.first
            while data:
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: "):
                        self.hear(msgspec.json.decode(line[6:], type=Announcement))
                async with asyncio.timeout(SILENT_S):
                    data = await answer.read()

    def hear(self, announcement: Announcement) -> None:
        """Take over what it announces."""
        if announcement.is_whole:
            self.digests.clear()
        self.digests.difference_update(split(bytes.fromhex(announcement.evicted)))
        self.digests.update(split(bytes.fromhex(announcement.cached)))
        self.load = announcement
        if self._on_end is not None:
            for ended in announcement.ended:
                self._on_end(ended)
