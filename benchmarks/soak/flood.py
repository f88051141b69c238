"""Far more requests than a server can do, from a client that costs as little as it can: it shares the server's cores.

Sockets and callbacks instead of streams and tasks, a third of the time per request. `python -m benchmarks.soak.flood`
is the cheapest server that can refuse: what a flood costs beside it, it costs beside any. Next to read: `long.py`.
"""

import asyncio
import contextlib
import errno
import json
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from benchmarks.soak.client import CHAT, Answer, Seen, chat_body

RECEIVE_BYTES = 1 << 16
REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


class Flood:
    """An open loop of requests.

    keeps: connections are used again, as SDKs and proxies do; else each request has one of its own.
    """

    def __init__(self, url: str, *, keeps: bool) -> None:
        parts = urlsplit(url)
        self._address = (str(parts.hostname), parts.port or 80)
        self._keeps = keeps
        connection = "keep-alive" if keeps else "close"
        self._head = f"POST {CHAT} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: {connection}\r\n"
        self._head += "Content-Type: application/json\r\nContent-Length: "
        self._idle: list[_Line] = []

    async def run(self, rate: float, duration_s: float, max_tokens: int = 64) -> tuple[list[Seen], float]:
        """Send so many requests a second for so long; what each saw, and how long it took until all were answered."""
        start_s = time.perf_counter()
        shots: list[asyncio.Future[Seen]] = []
        while time.perf_counter() < start_s + duration_s:
            shots.append(self._send(chat_body(f"Flood. {len(shots)}", max_tokens)))
            await asyncio.sleep(max(0.0, start_s + len(shots) / rate - time.perf_counter()))
        seen = [await shot for shot in shots]
        seconds = time.perf_counter() - start_s
        for line in self._idle:
            line.close()
        return seen, seconds

    def _send(self, body: Mapping[str, Any]) -> asyncio.Future[Seen]:
        data = json.dumps(body).encode()
        line = self._idle.pop() if self._idle else _Line(self._address, self._idle if self._keeps else None)
        return line.send(f"{self._head}{len(data)}\r\n\r\n".encode() + data)


class _Line:
    """One connection, with one request at a time. After an answer it lies in `idle`, or is closed without one."""

    def __init__(self, address: tuple[str, int], idle: "list[_Line] | None") -> None:
        self._loop = asyncio.get_running_loop()
        self._idle = idle
        self._address = address
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._is_connected = False
        self._done: asyncio.Future[Seen] | None = None
        self._answer = Answer(Seen(0.0))
        self._data = b""

    def send(self, data: bytes) -> asyncio.Future[Seen]:
        """One request, and what it sees."""
        self._answer = Answer(Seen(time.perf_counter()))
        self._done = done = self._loop.create_future()
        self._data = data
        if self._is_connected:
            self._write()
            return done
        code = self._socket.connect_ex(self._address)
        if code not in (0, errno.EINPROGRESS):
            self._lose(f"connect: {errno.errorcode[code]}")
        else:
            self._loop.add_writer(self._socket, self._on_connected)
        return done

    def close(self) -> None:
        """Hang up."""
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _on_connected(self) -> None:
        self._is_connected = True
        self._loop.remove_writer(self._socket)
        self._loop.add_reader(self._socket, self._read)
        self._write()

    def _write(self) -> None:
        try:
            # A request is far smaller than a socket's buffer.
            if self._socket.send(self._data) < len(self._data):
                self._lose("connection: a request was not taken whole")
        except OSError as error:
            self._lose(f"connection: {type(error).__name__}")

    def _read(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            return self._lose(f"connection: {type(error).__name__}")
        if not data:
            return self._lose(None)
        if self._done is None:
            return
        self._answer.feed(data)
        if self._answer.seen.is_complete:
            if self._idle is None:
                self.close()
            else:
                self._idle.append(self)
            self._finish()

    def _lose(self, error: str | None) -> None:
        self.close()
        if self._idle is not None and self in self._idle:
            self._idle.remove(self)
        if self._done is not None:
            self._answer.seen.error = self._answer.seen.error or error
            self._finish()

    def _finish(self) -> None:
        done, self._done = self._done, None
        assert done is not None
        self._answer.seen.ended_s = time.perf_counter()
        self._answer.end()
        done.set_result(self._answer.seen)


@contextlib.contextmanager
def refusing_server() -> Iterator[str]:
    """The address of a server, in a process of its own, that answers every request with 429 and does nothing else.

    Connections are kept.
    """
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.soak.flood"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def refuse_all() -> None:
    """Serve until killed. One piece of input is one request."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    listener.setblocking(False)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                with contextlib.suppress(BlockingIOError):
                    selector.register(listener.accept()[0], selectors.EVENT_READ)
                continue
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            with contextlib.suppress(OSError):
                if connection.recv(RECEIVE_BYTES):
                    connection.sendall(REFUSAL)
                    continue
            selector.unregister(connection)
            connection.close()


if __name__ == "__main__":
    refuse_all()
