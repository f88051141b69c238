"""A client that may misbehave: hang up after a time or a number of bytes, read slowly, or send half a request.

One connection per request. Times are of `time.perf_counter()`. Next to read: `loads.py`.
"""

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

CHAT = "/v1/chat/completions"
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass
class Seen:
    """A request as its client saw it. `status` 0: no answer at all. `hung_up`: the client left on purpose."""

    started_s: float
    ended_s: float = 0.0
    status: int = 0
    retry_after_s: float | None = None
    text: str = ""
    piece_times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    num_bytes: int = 0
    is_complete: bool = False
    error: str | None = None
    hung_up: bool = False
    first_byte_s: float | None = None

    @property
    def is_good(self) -> bool:
        """A whole answer without an error in it."""
        return self.status == 200 and self.is_complete and self.error is None

    @property
    def took_s(self) -> float:
        """From sending to the end."""
        return self.ended_s - self.started_s

    @property
    def gaps_s(self) -> list[float]:
        """Between two pieces of text."""
        return [later - earlier for earlier, later in zip(self.piece_times, self.piece_times[1:], strict=False)]


@dataclass(frozen=True)
class Manners:
    """Behaviour of a client; polite by default."""

    hang_up_after_s: float | None = None
    hang_up_after_received: int | None = None
    hang_up_after_sent: int | None = None
    resets: bool = False
    bytes_per_s: int | None = None
    receive_buffer_bytes: int | None = None


POLITE = Manners()


def chat_body(text: str, max_tokens: int, *, stream: bool = True, **fields: Any) -> dict[str, Any]:
    """Return a one-turn conversation, answered with exactly `max_tokens` tokens."""
    body: dict[str, Any] = {
        "model": "soak", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens,
        "ignore_eos": True, "temperature": 0, "stream": stream, **fields,
    }  # fmt: skip
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body


async def ask(
    url: str, body: Mapping[str, Any], manners: Manners = POLITE, path: str = CHAT, *, key: str | None = None
) -> Seen:
    """Send one body and see what comes."""
    return await exchange(url, "POST", path, json.dumps(body).encode(), manners, key=key)


async def get(url: str, path: str, *, timeout_s: float = 30.0, key: str | None = None) -> Seen:
    """A GET; an answer that takes longer than `timeout_s` is none. `text` is the body."""
    return await exchange(url, "GET", path, b"", Manners(hang_up_after_s=timeout_s), key=key)


async def exchange(url: str, method: str, path: str, body: bytes, manners: Manners, *, key: str | None = None) -> Seen:
    """Send a request on a new connection and read its answer."""
    parts = urlsplit(url)
    head = f"{method} {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
    if key is not None:
        head += f"Authorization: Bearer {key}\r\n"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    seen = Seen(time.perf_counter())
    try:
        reader, writer = await _connect(str(parts.hostname), parts.port or 80, manners)
    except OSError as error:
        seen.error, seen.ended_s = f"connect: {error}", time.perf_counter()
        return seen
    answer = Answer(seen)
    try:
        async with asyncio.timeout(manners.hang_up_after_s):
            data = f"{head}\r\n".encode() + body
            writer.write(data[: manners.hang_up_after_sent])
            await writer.drain()
            if manners.hang_up_after_sent is not None and manners.hang_up_after_sent < len(data):
                seen.hung_up = True
            else:
                await _read(reader, answer, manners)
    except TimeoutError:
        seen.hung_up = True
    except OSError as error:
        seen.error = seen.error or f"connection: {type(error).__name__}"
    finally:
        seen.ended_s = time.perf_counter()
        if manners.resets:
            _socket(writer).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    answer.end()
    return seen


async def _connect(host: str, port: int, manners: Manners) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.setblocking(False)
    if manners.receive_buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, manners.receive_buffer_bytes)
    try:
        await asyncio.get_running_loop().sock_connect(connection, (host, port))
    except BaseException:
        connection.close()
        raise
    return await asyncio.open_connection(sock=connection, limit=manners.receive_buffer_bytes or 1 << 16)


async def _read(reader: asyncio.StreamReader, answer: "Answer", manners: Manners) -> None:
    seen = answer.seen
    while True:
        limit = manners.hang_up_after_received
        if limit is not None and seen.num_bytes >= limit:
            seen.hung_up = True
            return
        size = 1 << 16 if limit is None else limit - seen.num_bytes
        data = await reader.read(size if manners.bytes_per_s is None else manners.bytes_per_s)
        if not data:
            return
        answer.feed(data)
        if manners.bytes_per_s is not None:
            await asyncio.sleep(1)


def _socket(writer: asyncio.StreamWriter) -> socket.socket:
    found = writer.get_extra_info("socket")
    # asyncio hands out a wrapper that cannot do everything a socket can.
    return found._sock if hasattr(found, "_sock") else found


class Answer:
    """Takes an answer apart as it comes: headers, chunks, events."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self._data = b""
        self._body = b""
        self._in_headers = True
        self._is_chunked = self._is_stream = False
        self._length = -1

    def feed(self, data: bytes) -> None:
        seen = self.seen
        seen.num_bytes += len(data)
        if seen.first_byte_s is None:
            seen.first_byte_s = time.perf_counter()
        self._data += data
        if self._in_headers and not self._take_headers():
            return
        if self._is_chunked:
            self._take_chunks()
        else:
            self._body += self._data
            self._data = b""
            seen.is_complete = len(self._body) >= self._length >= 0
        if self._is_stream:
            *events, self._body = self._body.split(b"\n\n")
            for event in events:
                self._take_event(event)

    def end(self) -> None:
        """Nothing more comes."""
        seen = self.seen
        if seen.hung_up:
            return
        if not self._in_headers and not seen.is_complete and seen.error is None:
            seen.error = "the answer was cut off"
        if self._is_stream or not seen.is_complete:
            return
        seen.text = self._body.decode("utf-8", "replace")
        with contextlib.suppress(ValueError):
            self._take_whole(json.loads(self._body))

    def _take_headers(self) -> bool:
        head, found, rest = self._data.partition(b"\r\n\r\n")
        if not found:
            return False
        self._data, self._in_headers = rest, False
        status, *lines = head.decode("latin-1").split("\r\n")
        self.seen.status = int(status.split()[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._is_chunked = headers.get("transfer-encoding") == "chunked"
        self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
        self._length = int(headers.get("content-length", -1))
        if "retry-after" in headers:
            self.seen.retry_after_s = float(headers["retry-after"])
        return True

    def _take_chunks(self) -> None:
        while b"\r\n" in self._data:
            size, _, rest = self._data.partition(b"\r\n")
            length = int(size, 16)
            if len(rest) < length + 2:
                return
            self._body, self._data = self._body + rest[:length], rest[length + 2 :]
            if not length:
                self.seen.is_complete = True

    def _take_event(self, event: bytes) -> None:
        data = event.rpartition(b"data: ")[2]  # a name may stand before it
        if not data.startswith(b"{"):
            return  # the end, or a comment
        value = json.loads(data)
        self._take_usage_and_error(value)
        for choice in value.get("choices") or ():
            self.seen.token_ids += choice.get("token_ids") or ()
            text = choice["delta"].get("content") if "delta" in choice else choice["text"]
            if text:
                self.seen.text += text
                self.seen.piece_times.append(time.perf_counter())

    def _take_whole(self, value: Any) -> None:
        if isinstance(value, dict):
            self._take_usage_and_error(value)
            for choice in value.get("choices") or ():
                self.seen.text = choice["message"]["content"] if "message" in choice else choice["text"]
                self.seen.token_ids += choice.get("token_ids") or ()

    def _take_usage_and_error(self, value: dict[str, Any]) -> None:
        if value.get("error"):
            self.seen.error = str(value["error"].get("code") or value["error"].get("message"))
        if value.get("usage"):
            self.seen.num_tokens = value["usage"].get("completion_tokens", 0)
