"""A side in its own process, under its own interpreter: started, spoken to, and held still while others measure.

A side that waits may spin (OpenMP's threads do, for milliseconds or for ever), so it is stopped (SIGSTOP) except
while it answers. What it prints goes to a log. The messages are described in `sides/protocol.py`.
Next to read: `peers.py`.
"""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ROOT = Path(__file__).resolve().parents[1]
LOG_TAIL_LINES = 12


class SideError(Exception):
    """A side did not start, ended, took too long, or says that it failed."""


@dataclass(frozen=True)
class SideSpec:
    """Command of a side. `name` as the table shows it: "llama.cpp:kv=q8_0"."""

    name: str
    command: tuple[str, ...]
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


class SideProcess:
    """Handle of a running side. A context manager: leaving it ends the process."""

    def __init__(self, spec: SideSpec, log: Path) -> None:
        self.spec = spec
        self.name = spec.name
        self.version = ""
        self.settings: dict[str, Any] = {}
        self.has_alternatives = False
        """It has settings to try in each case."""
        self.load_s = 0.0
        """Loading alone."""
        self.start_s = 0.0
        """From the start of the process: interpreter, imports, loading."""
        self._log_path = log
        self.answering_s = 0.0
        """Time spent on answers so far."""
        self.cpu_elsewhere_s = 0.0
        """CPU seconds that other processes used, or the host took, during that time."""
        self._load_request: dict[str, Any] = {}
        self._start()

    def _start(self) -> None:
        self._started = time.perf_counter()
        self._unread = b""
        with self._log_path.open("wb") as file:
            self._process = subprocess.Popen(
                self.spec.command,
                cwd=ROOT,
                env={**os.environ, **self.spec.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
            )

    def load(self, *, timeout_s: float, **request: Any) -> None:
        """Load the model and wait until the side is ready. Raises: SideError."""
        self._load_request = {"timeout_s": timeout_s, **request}
        options = dict(self.spec.options)
        answer = self.request("load", timeout_s=timeout_s, model=self.spec.model, options=options, **request)
        self.start_s = time.perf_counter() - self._started
        self.load_s, self.version, self.settings = answer["seconds"], answer["version"], answer["settings"]
        self.has_alternatives = answer.get("has_alternatives", False)

    def ensure_running(self) -> None:
        """Start and load the side again if its process has ended. Raises: SideError."""
        if self._process.poll() is not None:
            self.close()
            self._start()
            self.load(**self._load_request)

    def request(self, op: str, *, timeout_s: float, **values: Any) -> dict[str, Any]:
        """Ask, wait for the answer, and stop the process again. Raises: SideError."""
        line = json.dumps({"op": op, **values}).encode() + b"\n"
        assert self._process.stdin is not None
        before = (time.monotonic(), _machine_busy_s() - _process_cpu_s(self._process.pid))
        try:
            self._process.send_signal(signal.SIGCONT)
            self._process.stdin.write(line)
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._read_line(timeout_s))
        except (OSError, ValueError) as error:
            self._process.kill()
            self._process.wait()
            raise SideError(f"{self.name} ended during {op!r}{self._log_tail()}") from error
        self._process.send_signal(signal.SIGSTOP)
        self.answering_s += time.monotonic() - before[0]
        self.cpu_elsewhere_s += _machine_busy_s() - _process_cpu_s(self._process.pid) - before[1]
        if "error" in answer:
            raise SideError(f"{self.name}: {answer['error']}{self._log_tail()}")
        return answer

    def _read_line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise SideError(f"{self.name} gave no answer in {timeout_s:.0f} s{self._log_tail()}")
            part = os.read(descriptor, 1 << 16)
            if not part:
                raise ValueError("end of output")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _log_tail(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n    " + "\n    ".join(lines) if lines else ""

    @property
    def peak_memory_bytes(self) -> int | None:
        """The most memory the process has held so far, mapped files included; None where /proc does not say."""
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text()
        except OSError:
            return None
        found = re.search(r"^VmHWM:\s+(\d+) kB", status, flags=re.MULTILINE)
        return int(found[1]) * 1024 if found else None

    def close(self) -> None:
        """End the process; it needs no farewell."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                # A request that the process did not read is lost with it.
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def __enter__(self) -> "SideProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _machine_busy_s() -> float:
    """CPU seconds all CPUs have been busy or stolen since the machine started; 0 where /proc does not say."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks
    return (user + nice + system + irq + softirq + steal) / CLOCK_TICKS_PER_S


def _process_cpu_s(pid: int) -> float:
    """CPU seconds of a process and all its threads; 0 when it is gone."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(after_name[11]) + int(after_name[12])) / CLOCK_TICKS_PER_S
