"""`CheckProcess`: compiles grammars in a separate process, with a deadline; `CheckProcesses`: up to two of them.

A process starts with its first grammar, and ends with this object or its program. A grammar that makes it hang or
crash costs that process only. Next to read: `check_child.py`, the other end; `compiler.py`.
"""

import functools
import json
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.errors import EngineError, QueueFullError, printable
from quire.grammar.limits import DEADLINE_S, READY
from quire.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

START_TIMEOUT_S = 60.0
MAX_PROCESSES = 2
WAIT_FACTOR = 4
"""A check may take as many times its deadline while the machine is busy: the deadline is processor time."""
SHORTEST_WAIT_S = 0.05
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
    """A process that compiles grammars, one at a time."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        """`deadline_s`: processor time for one grammar."""
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._finalizer: weakref.finalize[..., CheckProcess] | None = None

    def check(self, spec: StructuredOutputsParams) -> str | RefusedGrammar:
        """Return llguidance's grammar for `spec`, or the reason for its refusal.

        Raises: QueueFullError if other programs used up the time.
        """
        process, connection = self._running()
        try:
            connection.send_bytes(_question(spec))
        except OSError:  # it was killed
            self.close()
            raise _busy(self._deadline_s) from None
        try:
            answer = json.loads(connection.recv_bytes()) if self._is_answered(process, connection) else None
        except (EOFError, OSError):
            self.close()
            return RefusedGrammar("compiling it takes too much memory or nesting")
        if answer is None:
            self.close()
            return RefusedGrammar(f"compiling it takes longer than the deadline of {self._deadline_s:g} s")
        return answer["grammar"] if "grammar" in answer else RefusedGrammar(short_reason(answer["error"]))

    def close(self) -> None:
        """End the process; another `check` starts a new one."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._connection = self._finalizer = None

    def _is_answered(self, process: subprocess.Popen[bytes], connection: "Connection") -> bool:
        """Wait for an answer; return False if computing it takes longer than the deadline. Raises: QueueFullError."""
        begun_s, end_s = _computed_s(process), time.monotonic() + WAIT_FACTOR * self._deadline_s
        left_s = self._deadline_s
        while not connection.poll(max(left_s, SHORTEST_WAIT_S)):
            left_s = self._deadline_s - (_computed_s(process) - begun_s)
            if left_s <= 0:
                return False
            if time.monotonic() > end_s:
                self.close()
                raise _busy(WAIT_FACTOR * self._deadline_s)
        return True

    def _running(self) -> "tuple[subprocess.Popen[bytes], Connection]":
        if self._process is not None and self._connection is not None and self._process.poll() is None:
            return self._process, self._connection
        self.close()  # closes the connection to a process that died
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
            self.close()
            raise EngineError("the process that compiles grammars does not start: is llguidance installed?")
        return process, connection


class CheckProcesses:
    """As many processes as threads check a grammar at a time, up to `MAX_PROCESSES`. Thread-safe."""

    def __init__(self) -> None:
        self._turns = threading.BoundedSemaphore(MAX_PROCESSES)
        self._free: list[CheckProcess] = []

    def check(self, spec: StructuredOutputsParams) -> str | RefusedGrammar:
        """Return what `CheckProcess.check` does. Raises: QueueFullError if other grammars used up the deadline."""
        if not self._turns.acquire(timeout=DEADLINE_S):
            raise _busy(DEADLINE_S)
        process = self._free.pop() if self._free else CheckProcess()
        try:
            return process.check(spec)
        finally:
            self._free.append(process)
            self._turns.release()

    def close(self) -> None:
        """End the processes; another `check` starts a new one."""
        for _ in range(MAX_PROCESSES):
            self._turns.acquire()
        for process in self._free:
            process.close()
        for _ in range(MAX_PROCESSES):
            self._turns.release()


@functools.cache
def shared_check_processes() -> CheckProcesses:
    """Return the processes that all grammars of this program share."""
    return CheckProcesses()


def _busy(waited_s: float) -> QueueFullError:
    return QueueFullError(f"this grammar could not be compiled within {waited_s:g} s: try again later")


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
