"""A real `quire serve` in a process of its own, for tests that end it."""

import contextlib
import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.server_process import ServerProcess, children_of, quire_serve
from tests.processes import wait_until

LIMIT_S = 60
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}


class Serving(ServerProcess):
    """A server whose model is called `name`, and blocking requests to it."""

    def __init__(self, model: Path | str, *arguments: str, name: str = "tiny", **environment: str) -> None:
        super().__init__(quire_serve(str(model), *arguments, name=name), environment)

    def get(self, path: str) -> int:
        """Return the status of a GET; 0 without an answer."""
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

    def metric(self, name: str) -> float:
        """Return a sample of `/metrics`, by its name with labels; 0 without it."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=LIMIT_S) as response:
            lines = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines() if line[:1] != "#")
        return float(lines.get(name, 0))

    def chat(self, max_tokens: int) -> tuple[int, dict[str, Any]]:
        """Ask for a chat completion of exactly `max_tokens` tokens."""
        return self.request("/v1/chat/completions", {**CHAT, "seed": 1, "max_tokens": max_tokens})

    def wait_until(self, path: str, status: int) -> None:
        """Poll until a GET has this status."""
        wait_until(lambda: self.get(path) == status, lambda: self.stderr)

    def wait_for_other_engine(self, *former_pids: int) -> None:
        """Wait until another engine is ready: a poll may miss the moment in which none is."""
        wait_until(
            lambda: self._has_other_engine(former_pids) and self.get("/health/ready") == 200, lambda: self.stderr
        )

    def _has_other_engine(self, former_pids: Collection[int]) -> bool:
        engines = children_of(self.process.pid, "quire.engine.process.child")
        return any(engine.pid not in former_pids and engine.is_running() for engine in engines)

    def wait(self) -> int:
        """Wait for the end, and for all it wrote. Returns: the exit code."""
        return self.join(LIMIT_S)


@contextmanager
def serving(model: Path | str, *arguments: str, name: str = "tiny", **environment: str) -> Iterator[Serving]:
    """Start a server and wait until it is ready; kills it at the end if it is still there."""
    server = Serving(model, *arguments, name=name, **environment)
    try:
        yield server
    finally:
        server.kill()


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
        """Return all events, once the answer has ended."""
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        data = [line.removeprefix(b"data: ").strip() for line in self._lines]
        return [json.loads(item) for item in data if item and item != b"[DONE]"]
