"""A client for many small requests: connections that stay open, and headers of any bytes.

Must not know the API. Next to read: `table.py`.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

_T = TypeVar("_T")


@dataclass(frozen=True)
class Answer:
    """`status` 0: the connection ended without an answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    took_s: float

    @property
    def json(self) -> Any:
        """The body; None where it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def error(self) -> dict[str, Any]:
        """The body's `error`; empty without one."""
        value = self.json
        found = value.get("error") if isinstance(value, dict) else None
        return found if isinstance(found, dict) else {}


class Client:
    """Client with one connection, opened again when the server closes it."""

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), parts.port or 80
        self._headers = {"Host": parts.netloc} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None,
        *, timeout_s: float = 60.0,
    ) -> Answer:  # fmt: skip
        """Send a request; `body` is JSON unless it is bytes. A header whose value is "" is left out."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        found = {**self._headers, **({"Content-Type": "application/json"} if body is not None else {})}
        found |= {"Content-Length": str(len(data))} | dict(headers or {})
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in found.items() if value)]
        return await self.send("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data, timeout_s=timeout_s)

    async def send(self, data: bytes, *, timeout_s: float = 60.0) -> Answer:
        """The answer to one whole request."""
        for is_last in (self._writer is None, True):
            started_s = time.perf_counter()
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await self._exchange(data, started_s)
            except (OSError, EOFError, TimeoutError):
                await self.close()
                answer = None
            if answer is not None:
                return answer
            if is_last:
                break
        return Answer(0, {}, b"", time.perf_counter() - started_s)

    async def close(self) -> None:
        """End the connection."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _exchange(self, data: bytes, started_s: float) -> Answer:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        reader = self._reader
        self._writer.write(data)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        if headers.get("transfer-encoding") == "chunked":
            body = await _chunks(reader)
        else:
            body = await reader.readexactly(int(headers.get("content-length", 0)))
        if headers.get("connection") == "close":
            await self.close()
        return Answer(int(head[0].split()[1]), headers, body, time.perf_counter() - started_s)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    found = []
    while size := int((await reader.readline()) or b"0", 16):
        found.append((await reader.readexactly(size + 2))[:-2])
    await reader.readline()
    return b"".join(found)


@asynccontextmanager
async def connected(url: str, key: str | None = None) -> AsyncIterator[Client]:
    """A client that is closed at the end."""
    client = Client(url, key)
    try:
        yield client
    finally:
        await client.close()


async def share(
    url: str, items: Iterable[_T], work: Callable[[Client, _T], Awaitable[None]], *, num_clients: int = 8
) -> None:
    """Work through the items with several clients at once."""
    waiting = iter(items)

    async def one() -> None:
        async with connected(url) as client:
            for item in waiting:
                await work(client, item)

    await asyncio.gather(*(one() for _ in range(num_clients)))
