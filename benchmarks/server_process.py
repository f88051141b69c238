"""A server in a process of its own: started, watched from outside, stopped for a while, signalled, ended.

Quire's server prints its address when it is ready; other servers are polled at a known address. Used by
`soak/server.py`, `served_sides.py` and `tests/server/serving.py`.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

START_S = 120.0
POLL_S = 0.02
FAULTS = Path(__file__).parents[1] / "tests" / "faults"
"""Its `sitecustomize.py` lets an engine fail on purpose if `QUIRE_FAULTS` is set."""
_KEYS = ("QUIRE_API_KEY", "OPENAI_API_KEY", "VLLM_API_KEY")


def quire_serve(model: str, *arguments: str, name: str | None) -> list[str]:
    """The command of a server on a free port. `name`: of the model in the API; None: those of the arguments."""
    served = () if name is None else ("--served-model-name", name)
    return [sys.executable, "-m", "quire", "serve", model, "--port", "0", *served, *arguments]


def children_of(pid: int | None, module: str) -> list[psutil.Process]:
    """Return the running children of a process (None: this one) whose command line has `module`."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if any(module in word for word in child.cmdline()):
                    found.append(child)
    return found


class ServerProcess:
    """The process, its address and what it wrote to stderr. `start_s`: how long until it was ready."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, *, url: str = "",
        ready_path: str = "", start_s: float = START_S,
    ) -> None:  # fmt: skip
        """Start it and wait. Without `url` it writes its address when it is ready; else `ready_path` is asked.

        Raises: RuntimeError, with what it wrote, if it ends or is not ready after `start_s` seconds.
        """
        # Keys of the user's shell would lock clients out.
        inherited = {name: value for name, value in os.environ.items() if name not in _KEYS}
        paths = os.pathsep.join(filter(None, (str(FAULTS), inherited.get("PYTHONPATH"))))
        began_s = time.monotonic()
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**inherited, "PYTHONPATH": paths, **(environment or {})},
        )  # fmt: skip
        self.lines: list[str] = []
        self.url = url
        self._announced = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        is_ready = self._answers(ready_path, start_s) if url else self._announced.wait(start_s) and bool(self.url)
        if not is_ready:
            self.kill()
            self._reader.join(1)
            raise RuntimeError(f"the server did not start: {' '.join(command)}\n{self.stderr}")
        self.start_s = time.monotonic() - began_s

    @property
    def stderr(self) -> str:
        """Everything written to stderr so far."""
        return "".join(self.lines)

    @property
    def is_running(self) -> bool:
        """True while the process runs."""
        return self.process.poll() is None

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r" at (http://[^\s\"]+)", line)
            if found and not self.url:
                self.url = found[1]
                self._announced.set()
        self._announced.set()

    def _answers(self, path: str, limit_s: float) -> bool:
        end_s = time.monotonic() + limit_s
        while self.is_running and time.monotonic() < end_s:
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + path, timeout=limit_s):
                return True
            time.sleep(POLL_S)
        return False

    def processes(self) -> list[psutil.Process]:
        """Server and engine, as far as they are there."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        return []

    def engine(self) -> psutil.Process:
        """The engine's process."""
        (child,) = children_of(self.process.pid, "quire.engine.process.child")
        return child

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server."""
        self.process.send_signal(number)

    def pause(self) -> None:
        """Stop it where it stands, with all its processes."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        """Let it go on after `pause`."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def join(self, limit_s: float = 60.0) -> int:
        """Wait for the end, and for all it wrote. Returns: the exit code."""
        code = self.process.wait(limit_s)
        self._reader.join(limit_s)
        return code

    def kill(self) -> None:
        """End it at once, with all its processes."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()
