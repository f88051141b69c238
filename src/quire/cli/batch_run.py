"""Sends the requests of a batch, so many at once, and writes each answer when it comes.

A server that is busy (429, 503) is asked again when it says; one that is gone ends the batch, to be resumed.
Next to read: `batch_files.py`.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx2

from quire.cli.batch_files import INVALID_LINE, AnswerFile, answer_line, error_line, is_wrong, succeeded
from quire.cli.batch_requests import BatchRequest, Line
from quire.cli.server_address import ServerUnreachableError

BUSY_STATUSES = (429, 503)
MAX_WAIT_S = 60.0
FIRST_WAIT_S = 1.0
NOT_OF_ONE_LINE = frozenset({401, 403, 404, 405, 410, 501})
"""Besides those below 400: statuses that, without JSON, tell of the address and not of the request."""
MAX_BROKEN = 3
"""A request whose connection breaks so often fails; the next one may be all right."""


@dataclass
class BatchCounts:
    """How far a batch is, as it appears in JSON."""

    num_requests: int
    num_skipped: int = 0
    num_succeeded: int = 0
    num_failed: int = 0
    num_invalid: int = 0
    """Those of `num_failed` whose lines cannot be sent, or are refused, however often they are tried."""
    num_retries: int = 0
    num_tokens: int = 0

    @property
    def num_done(self) -> int:
        """Lines that need no more work."""
        return self.num_skipped + self.num_succeeded + self.num_failed


class BatchRun:
    """One pass over the requests of a file. `on_change` is called after each answer."""

    def __init__(
        self,
        settings: dict[str, Any],
        answers: AnswerFile,
        counts: BatchCounts,
        *,
        concurrency: int,
        max_retries: int,
        model: str | None = None,
        on_change: Callable[[BatchCounts], None] = lambda counts: None,
    ) -> None:
        """`settings`: of the HTTP client. `model`: for bodies that name none."""
        self._settings = settings
        self._answers = answers
        self._counts = counts
        self._concurrency = concurrency
        self._max_retries = max_retries
        self._model = model
        self._on_change = on_change
        self._has_json = False

    def run(self, requests: Iterable[BatchRequest]) -> None:
        """Ask for all that is not done.

        Raises: ServerUnreachableError, BatchWriteError, KeyboardInterrupt; OUT is valid then too.
        """
        asyncio.run(self._run(iter(requests)))

    async def _run(self, requests: Iterator[BatchRequest]) -> None:
        limits = httpx2.Limits(max_connections=self._concurrency, max_keepalive_connections=self._concurrency)
        async with httpx2.AsyncClient(**self._settings, limits=limits) as client:
            workers = [asyncio.create_task(self._work(client, requests)) for _ in range(self._concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, client: httpx2.AsyncClient, requests: Iterator[BatchRequest]) -> None:
        for request in requests:
            if request.custom_id in self._answers.done:
                self._counts.num_skipped += 1
            else:
                self._finish(await self._ask(client, request))
            self._on_change(self._counts)

    def _finish(self, line: Line) -> None:
        self._answers.write(line)
        if succeeded(line):
            self._counts.num_succeeded += 1
            self._counts.num_tokens += _generated_tokens(line["response"]["body"])
        else:
            self._counts.num_failed += 1
            self._counts.num_invalid += is_wrong(line)

    async def _ask(self, client: httpx2.AsyncClient, request: BatchRequest) -> Line:
        if request.problem is not None or request.body is None:
            return error_line(request, INVALID_LINE, request.problem or "no body")
        body = request.body
        if self._model is not None and "model" not in body:
            body = {"model": self._model, **body}
        num_retries = num_broken = 0
        while True:
            try:
                response = await client.post(request.url, json=body)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                if num_retries >= self._max_retries:
                    raise ServerUnreachableError(
                        f"no server at {client.base_url}: {error or type(error).__name__}; the answers that came are "
                        "kept: the same command goes on"
                    ) from None
                wait_s = _backoff_s(num_retries)
            except (httpx2.TransportError, httpx2.DecodingError, ValueError) as error:
                num_broken += 1
                if num_broken >= MAX_BROKEN or isinstance(error, (httpx2.ReadTimeout, ValueError)):
                    return error_line(request, _code_of(error), str(error) or type(error).__name__)
                wait_s = _backoff_s(num_retries)
            else:
                if response.status_code not in BUSY_STATUSES or num_retries >= self._max_retries:
                    return self._line_of(request, response)
                wait_s = _hint_s(response) or _backoff_s(num_retries)
            num_retries += 1
            self._counts.num_retries += 1
            await asyncio.sleep(wait_s)

    def _line_of(self, request: BatchRequest, response: httpx2.Response) -> Line:
        try:
            body = response.json()
        except ValueError:
            status = response.status_code
            if not self._has_json and (status < 400 or status in NOT_OF_ONE_LINE):
                raise ServerUnreachableError(
                    f"{response.url} answers {status} without JSON: it is not a server of models; check --url"
                ) from None
            return error_line(request, "not_json", f"the server answers {status} without JSON")
        self._has_json = True
        named = str(body.get("id", "")) if isinstance(body, dict) else ""
        return answer_line(request, response.status_code, response.headers.get("x-request-id") or named, body)


def _hint_s(response: httpx2.Response) -> float | None:
    """How long the server asks to wait, a little more so that not all come back at once; None if it does not say."""
    text = response.headers.get("retry-after", "")
    if not text.isascii() or not text.isdigit():
        return None
    return min(float(text), MAX_WAIT_S) * random.uniform(1.0, 1.2)


def _backoff_s(num_retries: int) -> float:
    return float(min(FIRST_WAIT_S * 2.0 ** min(num_retries, 10), MAX_WAIT_S) * random.uniform(0.5, 1.0))


def _code_of(error: Exception) -> str:
    if isinstance(error, httpx2.ReadTimeout):
        return "timeout"
    return INVALID_LINE if isinstance(error, ValueError) else "connection_broken"


def _generated_tokens(body: Any) -> int:
    try:
        return int(body["usage"]["completion_tokens"])
    except (KeyError, TypeError, ValueError):
        return 0
