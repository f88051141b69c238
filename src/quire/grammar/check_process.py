"""`CheckProcess`: compiles grammars in a separate process, with a deadline.

The process starts with the first grammar, and ends with this object or its program. A grammar that makes it hang or
crash costs that process only. Next to read: `check_child.py`, the other end; `compiler.py`.
"""

import contextlib
import functools
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import psutil

from quire.errors import EngineError, QueueFullError, printable
from quire.grammar.limits import DEADLINE_S
from quire.structured_outputs import StructuredOutputsParams

START_TIMEOUT_S = 60.0
WHITESPACE = r" |\n{1,2}[ \t]{0,20}"
"""Default whitespace between the parts of JSON."""
JSON_ESCAPES = 'nrbtf\\"'
"""Letters that may follow a backslash in a JSON string. Without `u` a name has one spelling: llguidance compares names
by their bytes, and would accept `"\\u0061"` as another key beside a declared `"a"`."""
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Refused:
    """Reason why a grammar is refused."""

    reason: str


class CheckProcess:
    """A process that compiles grammars. Thread-safe: threads take turns."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., CheckProcess] | None = None

    def check(self, spec: StructuredOutputsParams) -> str | Refused:
        """Return llguidance's grammar for `spec`, or the reason for its refusal.

        Raises: QueueFullError if other grammars or programs used up the deadline.
        """
        if not self._turn.acquire(timeout=self._deadline_s):
            raise self._busy()
        try:
            return self._ask(_question(spec))
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the process; another `check` starts a new one."""
        with self._turn:
            self._end()

    def _ask(self, question: bytes) -> str | Refused:
        process = self._running()
        computed_s = _computed_s(process)
        deadline = time.monotonic() + self._deadline_s
        try:
            assert process.stdin is not None
            process.stdin.write(question)
            process.stdin.flush()
            line = _read_line(process, deadline)
        except OSError:  # it was killed
            self._end()
            raise self._busy() from None
        if line is None:
            computed_s = _computed_s(process) - computed_s
            self._end()
            if computed_s < self._deadline_s / 4:
                raise self._busy()
            return Refused(f"compiling it takes longer than the deadline of {self._deadline_s:g} s")
        if not line:
            self._end()
            return Refused("compiling it takes too much memory or nesting")
        answer = json.loads(line)
        return answer["grammar"] if "grammar" in answer else Refused(short_reason(answer["error"]))

    def _busy(self) -> QueueFullError:
        return QueueFullError(f"this grammar could not be compiled within {self._deadline_s:g} s: try again later")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()  # closes the pipes of a process that died
        # With a session of its own it gets no interrupt that is typed at the terminal.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "quire.grammar.check_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _kill, process)
        if not _read_line(process, time.monotonic() + START_TIMEOUT_S):
            self._end()
            raise EngineError("the process that compiles grammars does not start: is llguidance installed?")
        return process

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


@functools.cache
def shared_check_process() -> CheckProcess:
    """Return the process that all grammars of this program share."""
    return CheckProcess()


def _question(spec: StructuredOutputsParams) -> bytes:
    options: dict[str, Any] = {"whitespace_pattern": spec.whitespace_pattern or WHITESPACE}
    if spec.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    if spec.kind == "json":
        options["json_allowed_escapes"] = JSON_ESCAPES
    return json.dumps({"kind": spec.kind, "text": spec.text, "options": options}).encode() + b"\n"


def _computed_s(process: subprocess.Popen[bytes]) -> float:
    """Return the processor time of a process so far; 0 if it has ended."""
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _read_line(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    """Read one line; b"" if the process ends before, None at the deadline."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    pieces: list[bytes] = []
    while not pieces or not pieces[-1].endswith(b"\n"):
        # A line that is there is read even if the deadline has passed meanwhile on a busy machine.
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        piece = os.read(descriptor, _READ_BYTES)
        if not piece:
            return b""
        pieces.append(piece)
    return b"".join(pieces)


def short_reason(message: str) -> str:
    """Return llguidance's error in one short line, without places in its source and options that clients lack."""
    if message.startswith("panic"):
        return "the library for structured outputs fails on it"
    _, found, after = message.partition("\nerror: ")
    text = after if found else message
    line = next((part.strip() for part in text.splitlines() if part.strip()), "no reason given")
    if line.startswith("NoExtension"):
        return "no text matches it"
    if "initial_lexer_fuel" in line:
        return "its patterns are too large together: use fewer, or shorter repetitions"
    shown = printable(line)
    return shown if len(shown) <= 200 else shown[:199] + "…"


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):  # unwritten input is dropped
                stream.close()
