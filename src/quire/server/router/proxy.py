"""`Forwarding`: the answer of a replica, passed on as it comes.

While the client has got nothing, a request that a replica fails goes to the next one: after a refused or broken
connection, and after status 503. Afterwards a stream ends with an error event, and another answer with its connection.
A client that disconnects ends the request at the replica too. Next to read: `fleet.py`, `../streaming.py`.
"""

import asyncio
import contextlib

import httpx2
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.admission import KeyRates
from quire.server.announcements import Ended
from quire.server.errors import ApiError, ClientDisconnected, is_messages_path
from quire.server.gate import CLIENT_HEADER, QUEUED_PATHS, SALT_HEADER
from quire.server.generation import until_disconnect
from quire.server.options import ServerOptions
from quire.server.placement import Prompt
from quire.server.request_record import RequestRecord
from quire.server.router.fleet import Fleet
from quire.server.router.replica import Replica, ReplicaFailedError
from quire.server.router.upstream import UpstreamAnswer
from quire.server.streaming import DONE, event

ENDED_S = 1.0
"""Longest wait for the announcement of a request's tokens after its answer; announcements come every 50 ms."""
HOP_HEADERS = frozenset({
    b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip
"""Headers of one connection (RFC 9110, section 7.6.1)."""
OWN_HEADERS = frozenset({b"host", b"content-length", b"expect", b"origin", b"x-request-id", CLIENT_HEADER, SALT_HEADER})
"""Headers of a request that the router writes itself, or has checked."""
OWN_ANSWER_HEADERS = frozenset({b"date", b"server", b"x-request-id", b"request-id"})
RESPONSES_PATH = "/v1/responses"


class _Named(msgspec.Struct):
    model: str | None = None


class RouterAdmission:
    """Limits of keys, for all replicas together. The queues are theirs."""

    def __init__(self, options: ServerOptions) -> None:
        self.num_requests = 0
        self.rates = KeyRates(options)

    def begin(self, record: RequestRecord, *, is_queued: bool) -> None:
        """Count a request. Raises: ApiError 429 if the caller has used its limit."""
        limits = self.rates.of(record)
        limits.check(num_requests=1)
        limits.take(num_requests=1)


class Forwarding(Response):
    """The answer to one request, whose body has been read."""

    def __init__(
        self, fleet: Fleet, admission: RouterAdmission, record: RequestRecord, scope: Scope, body: bytes
    ) -> None:
        super().__init__()
        self._fleet, self._admission, self._record = fleet, admission, record
        self._rates = admission.rates
        self._method, self._path, self._body = scope["method"], scope["path"], body
        self._target: bytes = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        self._is_queued = self._method == "POST" and self._path in QUEUED_PATHS
        self._sent_headers = [
            (name, value) for name, value in scope["headers"] if name not in HOP_HEADERS and name not in OWN_HEADERS
        ]
        caller = record.caller
        assert caller is not None
        self._sent_headers += [
            (b"x-request-id", record.request_id.encode()),
            (CLIENT_HEADER, caller.client_id.encode()),
            (SALT_HEADER, caller.cache_salt.encode()),
        ]
        self._answered_by: Replica | None = None
        self._num_counted = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        with self._fleet.awaiting_end(self._record.request_id) as ended:
            with contextlib.suppress(ClientDisconnected, OSError):
                self._admission.num_requests += self._is_queued
                try:
                    await until_disconnect(receive, self._pump(scope, receive, send))
                finally:
                    self._admission.num_requests -= self._is_queued
            replica = self._answered_by
            if replica is not None and self._is_queued and replica.load.block_size:
                with contextlib.suppress(TimeoutError):
                    if announced := await asyncio.wait_for(ended, ENDED_S):
                        self._count(replica, announced)

    def _count(self, replica: Replica, ended: Ended) -> None:
        """Count the tokens of the request for metrics, log and the limit of its key."""
        self._fleet.metrics.ended(replica.name, ended)
        record = self._record
        record.num_prompt_tokens, record.num_cached_tokens = ended.num_prompt_tokens, ended.num_cached_tokens
        record.num_generated_tokens = ended.num_generated_tokens
        num_tokens = ended.num_prompt_tokens + ended.num_generated_tokens
        self._rates.of(record).take(num_tokens=num_tokens - self._num_counted)

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            model = model_of(self._body) if self._is_queued else None
            prompt = await self._fleet.read_prompt(self._path, self._sent_headers, self._body, model)
            if self._is_queued:
                self._take_limits(prompt)
            reasons: list[str] = []
            refusal: ApiError | None = None
            tried: list[Replica] = []
            while (replica := self._fleet.place(model, prompt, tried)) is not None:
                tried.append(replica)
                self._fleet.metrics.sent(replica.name)
                # Other requests cost no work, and streams of events may never end.
                with replica.carry(prompt) if self._is_queued else contextlib.nullcontext() as carried:
                    try:
                        answer = await replica.send(self._method, self._target, self._sent_headers, self._body)
                    except ReplicaFailedError as error:
                        self._fleet.metrics.failed(replica.name)
                        reasons.append(str(error))
                        refusal = error.refusal or refusal
                        continue
                    self._answered_by = replica if answer.status == 200 else None
                    if carried is not None:
                        carried.begin()
                    return await self._pass_on(replica, answer, send)
            raise refusal or self._fleet.unavailable(reasons)
        except ApiError as error:
            await error.response()(scope, receive, send)

    def _take_limits(self, prompt: Prompt) -> None:
        """Use the caller's limits. Raises: ApiError 429."""
        self._num_counted = prompt.num_tokens if prompt.digests else 0
        self._rates.of(self._record).check(num_tokens=max(1, self._num_counted))
        self._rates.of(self._record).take(num_tokens=self._num_counted)

    async def _pass_on(self, replica: Replica, answer: UpstreamAnswer, send: Send) -> None:
        """Send the answer as it comes."""
        headers = [item for item in answer.headers if item[0] not in HOP_HEADERS and item[0] not in OWN_ANSWER_HEADERS]
        data, end = answer.first, b""
        try:
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            while not answer.is_read:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                end = data[-2:]
                data = await answer.read()
        except httpx2.TransportError as error:
            replica.note_failure(error)
            if not answer.is_stream:
                return  # the missing end closes the connection, which tells the client
            data = (b"" if end == b"\n\n" else b"\n\n") + self._lost()
        finally:
            answer.close()
        await send({"type": "http.response.body", "body": data, "more_body": False})

    def _lost(self) -> bytes:
        """Return the end of a stream whose replica is lost."""
        error = ApiError(503, "the replica that computed this answer was lost: send the request again",
                         code="replica_lost")  # fmt: skip
        if is_messages_path(self._path):
            return event(error.messages_body(self._record.request_id), "error")
        if self._path == RESPONSES_PATH:
            content = {"type": "error", "code": error.code, "message": error.message, "param": None}
            return event(content, "error")
        return event(error.body()) + DONE


def model_of(body: bytes) -> str | None:
    """Return the model that a JSON body names; None if it names none or is no JSON."""
    try:
        return msgspec.json.decode(body, type=_Named).model
    except (msgspec.MsgspecError, RecursionError):
        return None
