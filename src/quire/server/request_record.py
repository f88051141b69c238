"""What the server notes of one HTTP request for its log and its metrics: counts and names, never content.

The gate makes one per request; whatever runs on behalf of it finds it with `current_record`.
Next to read: `gate/access.py`, which writes it out, and `admission.py`, which counts tokens in it.
"""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

CLIENT_LEFT = 499
"""The status that is noted where the client left before there was one."""


@dataclass(slots=True)
class RequestRecord:
    """One request. `trace_headers`: the W3C headers that name its place in a distributed trace.

    `status`: of the answer. `is_noted`: its line is written. `started_s`: on `time.perf_counter()`.
    """

    request_id: str
    method: str
    path: str
    client_id: str = ""
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    trace_headers: tuple[tuple[str, str], ...] = ()
    status: int = CLIENT_LEFT
    is_noted: bool = False
    started_s: float = field(default_factory=time.perf_counter)


RECORD_KEY = "quire.record"
"""Where the ASGI scope of a request has its record."""
_CURRENT: ContextVar[RequestRecord | None] = ContextVar("quire_request_record", default=None)


def current_record() -> RequestRecord | None:
    """The record of the request that this task works for; None outside of any."""
    return _CURRENT.get()


def set_current_record(record: RequestRecord) -> None:
    """Name the request that this task, and all that it starts from now on, works for."""
    _CURRENT.set(record)
