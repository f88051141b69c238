"""`CheckProcess`: compiles grammars in a separate process, with a deadline.

The process starts with the first grammar, and ends with this object or its program. A grammar that makes it hang or
crash costs that process only. Next to read: `check_child.py`, the other end; `compiler.py`.
"""

import functools
import json
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.errors import EngineError, QueueFullError, printable
from quire.grammar.limits import DEADLINE_S, READY
from quire.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

START_TIMEOUT_S = 60.0
WHITESPACE = r" |\n{1,2}[ \t]{0,20}"
"""Default whitespace between the parts of JSON."""
JSON_ESCAPES = 'nrbtf\\"'
"""Letters that may follow a backslash in a JSON string. Without `u` a name has one spelling: llguidance compares names
by their bytes, and would accept `"\\u0061"` as another key beside a declared `"a"`."""


@dataclass(frozen=True, slots=True)
class RefusedGrammar:
    """Reason why a grammar is refused."""

    reason: str


class CheckProcess:
    """A process that compiles grammars. Thread-safe: threads take turns."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._finalizer: weakref.finalize[..., CheckProcess] | None = None

    def check(self, spec: StructuredOutputsParams) -> str | RefusedGrammar:
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

    def _ask(self, question: bytes) -> str | RefusedGrammar:
        process, connection = self._running()
        computed_s = _computed_s(process)
        try:
            connection.send_bytes(question)
        except OSError:  # it was killed
            self._end()
            raise self._busy() from None
        try:
            is_answered = connection.poll(self._deadline_s)
            answer = json.loads(connection.recv_bytes()) if is_answered else {}
        except (EOFError, OSError):
            self._end()
            return RefusedGrammar("compiling it takes too much memory or nesting")
        if not is_answered:
            computed_s = _computed_s(process) - computed_s
            self._end()
            if computed_s < self._deadline_s / 4:
                raise self._busy()
            return RefusedGrammar(f"compiling it takes longer than the deadline of {self._deadline_s:g} s")
        return answer["grammar"] if "grammar" in answer else RefusedGrammar(short_reason(answer["error"]))

    def _busy(self) -> QueueFullError:
        return QueueFullError(f"this grammar could not be compiled within {self._deadline_s:g} s: try again later")

    def _running(self) -> "tuple[subprocess.Popen[bytes], Connection]":
        if self._process is not None and self._connection is not None and self._process.poll() is None:
            return self._process, self._connection
        self._end()  # closes the connection to a process that died
        from multiprocessing import Pipe  # most engines never get a grammar

        connection, of_child = Pipe()
        # With a session of its own it gets no interrupt that is typed at the terminal.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "quire.grammar.check_child", str(of_child.fileno())],
            pass_fds=[of_child.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        of_child.close()
        self._process, self._connection = process, connection
        self._finalizer = weakref.finalize(self, _kill, process, connection)
        try:
            is_ready = connection.poll(START_TIMEOUT_S) and connection.recv_bytes() == READY
        except (EOFError, OSError):
            is_ready = False
        if not is_ready:
            self._end()
            raise EngineError("the process that compiles grammars does not start: is llguidance installed?")
        return process, connection

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._connection = self._finalizer = None


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
    return json.dumps({"kind": spec.kind, "text": spec.text, "options": options}).encode()


def _computed_s(process: subprocess.Popen[bytes]) -> float:
    """Return the processor time of a process so far; 0 if it has ended."""
    import psutil

    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


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
    return printable(line, limit=199)


def _kill(process: subprocess.Popen[bytes], connection: "Connection") -> None:
    process.kill()
    process.wait()
    connection.close()
