"""IN of a batch: requests in OpenAI's format, one JSON object per line, in a file, a pipe or standard input.

`{"custom_id", "method": "POST", "url": "/v1/chat/completions", "body"}`. Knows no HTTP. Next to read: `batch_files.py`.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from quire.errors import QuireError

MAX_LINE_BYTES = 64 << 20
STDIN = "-"
_URL = re.compile(r"/v1(/[a-z_]+){1,4}", re.ASCII)
Line = dict[str, Any]


class BatchFileError(QuireError):
    """A file of a batch cannot be read, cannot be written, or is not what it should be."""

    code = "batch_file"
    exit_code = 2


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of IN. `problem`: why it cannot be sent; then its `body` is empty."""

    line_number: int
    custom_id: str | None
    url: str = ""
    body: Line | None = None
    problem: str | None = None

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that another request has not, whatever the order of its fields."""
        text = json.dumps([self.custom_id, self.url, self.body], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class RequestFile:
    """A file of requests that can be read several times. `name`: what its user calls it."""

    path: Path
    name: str


@contextlib.contextmanager
def open_requests(source: Path) -> Iterator[RequestFile]:
    """IN itself, or, of a pipe and of "-" (standard input), a copy for as long as the body runs.

    Raises: BatchFileError.
    """
    if str(source) != STDIN:
        mode = _mode_of(source)
        if stat.S_ISREG(mode):
            yield RequestFile(source, str(source))
            return
        _check_pipe(mode, str(source))
    name = "standard input" if str(source) == STDIN else str(source)
    with contextlib.ExitStack() as stack:
        try:
            copy = stack.enter_context(tempfile.NamedTemporaryFile(prefix="quire-batch-"))
            shutil.copyfileobj(stack.enter_context(source.open("rb")) if str(source) != STDIN else _stdin(), copy)
            copy.flush()
        except OSError as error:
            raise BatchFileError(f"{name} cannot be copied to a temporary file: {error.strerror or error}") from None
        yield RequestFile(Path(copy.name), name)


def _stdin() -> BinaryIO:
    with contextlib.suppress(io.UnsupportedOperation):
        if not sys.stdin.isatty():
            _check_pipe(os.fstat(sys.stdin.fileno()).st_mode, "standard input")
    return sys.stdin.buffer


def _mode_of(source: Path) -> int:
    try:
        return source.stat().st_mode
    except OSError as error:
        raise BatchFileError(f"{source} cannot be read: {error.strerror}") from None


def _check_pipe(mode: int, name: str) -> None:
    """A device may never end. Raises: BatchFileError."""
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        raise BatchFileError(f"{name} is neither a file nor a pipe: give a file of requests, or pipe them in")


def read_requests(source: RequestFile) -> Iterator[BatchRequest]:
    """The lines of IN, blank ones left out; one that is wrong has a `problem`. Raises: BatchFileError."""
    try:
        with source.path.open("rb") as file:
            number = 0
            while data := file.readline(MAX_LINE_BYTES):
                number += 1
                if len(data) == MAX_LINE_BYTES and not data.endswith(b"\n"):
                    raise BatchFileError(f"{source.name}: line {number} is longer than {MAX_LINE_BYTES >> 20} MiB")
                if data.strip():
                    yield _parse(number, data)
    except OSError as error:
        raise BatchFileError(f"{source.name} cannot be read: {error.strerror}") from None


def check_ids(source: RequestFile) -> int:
    """The number of requests of IN. Raises: BatchFileError if two have the same custom_id, with their lines."""
    first_lines: dict[str, int] = {}
    doubles: list[str] = []
    count = 0
    for request in read_requests(source):
        count += 1
        if request.custom_id is None:
            continue
        first = first_lines.setdefault(request.custom_id, request.line_number)
        if first != request.line_number:
            doubles.append(f"{request.custom_id!r} in lines {first} and {request.line_number}")
    if doubles:
        more = f" and {len(doubles) - 5} more" if len(doubles) > 5 else ""
        raise BatchFileError(f"{source.name}: each custom_id may stand once: {'; '.join(doubles[:5])}{more}")
    if not count:
        raise BatchFileError(f"{source.name} has no requests")
    return count


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
    problem = None
    if line.get("method", "POST") != "POST":
        problem = "method must be POST"
    elif not isinstance(url, str) or not _URL.fullmatch(url):
        problem = "url must be a path such as /v1/chat/completions"
    elif not isinstance(body, dict):
        problem = "body must be a JSON object"
    elif body.get("stream"):
        problem = "a batch has no streams: leave stream out"
    if problem is not None:
        return BatchRequest(number, custom_id, problem=problem)
    return BatchRequest(number, custom_id, str(url), body)
