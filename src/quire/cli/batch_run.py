"""Sends the requests of a batch, `concurrency` at once, and writes each answer when it comes.

A busy server (429, 503) is asked again after its Retry-After; a server that is gone ends the batch, which the next run
resumes. Next to read: `batch_files.py`.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from quire.cli.batch_files import (
    INVALID_LINE,
    AnswerFile,
    BatchRequest,
    Line,
    answer_line,
    error_line,
    is_wrong,
    succeeded,
)
from quire.cli.server_client import ServerUnreachableError

BUSY_STATUSES = (429, 503)
MAX_WAIT_S = 60.0
FIRST_WAIT_S = 1.0
NO_API_STATUSES = frozenset({401, 403, 404, 405, 410, 501})
"""With those below 400: statuses that, without JSON, are about the address and not about one request."""
MAX_BROKEN = 3
"""Broken connections after which a request fails; the next request may succeed."""


@dataclass
class BatchCounts:
    """Progress of a batch, as it appears in JSON."""

    num_requests: int
    num_skipped: int = 0
    num_succeeded: int = 0
    num_failed: int = 0
    num_invalid: int = 0
    """Requests of `num_failed` that cannot be sent, or are refused at each attempt."""
    num_retries: int = 0
    num_tokens: int = 0

    @property
    def num_done(self) -> int:
        """Requests that need no more work."""
        return self.num_skipped + self.num_succeeded + self.num_failed


class BatchRun:
    """A pass over the requests of a file. `on_change` is called after each answer."""

    def __init__(
        self,
        answers: AnswerFile,
        counts: BatchCounts,
        concurrency: int,
        max_retries: int,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._answers, self._counts, self._concurrency = answers, counts, concurrency
        self._max_retries, self._on_change = max_retries, on_change
        self._model: str | None = None
        self._has_json = False

    async def send(
        self, requests: list[BatchRequest], settings: Mapping[str, Any] | None = None, model: str | None = None
    ) -> None:
        """Send every request. `settings`: of the HTTP client; `model`: of bodies that name none.

        OUT is valid after each exception, too. Raises: ServerUnreachableError, BatchWriteError.
        """
        self._model, waiting = model, iter(requests)
        limits = httpx2.Limits(max_connections=self._concurrency, max_keepalive_connections=self._concurrency)
        try:
            async with httpx2.AsyncClient(**(settings or {}), limits=limits) as client, asyncio.TaskGroup() as workers:
                for _ in range(self._concurrency):
                    workers.create_task(self._work(client, waiting))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _work(self, client: httpx2.AsyncClient, requests: Iterator[BatchRequest]) -> None:
        for request in requests:
            line = await self._ask(client, request)
            self._answers.write(line)
            if succeeded(line):
                self._counts.num_succeeded += 1
                self._counts.num_tokens += _generated_tokens(line["response"]["body"])
            else:
                self._counts.num_failed += 1
                self._counts.num_invalid += is_wrong(line)
            self._on_change()

    async def _ask(self, client: httpx2.AsyncClient, request: BatchRequest) -> Line:
        body = request.body
        if body is None:
            return error_line(request, INVALID_LINE, request.problem or "no body")
        if self._model is not None and "model" not in body:
            body = {"model": self._model, **body}
        num_retries = num_broken = 0
        while True:
            wait_s = min(FIRST_WAIT_S * 2.0 ** min(num_retries, 10), MAX_WAIT_S) * random.uniform(0.5, 1.0)
            try:
                response = await client.post(request.url, json=body)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                if num_retries >= self._max_retries:
                    raise ServerUnreachableError(
                        f"no server at {client.base_url}: {error or type(error).__name__}; the answers that came are "
                        "kept: the same command goes on"
                    ) from None
            except (httpx2.TransportError, httpx2.DecodingError, ValueError) as error:
                num_broken += 1
                if num_broken >= MAX_BROKEN or isinstance(error, (httpx2.ReadTimeout, ValueError)):
                    return error_line(request, _code_of(error), str(error) or type(error).__name__)
            else:
                if response.status_code not in BUSY_STATUSES or num_retries >= self._max_retries:
                    return self._line_of(request, response)
                wait_s = _retry_after_s(response) or wait_s
            num_retries += 1
            self._counts.num_retries += 1
            await asyncio.sleep(wait_s)

    def _line_of(self, request: BatchRequest, response: httpx2.Response) -> Line:
        try:
            body = response.json()
        except ValueError:
            status = response.status_code
            if not self._has_json and (status < 400 or status in NO_API_STATUSES):
                raise ServerUnreachableError(
                    f"{response.url} answers {status} without JSON: it is not a server of models; check --url"
                ) from None
            return error_line(request, "not_json", f"the server answers {status} without JSON")
        self._has_json = True
        named = str(body.get("id", "")) if isinstance(body, dict) else ""
        return answer_line(request, response.status_code, response.headers.get("x-request-id") or named, body)


def _retry_after_s(response: httpx2.Response) -> float | None:
    """Return the server's Retry-After plus up to 20 %, so that retries spread; None if it sends none."""
    text = response.headers.get("retry-after", "")
    if not text.isascii() or not text.isdigit():
        return None
    return min(float(text), MAX_WAIT_S) * random.uniform(1.0, 1.2)


def _code_of(error: Exception) -> str:
    if isinstance(error, httpx2.ReadTimeout):
        return "timeout"
    return INVALID_LINE if isinstance(error, ValueError) else "connection_broken"


def _generated_tokens(body: Any) -> int:
    try:
        return int(body["usage"]["completion_tokens"])
    except (KeyError, TypeError, ValueError):
        return 0
