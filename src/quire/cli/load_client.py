"""A client of streamed chat completions that costs little: it must not take the processor from the server it measures.

HTTP/1.1 over asyncio streams, parsed by httptools; events are split by hand and decoded by msgspec. One connection per
`StreamClient`, kept alive. For people's use there is the `openai` package. Next to read: `bench_serve.py`.
"""

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from quire.cli.server_address import ServerUnreachableError, base_url

READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server's API is. `key` may be empty."""

    host: str
    port: int
    path: str
    key: str = ""

    @classmethod
    def parse(cls, url: str, path: str, key: str = "") -> "Endpoint":
        """From a server's address as people write it. Raises: ServerUnreachableError."""
        parts = urlsplit(base_url(url))
        if parts.scheme != "http" or parts.hostname is None:
            raise ServerUnreachableError(f"--url {url!r}: load is put on plain HTTP only: http://host:port")
        return cls(parts.hostname, parts.port or 80, parts.path + path, key)


@dataclass(slots=True)
class Answer:
    """One request as its client saw it. Times are of `time.perf_counter()`; `chunk_times` are those with text."""

    started_s: float
    status: int = 0
    chunk_times: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    text: str = ""
    error: str | None = None
    retry_after_s: float | None = None

    @property
    def time_to_first_s(self) -> float:
        """From sending to the first text."""
        return self.chunk_times[0] - self.started_s


class _Chunk(msgspec.Struct):
    """What is read of one event."""

    choices: list["_Choice"] = []
    usage: "_Usage | None" = None
    error: dict[str, Any] | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    text: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class StreamClient:
    """Sends one request after the other over one connection."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._decoder = msgspec.json.Decoder(_Chunk)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, body: Mapping[str, Any]) -> Answer:
        """Send one body and read its answer to the end. Raises: ServerUnreachableError."""
        if self._writer is None or self._writer.is_closing():
            await self._connect()
        assert self._reader is not None
        assert self._writer is not None
        answer = Answer(time.perf_counter())
        response = _Response(answer, self._decoder)
        parser = httptools.HttpResponseParser(response)
        self._writer.write(self._request(msgspec.json.encode(body)))
        while not response.is_complete:
            data = await self._reader.read(READ_BYTES)
            if not data:
                answer.error = answer.error or "the server closed the connection"
                break
            try:
                parser.feed_data(data)
            except httptools.HttpParserError:
                self.close()
                raise ServerUnreachableError(f"no HTTP server at {self._endpoint.host}:{self._endpoint.port}") from None
        answer.ended_s = time.perf_counter()
        answer.status = answer.status or parser.get_status_code()
        # Servers that do not count their tokens send one at a time.
        answer.num_tokens = answer.num_tokens or len(answer.chunk_times)
        if not response.keeps_alive or answer.error is not None:
            self.close()
        return answer

    def close(self) -> None:
        """Close the connection."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def _connect(self) -> None:
        try:
            self._reader, self._writer = await asyncio.open_connection(self._endpoint.host, self._endpoint.port)
        except OSError as error:
            where = f"{self._endpoint.host}:{self._endpoint.port}"
            number = error.errno or 0
            reason = os.strerror(number) if number > 0 else error.strerror or error
            raise ServerUnreachableError(f"no server at {where}: {reason}; start one with `quire serve`") from None

    def _request(self, body: bytes) -> bytes:
        where = self._endpoint
        lines = [
            f"POST {where.path} HTTP/1.1",
            f"Host: {where.host}:{where.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            f"Content-Length: {len(body)}",
        ]
        if where.key:
            lines.append(f"Authorization: Bearer {where.key}")
        return "\r\n".join([*lines, "", ""]).encode() + body


class _Response:
    """httptools' callbacks: collects one answer."""

    def __init__(self, answer: Answer, decoder: "msgspec.json.Decoder[_Chunk]") -> None:
        self.is_complete = False
        self.keeps_alive = True
        self._answer = answer
        self._decoder = decoder
        self._is_stream = False
        self._body = bytearray()

    def on_status(self, status: bytes) -> None:
        """The status line was read."""

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        name = name.lower()
        if name == b"content-type":
            self._is_stream = value.startswith(b"text/event-stream")
        elif name == b"connection":
            self.keeps_alive = value.lower() != b"close"
        elif name == b"retry-after":
            self._answer.retry_after_s = float(value)

    def on_body(self, body: bytes) -> None:
        """Some of the body: complete lines are taken out of it; comments and blank lines say nothing."""
        self._body += body
        if self._is_stream:
            *lines, rest = bytes(self._body).split(b"\n")
            self._body = bytearray(rest)
            for line in lines:
                if line.startswith(b"data:"):
                    self._take_event(line[5:].strip())

    def on_message_complete(self) -> None:
        """The answer has ended."""
        self.is_complete = True
        if not self._is_stream:
            self._answer.error = bytes(self._body[:500]).decode("utf-8", "replace")

    def _take_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        chunk = self._decoder.decode(data)
        answer = self._answer
        answer.status = 200
        if chunk.error is not None:
            answer.error = str(chunk.error.get("message"))
        for choice in chunk.choices:
            text = choice.delta.content or choice.text
            if text:
                answer.chunk_times.append(time.perf_counter())
                answer.text += text
        if chunk.usage is not None:
            answer.num_prompt_tokens = chunk.usage.prompt_tokens
            answer.num_tokens = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            answer.num_cached_tokens = (details.cached_tokens or 0) if details else 0
