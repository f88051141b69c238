"""A response as a stream of typed, numbered events.

It ends with `response.completed`, `response.incomplete` or `response.failed`. Next to read: `response_output.py`.
"""

from typing import Any

from quire.engine.process.messages import RequestUpdate
from quire.server.errors import ApiError
from quire.server.routes.response_job import ResponseJob
from quire.server.routes.response_output import ResponseOutput
from quire.server.streaming import event


class ResponseEvents:
    """Makes the events of one response, numbers them and counts its tokens."""

    def __init__(self, job: ResponseJob) -> None:
        self._job = job
        self._output = ResponseOutput(job)
        self._number = 0
        self._num_generated = 0

    def opening(self) -> bytes:
        """The events before the first text."""
        started = self._job.response("in_progress")
        data = self._event("response.created", response=started)
        data += self._event("response.in_progress", response=started)
        return data + self._events(self._output.begin())

    def of(self, index: int, update: RequestUpdate) -> bytes:
        """The events of what is new. Mutates: items, count of tokens and number of events so far."""
        data = b""
        for choice in update.choices:
            self._num_generated += len(choice.token_ids)
            data += self._events(self._output.write(choice))
            if choice.finish_reason is not None:
                status = response_status(choice.finish_reason)
                usage = self._job.usage(self._num_generated, update.num_cached_tokens)
                response = self._job.response(status, output=self._output.items, usage=usage)
                data += self._event(f"response.{status}", response=response)
        return data

    def closing(self) -> bytes:
        """Nothing: the last event says that it is the last."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """How a stream that has begun tells of an error."""
        content = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=self._job.response("failed", error=content))

    def _events(self, found: list[tuple[str, dict[str, Any]]]) -> bytes:
        return b"".join([self._event(kind, **content) for kind, content in found])

    def _event(self, kind: str, **content: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **content}, kind)


def response_status(finish_reason: str) -> str:
    """How a response ends whose text ended for this reason."""
    return "incomplete" if finish_reason == "length" else "completed"
