"""A real `quire serve` in a process of its own, for tests that end it."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

LIMIT_S = 60
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}


class Serving:
    """The process, its address and what it wrote to stderr."""

    def __init__(self, model: Path | str, *arguments: str, name: str = "tiny", **environment: str) -> None:
        command = [sys.executable, "-m", "quire", "serve", str(model), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--served-model-name", name, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.lines: list[str] = []
        self._announced = threading.Event()
        self.url = ""
        threading.Thread(target=self._read, daemon=True).start()
        assert self._announced.wait(LIMIT_S)
        assert self.url, self.stderr

    @property
    def stderr(self) -> str:
        return "".join(self.lines)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"http://\S+", line)
            if found:
                self.url = found[0]
                self._announced.set()
        self._announced.set()

    def engine(self) -> psutil.Process:
        """The engine's process."""
        children = psutil.Process(self.process.pid).children()
        (child,) = [child for child in children if "quire.engine.process.child" in child.cmdline()]
        return child

    def get(self, path: str) -> int:
        """The status of a GET; 0 where nobody answers."""
        return self.request(path)[0]

    def request(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Status and JSON of one request; (0, {}) if the connection broke."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except OSError:
            return 0, {}

    def chat(self, max_tokens: int) -> tuple[int, dict[str, Any]]:
        """One chat completion of exactly so many tokens."""
        return self.request("/v1/chat/completions", {**CHAT, "max_tokens": max_tokens})

    def wait_until(self, path: str, status: int) -> None:
        """Poll until a GET has this status."""
        deadline = time.monotonic() + LIMIT_S
        while self.get(path) != status:
            assert time.monotonic() < deadline, self.stderr
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(LIMIT_S)


@contextmanager
def serving(model: Path | str, *arguments: str, name: str = "tiny", **environment: str) -> Iterator[Serving]:
    """A server that is ready; killed at the end if it is still there."""
    server = Serving(model, *arguments, name=name, **environment)
    try:
        yield server
    finally:
        # Its engine ends with it.
        server.process.kill()
        server.process.wait()


class RunningChat:
    """A streamed answer whose first event has come; a thread reads the rest."""

    def __init__(self, server: Serving, max_tokens: int) -> None:
        body = {**CHAT, "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
        request = urllib.request.Request(
            server.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        self._response = urllib.request.urlopen(request, timeout=LIMIT_S)
        self._lines = [self._response.readline()]
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._lines += self._response

    def events(self) -> list[dict[str, Any]]:
        """All events, once the answer has ended."""
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        data = [line.removeprefix(b"data: ").strip() for line in self._lines]
        return [json.loads(item) for item in data if item and item != b"[DONE]"]
