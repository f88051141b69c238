"""The files of a batch, in OpenAI's format, and the run that sends `concurrency` requests at once and writes each
answer when it comes.

IN has lines `{"custom_id", "method": "POST", "url": "/v1/chat/completions", "body"}`, in a file, a pipe or standard
input; OUT has lines `{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`. The id contains
the digest of the request, so that a request that changed after its answer is found. A busy server (429, 503) is asked
again after its Retry-After; a server that is gone ends the batch, which the next run resumes. Next to read:
`server_client.py`.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import httpx2

from quire.cli.server_client import ServerUnreachableError
from quire.errors import QuireError

# --- Files ----------------------------------------------------------------------------------------

MAX_NAMED = 5
STDIN = "-"
ID_PREFIX = "batch_req_"
INVALID_LINE = "invalid_line"
"""The error code of a line of IN that cannot be sent."""
REFUSED_STATUSES = frozenset({400, 413, 422})
"""Statuses of a request that is wrong in itself."""
FORM_FAILED = "structured_outputs_failed"
"""The error code of a 400 for an answer that did not reach its structured output; another attempt may."""
_URL = re.compile(r"/v1(/[a-z_]+){1,4}", re.ASCII)
_ID = re.compile(ID_PREFIX + "([0-9a-f]{16})_[0-9a-f]{16}")
_OPENING = b'{"id": "' + ID_PREFIX.encode()
Line = dict[str, Any]


class BatchFileError(QuireError):
    """A file of a batch cannot be read or written, or has other contents."""

    code = "batch_file"
    exit_code = 2


class BatchWriteError(BatchFileError):
    """An answer cannot be written, e.g. because the disk is full; the answers before it are kept."""

    code = "output"
    exit_code = 1


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line of IN. `problem`: why it cannot be sent; then it has no `body`.

    `data` is the line itself, parsed again when it is sent: parsed, a large file would take several times its size.
    """

    line_number: int
    custom_id: str | None
    url: str = ""
    data: bytes = b"{}"
    problem: str | None = None

    @property
    def body(self) -> Line | None:
        """Return the body to send."""
        body: Line | None = json.loads(self.data).get("body") if self.problem is None else None
        return body

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of a hash of the request, whatever the order of its fields."""
        text = json.dumps([self.custom_id, self.url, self.body], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def new_id(self) -> str:
        """Return an id of an answer, with the digest of the request."""
        return f"{ID_PREFIX}{self.digest}_{uuid.uuid4().hex[:16]}"


def read_requests(source: Path) -> list[BatchRequest]:
    """Read the lines of IN ("-": standard input) without the blank ones; a wrong line has a `problem`.

    Raises: BatchFileError if IN cannot be read, has no requests, or has a custom_id twice.
    """
    name = "standard input" if str(source) == STDIN else str(source)
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if str(source) == STDIN else source.open("rb") as file:
            requests = list(_parsed_lines(file, name))
    except OSError as error:
        raise BatchFileError(f"{name} cannot be read: {error.strerror or error}") from None
    if not requests:
        raise BatchFileError(f"{name} has no requests")
    first_lines: dict[str | None, int] = {}
    doubles = [
        f"{request.custom_id!r} in lines {first} and {request.line_number}"
        for request in requests
        if request.custom_id is not None
        and (first := first_lines.setdefault(request.custom_id, request.line_number)) != request.line_number
    ]
    if doubles:
        raise BatchFileError(f"{name}: each custom_id may stand once: {_named(doubles)}")
    return requests


def _parsed_lines(file: BinaryIO, name: str) -> Iterator[BatchRequest]:
    with contextlib.suppress(OSError):  # a stream of a test has no descriptor
        # A device such as /dev/zero never ends.
        if stat.S_ISCHR(os.fstat(file.fileno()).st_mode) and not file.isatty():
            raise BatchFileError(f"{name} is neither a file nor a pipe: give a file of requests, or pipe them in")
    for number, data in enumerate(file, 1):
        if data.strip():
            yield _parse(number, data)


def _parse(number: int, data: bytes) -> BatchRequest:
    try:
        line = json.loads(data)
    except (ValueError, RecursionError) as error:
        return BatchRequest(number, None, problem=f"not JSON: {error}")
    if not isinstance(line, dict):
        return BatchRequest(number, None, problem="not a JSON object")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return BatchRequest(number, None, problem="custom_id must be a text that is not empty")
    url, body = line.get("url"), line.get("body")
    problem: str | None = None
    if line.get("method", "POST") != "POST":
        problem = "method must be POST"
    elif not isinstance(url, str) or not _URL.fullmatch(url):
        problem = "url must be a path such as /v1/chat/completions"
    elif not isinstance(body, dict):
        problem = "body must be a JSON object"
    elif body.get("stream"):
        problem = "a batch has no streams: leave stream out"
    return BatchRequest(number, custom_id, str(url), data, problem)


def answer_line(request: BatchRequest, status: int, request_id: str, body: Any) -> Line:
    """Return the line of OUT with the server's answer, a refusal included."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": request.new_id(), "custom_id": request.custom_id, "response": response, "error": None}


def error_line(request: BatchRequest, code: str, message: str) -> Line:
    """Return the line of OUT that says why there is no answer."""
    error = {"code": code, "message": f"line {request.line_number}: {message}"}
    return {"id": request.new_id(), "custom_id": request.custom_id, "response": None, "error": error}


def succeeded(line: Line) -> bool:
    """Return whether a line of OUT is a complete answer."""
    response = line.get("response")
    return line.get("error") is None and isinstance(response, dict) and response.get("status_code") == 200


def is_wrong(line: Line) -> bool:
    """Return whether a line of OUT says that its request fails at each attempt."""
    if line.get("error") is not None:
        return bool(line["error"].get("code") == INVALID_LINE)
    body = line["response"]["body"]
    error = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return line["response"]["status_code"] in REFUSED_STATUSES and code != FORM_FAILED


def _named(items: list[str]) -> str:
    more = f" and {len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else ""
    return "; ".join(items[:MAX_NAMED]) + more


class AnswerFile:
    """OUT, open for appending: each line is written whole, by one call, as soon as it is known.

    Opening keeps the successes and removes failures and a last line that was cut off, so that those requests are sent
    again. A file with any other line is left unchanged.
    """

    def __init__(self, path: Path) -> None:
        """Raises: BatchFileError."""
        self.done: dict[str, str | None] = {}
        """The custom_ids that have succeeded, and the digests of their requests; None from another program."""
        self._path = path
        with contextlib.suppress(OSError):
            # A device may never end, and a pipe cannot be read again.
            if not stat.S_ISREG(path.stat().st_mode):
                raise BatchFileError(f"{path} is not a file: the answers are kept for the next run")
        try:
            self._file = self._opened()
        except OSError as error:
            raise BatchFileError(f"{path} cannot be written: {error.strerror}") from None

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def check_unchanged(self, requests: Iterable[BatchRequest]) -> None:
        """Raises: BatchFileError if OUT answers another request with the same custom_id."""
        changed = [
            f"{request.custom_id!r} in line {request.line_number}"
            for request in requests
            if request.custom_id is not None
            and (known := self.done.get(request.custom_id)) is not None
            and known != request.digest
        ]
        if changed:
            raise BatchFileError(
                f"{self._path} has answers to other requests with the same custom_id: {_named(changed)}; "
                "choose another file for -o, or another custom_id for the changed requests"
            )

    def write(self, line: Line) -> None:
        """Append one line, or nothing. Raises: BatchWriteError, e.g. if the disk is full."""
        data = json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        length = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(length)
            raise BatchWriteError(
                f"{self._path} cannot be written: {error.strerror}; the answers in it are kept: when there is "
                "room, the same command goes on"
            ) from None

    def _opened(self) -> BinaryIO:
        """Return OUT, locked and with nothing but successes in it."""
        file = self._locked()
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = self._successes(lines)
        if kept == lines:
            return file
        path = self._path.resolve()  # a link stays a link
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_bytes(b"".join(kept))
            shutil.copymode(path, temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return self._locked()

    def _locked(self) -> BinaryIO:
        file = self._path.open("ab", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchFileError(f"{self._path} is being written by another batch") from None
        return file

    def _successes(self, lines: list[bytes]) -> list[bytes]:
        """Return the lines to keep and note them in `done`. Raises: BatchFileError for a line of another file."""
        kept: list[bytes] = []
        for number, data in enumerate(lines, 1):
            line: Any = None
            with contextlib.suppress(ValueError):
                line = json.loads(data)
            is_cut_off = not data.endswith(b"\n") and (data.startswith(_OPENING) or _OPENING.startswith(data))
            if line is None and is_cut_off:
                continue
            if not isinstance(line, dict) or not {"custom_id", "response", "error"} <= line.keys():
                wrong = f"{self._path}: line {number} is not an answer of a batch; choose another file for -o"
                raise BatchFileError(wrong)
            if succeeded(line):
                match = _ID.fullmatch(str(line.get("id")))
                self.done[str(line["custom_id"])] = match[1] if match else None
                kept.append(data.rstrip(b"\n") + b"\n")
        return kept


# --- The run --------------------------------------------------------------------------------------

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
