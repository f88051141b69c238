"""Record of one HTTP request for log and metrics: counts and names, never content.

The gate makes one per request; the tasks of the request find it with `current_record`.
Next to read: `gate.py`, which logs it, and `admission.py`, which counts tokens in it.
"""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

CLIENT_LEFT = 499
"""Status of a request whose client left before its answer began."""


@dataclass(slots=True)
class RequestRecord:
    """A request. `trace_headers`: W3C headers of a distributed trace. `status`: of the answer.

    `is_noted`: it is logged and counted. `started_s`: by `time.perf_counter()`.
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
"""Key of the record in the ASGI scope."""
_CURRENT: ContextVar[RequestRecord | None] = ContextVar("quire_request_record", default=None)


def current_record() -> RequestRecord | None:
    """Return the record of the request that this task works for; None outside of requests."""
    return _CURRENT.get()


def set_current_record(record: RequestRecord) -> None:
    """Set the record for this task and the tasks that it starts."""
    _CURRENT.set(record)
