"""OUT of a batch: answers in OpenAI's format, one JSON object per line, of which a batch that is run again makes use.

`{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`. The id holds the digest of its
request: that is how a changed IN is found out. Knows no HTTP. Next to read: `batch_run.py`.
"""

import contextlib
import fcntl
import json
import os
import re
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quire.cli.batch_requests import BatchFileError, BatchRequest, Line

ID_PREFIX = "batch_req_"
_ID = re.compile(ID_PREFIX + "([0-9a-f]{16})_[0-9a-f]{16}")
_OPENING = b'{"id": "' + ID_PREFIX.encode()
INVALID_LINE = "invalid_line"
"""The code of a line of IN that cannot be sent, however often it is tried."""
REFUSED_STATUSES = frozenset({400, 413, 422})
"""What a server answers to a request that is wrong in itself."""
FORM_FAILED = "structured_outputs_failed"
"""The code of a 400 for an answer that lost its way in the form it was asked for: another draw may not."""


class BatchWriteError(BatchFileError):
    """An answer cannot be written, e.g. because the disk is full; those before it are kept."""

    code = "output"
    exit_code = 1


def answer_line(request: BatchRequest, status: int, request_id: str, body: Any) -> Line:
    """What the server said, whatever it said."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": _new_id(request), "custom_id": request.custom_id, "response": response, "error": None}


def error_line(request: BatchRequest, code: str, message: str) -> Line:
    """Why there is no answer."""
    error = {"code": code, "message": f"line {request.line_number}: {message}"}
    return {"id": _new_id(request), "custom_id": request.custom_id, "response": None, "error": error}


def succeeded(line: Line) -> bool:
    """Whether a line of OUT is an answer that need not be asked for again."""
    response = line.get("response")
    return line.get("error") is None and isinstance(response, dict) and response.get("status_code") == 200


def is_wrong(line: Line) -> bool:
    """Whether a line of OUT says that its request can never work as it is."""
    if line.get("error") is not None:
        return bool(line["error"].get("code") == INVALID_LINE)
    body = line["response"]["body"]
    error = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return line["response"]["status_code"] in REFUSED_STATUSES and code != FORM_FAILED


def check_output(path: Path) -> None:
    """Raises: BatchFileError unless OUT is a file or not there yet, without opening it."""
    with contextlib.suppress(OSError):
        _check_kind(path, os.stat(path).st_mode)


def _check_kind(path: Path, mode: int) -> None:
    # A device may never end, and a pipe cannot be read again.
    if not stat.S_ISREG(mode):
        raise BatchFileError(f"{path} is not a file: the answers are kept for the next run, so -o needs one")


def _new_id(request: BatchRequest) -> str:
    return f"{ID_PREFIX}{request.digest}_{uuid.uuid4().hex[:16]}"


def _digest_of(line: Line) -> str | None:
    """Which request a line of OUT answers; None if another program wrote it."""
    match = _ID.fullmatch(str(line.get("id")))
    return match[1] if match else None


class AnswerFile:
    """OUT, open for appending: each line is written whole, by one call, as soon as it is known.

    Opening keeps the successes that are there and takes away failures and a last line that was cut off, so that they
    are asked for again. What holds anything else, or is no file, is left alone.
    """

    def __init__(self, path: Path) -> None:
        """Raises: BatchFileError."""
        self.done: dict[str, str | None] = {}
        """The custom_ids that have succeeded, and the digests of their requests."""
        self._path = path
        try:
            self._descriptor = self._open()
        except OSError as error:
            raise BatchFileError(f"{path} cannot be written: {error.strerror}") from None

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    def check_unchanged(self, requests: Iterable[BatchRequest]) -> None:
        """Raises: BatchFileError if a request has an answer that was given to another one of its custom_id."""
        changed = [
            f"{request.custom_id!r} in line {request.line_number}"
            for request in requests
            if request.custom_id is not None
            and (known := self.done.get(request.custom_id)) is not None
            and known != request.digest
        ]
        if changed:
            more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
            raise BatchFileError(
                f"{self._path} has answers to other requests with the same custom_id: {'; '.join(changed[:5])}{more}; "
                "choose another file for -o, or another custom_id for what has changed"
            )

    def write(self, line: Line) -> None:
        """Append one line, or nothing. Raises: BatchWriteError, e.g. if the disk is full."""
        data = json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        length = os.fstat(self._descriptor).st_size
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, length)
            raise BatchWriteError(
                f"{self._path} cannot be written: {error.strerror}; the answers in it are kept: when there is "
                "room, the same command goes on"
            ) from None

    def _open(self) -> int:
        check_output(self._path)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o644)
        try:
            _check_kind(self._path, os.fstat(descriptor).st_mode)
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
                    self.done[str(line["custom_id"])] = _digest_of(line)
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
        path = Path(os.path.realpath(self._path))  # a link stays a link
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, mode)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.writelines(lines)
            os.fsync(descriptor)
            os.replace(temporary, path)
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
