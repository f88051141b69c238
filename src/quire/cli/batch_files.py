"""The two files of a batch: requests in, answers out, in OpenAI's format, one JSON object per line.

IN: `{"custom_id", "method": "POST", "url": "/v1/chat/completions", "body"}`. OUT: `{"id", "custom_id", "response":
{"status_code", "request_id", "body"}, "error"}`. Knows no HTTP. Next to read: `batch_run.py`.
"""

import contextlib
import fcntl
import json
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import QuireError

MAX_LINE_BYTES = 64 << 20
ID_PREFIX = "batch_req_"
_OPENING = b'{"id": "' + ID_PREFIX.encode()
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


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """The lines of IN, blank ones left out; one that is wrong has a `problem`. Raises: BatchFileError."""
    try:
        with path.open("rb") as file:
            number = 0
            while data := file.readline(MAX_LINE_BYTES):
                number += 1
                if len(data) == MAX_LINE_BYTES and not data.endswith(b"\n"):
                    raise BatchFileError(f"{path}: line {number} is longer than {MAX_LINE_BYTES >> 20} MiB")
                if data.strip():
                    yield _parse(number, data)
    except OSError as error:
        raise BatchFileError(f"{path} cannot be read: {error.strerror}") from None


def check_ids(path: Path) -> int:
    """The number of requests of IN. Raises: BatchFileError if two have the same custom_id, with their lines."""
    first_lines: dict[str, int] = {}
    doubles: list[str] = []
    count = 0
    for request in read_requests(path):
        count += 1
        if request.custom_id is None:
            continue
        first = first_lines.setdefault(request.custom_id, request.line_number)
        if first != request.line_number:
            doubles.append(f"{request.custom_id!r} in lines {first} and {request.line_number}")
    if doubles:
        more = f" and {len(doubles) - 5} more" if len(doubles) > 5 else ""
        raise BatchFileError(f"{path}: each custom_id may stand once: {'; '.join(doubles[:5])}{more}")
    if not count:
        raise BatchFileError(f"{path} has no requests")
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


def answer_line(request: BatchRequest, status: int, request_id: str, body: Any) -> Line:
    """What the server said, whatever it said."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": _new_id(), "custom_id": request.custom_id, "response": response, "error": None}


def error_line(request: BatchRequest, code: str, message: str) -> Line:
    """Why there is no answer."""
    error = {"code": code, "message": f"line {request.line_number}: {message}"}
    return {"id": _new_id(), "custom_id": request.custom_id, "response": None, "error": error}


def succeeded(line: Line) -> bool:
    """Whether a line of OUT is an answer that need not be asked for again."""
    response = line.get("response")
    return line.get("error") is None and isinstance(response, dict) and response.get("status_code") == 200


def _new_id() -> str:
    return ID_PREFIX + uuid.uuid4().hex


class AnswerFile:
    """OUT, open for appending: each line is written whole, by one call, as soon as it is known.

    Opening keeps the successes that are there and takes away failures and a last line that was cut off, so that they
    are asked for again. A file that holds anything else is left alone.
    """

    def __init__(self, path: Path) -> None:
        """Raises: BatchFileError."""
        self.done: set[str] = set()
        """The custom_ids that have succeeded."""
        self._path = path
        try:
            self._descriptor = self._open()
        except OSError as error:
            raise BatchFileError(f"{path} cannot be written: {error.strerror}") from None

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    def write(self, line: Line) -> None:
        """Append one line. Raises: OSError, e.g. if the disk is full."""
        data = json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _open(self) -> int:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._lock(descriptor)
            kept, is_changed = self._read(descriptor)
            if not is_changed:
                return descriptor
            replacement = self._replace(kept, os.fstat(descriptor).st_mode & 0o777)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return replacement

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchFileError(f"{self._path} is being written by another batch") from None
        if not os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
            raise BatchFileError(f"{self._path} has just been replaced by another batch")

    def _read(self, descriptor: int) -> tuple[list[bytes], bool]:
        """The lines to keep, and whether that is a change."""
        kept: list[bytes] = []
        is_changed = False
        with os.fdopen(os.dup(descriptor), "rb") as file:
            file.seek(0)
            for number, data in enumerate(file, 1):
                if not data.endswith(b"\n") and _is_cut_off(data):
                    is_changed = True
                    continue
                line = self._parse(number, data)
                if succeeded(line):
                    self.done.add(str(line["custom_id"]))
                    kept.append(data if data.endswith(b"\n") else data + b"\n")
                    is_changed |= not data.endswith(b"\n")
                else:
                    is_changed = True
        return kept, is_changed

    def _parse(self, number: int, data: bytes) -> Line:
        with contextlib.suppress(ValueError):
            line = json.loads(data)
            if isinstance(line, dict) and {"custom_id", "response", "error"} <= line.keys():
                return line
        raise BatchFileError(f"{self._path}: line {number} is not an answer of a batch; choose another file for -o")

    def _replace(self, lines: list[bytes], mode: int) -> int:
        """Write the file anew beside itself and put it in its place, all or nothing."""
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, mode)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.writelines(lines)
            os.fsync(descriptor)
            os.replace(temporary, self._path)
        except BaseException:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)
            raise
        return descriptor


def _is_cut_off(data: bytes) -> bool:
    """Whether a last line without its end is one of ours that was not written whole."""
    if not (data.startswith(_OPENING) or _OPENING.startswith(data)):
        return False
    try:
        json.loads(data)
    except ValueError:
        return True
    return False
