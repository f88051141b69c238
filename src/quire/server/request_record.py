"""Record of one HTTP request for log, metrics and limits: its caller, counts and names, never content.

The gate makes one per request and puts it into the ASGI scope. Next to read: `gate.py`, which logs it, `keys.py`, where
callers come from, and `admission.py`, which counts tokens in it.
"""

import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import HTTPConnection

CLIENT_LEFT = 499
"""Status of a request whose client left before its answer began."""
RECORD_KEY = "quire.record"
"""Key of the record in the ASGI scope."""
LEASES_KEY = "quire.leases"
"""Key of the `AsyncExitStack` in the ASGI scope that releases models when the answer has ended."""


def new_request_id() -> str:
    """Return an id that no other request has."""
    return f"req-{os.urandom(16).hex()}"


@dataclass(frozen=True, slots=True)
class Caller:
    """An API key, or the anonymous caller of a server without keys.

    `client_id` names it in the scheduler, in limits and in logs; `cache_salt` separates its prefix cache from others.
    Of the HTTP request that it makes: `engine_id`, see `RequestRecord`; `adapter`, named as its model; `num_bytes` of
    its body.
    """

    client_id: str = "anonymous"
    cache_salt: str = ""
    engine_id: str = "request"
    adapter: str | None = None
    num_bytes: int = 0

    def identity(
        self, priority: int | None, cache_salt: str | None = None, deadline_s: float | None = None
    ) -> dict[str, Any]:
        """Return the arguments of `InputProcessor.prepare` about the caller; `cache_salt` is the request's own."""
        return {
            "priority": priority or 0,
            "client_id": self.client_id,
            "cache_salt": self.cache_salt + (cache_salt or ""),
            "lora_request": self.adapter,
            "deadline_s": deadline_s,
        }


ANONYMOUS = Caller()


@dataclass(slots=True)
class RequestRecord:
    """A request. `trace_headers`: W3C headers of a distributed trace. `status`: of the answer.

    `caller`: None before the check of the key. `is_admin`: it may change what other clients get. `is_noted`: the
    request is logged and counted. `started_s` and `ended_s`, when the whole answer was sent: by `time.perf_counter()`.
    `holds_model`: it has a lease on its model.
    `engine_id`: the id of its request in the engine's events and log, with "-0", "-1", … if it has several prompts. The
    engine must never see an id twice, so that it is longer than an id that the client chose.
    `num_bytes`: of the body, once it has been read.
    `marks`: each phase in the server, and when it began by `time.monotonic()`; "compute" is the engine's.
    `prefix_broke_at`: position at which the prompt differs from an earlier one that it repeats, see `prefix_breaks.py`.
    """

    request_id: str
    method: str
    path: str
    caller: Caller | None = None
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    trace_headers: tuple[tuple[str, str], ...] = ()
    status: int = CLIENT_LEFT
    is_noted: bool = False
    started_s: float = field(default_factory=time.perf_counter)
    ended_s: float | None = None
    num_cached_tokens: int = 0
    prefix_broke_at: int | None = None
    num_bytes: int = 0
    marks: list[tuple[str, float]] = field(default_factory=lambda: [("receive", time.monotonic())])
    holds_model: bool = False
    adapter: str | None = None
    engine_id: str = field(default_factory=new_request_id)
    is_admin: bool = False

    def begin(self, phase: str) -> None:
        """Note that the phase before has ended, and this one begins."""
        self.marks.append((phase, time.monotonic()))

    def served_line(self) -> bytes:
        """Return the line of a trace with the server's phases of this request, which has ended."""
        ends = [moment for _, moment in self.marks[1:]] + [time.monotonic()]
        phases = [[name, start, end] for (name, start), end in zip(self.marks, ends, strict=True) if name != "compute"]
        line = {"t": ends[-1], "kind": "served", "id": self.engine_id, "status": self.status, "phases": phases}
        return json.dumps(line).encode() + b"\n"

    @property
    def client_id(self) -> str:
        """Name of the caller; empty before the check of the key."""
        return "" if self.caller is None else self.caller.client_id


def record_of(request: HTTPConnection) -> RequestRecord:
    """Return the record of a request."""
    record = request.scope[RECORD_KEY]
    assert isinstance(record, RequestRecord)
    return record
