"""Far more requests than a server can do, from a client that costs as little as it can: it shares the server's cores.

Sockets and callbacks instead of streams and tasks, and one look at all sockets every 5 ms, whether much comes or
little: waking up costs more than most of what is then done, and it is no server's doing.
`python -m benchmarks.soak.flood` is the cheapest server that can refuse: what a flood costs beside it, it costs beside
any. Next to read: `overload.py`.
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
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from benchmarks.soak.client import CHAT, Answer, Seen

RECEIVE_BYTES = 1 << 16
LOOK_S = 0.005
REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


class Flood:
    """Clients of one server.

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
        self._selector = selectors.DefaultSelector()
        self._looking: asyncio.Task[None] | None = None
        self._send_due: Callable[[], None] = lambda: None

    async def run(self, rate: float, duration_s: float, body_of: Callable[[int], Mapping[str, Any]]) -> list[Seen]:
        """An open loop: send so many requests a second for so long. Returns: what each saw, once all are answered."""
        start_s = time.perf_counter()
        shots: list[asyncio.Future[Seen]] = []

        def send_due() -> None:
            passed_s = min(time.perf_counter() - start_s, duration_s)
            while len(shots) < passed_s * rate:
                shots.append(self.send(body_of(len(shots))))

        send_due()
        self._send_due = send_due
        await asyncio.sleep(duration_s + LOOK_S)
        return [await shot for shot in shots]

    def send(self, body: Mapping[str, Any]) -> asyncio.Future[Seen]:
        """One request, and what it sees."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        data = json.dumps(body).encode()
        line = self._idle.pop() if self._idle else _Line(self._address, self._selector, self._keep)
        return line.send(f"{self._head}{len(data)}\r\n\r\n".encode() + data)

    def close(self) -> None:
        """Hang up."""
        if self._looking is not None:
            self._looking.cancel()
        for key in list(self._selector.get_map().values()):
            key.data.close()
        self._selector.close()

    def _keep(self, line: "_Line") -> None:
        if self._keeps:
            self._idle.append(line)
        else:
            line.close()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._send_due()
            for key, events in self._selector.select(0):
                key.data.on_events(events)
            self._idle = [line for line in self._idle if line.is_open]


class _Line:
    """One connection, with one request at a time. `keep` is called with it after each answer."""

    def __init__(
        self, address: tuple[str, int], selector: selectors.BaseSelector, keep: "Callable[[_Line], None]"
    ) -> None:
        self._address = address
        self._selector = selector
        self._keep = keep
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._is_connected = False
        self._done: asyncio.Future[Seen] | None = None
        self._answer = Answer(Seen(0.0))
        self._data = b""
        self.is_open = True

    def send(self, data: bytes) -> asyncio.Future[Seen]:
        """One request, and what it sees."""
        self._answer = Answer(Seen(time.perf_counter()))
        self._done = done = asyncio.get_running_loop().create_future()
        self._data = data
        if self._is_connected:
            self._write()
            return done
        code = self._socket.connect_ex(self._address)
        self._selector.register(self._socket, selectors.EVENT_WRITE, self)
        if code not in (0, errno.EINPROGRESS):
            self._lose(f"connect: {errno.errorcode[code]}")
        return done

    def close(self) -> None:
        """Hang up."""
        self.is_open = False
        self._selector.unregister(self._socket)
        self._socket.close()

    def on_events(self, events: int) -> None:
        """The socket can be written or read."""
        if not self.is_open:
            return
        if self._is_connected:
            self._read()
        elif events & selectors.EVENT_WRITE:
            self._is_connected = True
            self._selector.modify(self._socket, selectors.EVENT_READ, self)
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
            self._keep(self)
            self._finish()

    def _lose(self, error: str | None) -> None:
        self.close()
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
