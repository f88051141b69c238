"""Answers that no application writes: what a connection refuses by itself, and what the gate does at once.

In OpenAI's shape, like every error. Next to read: `connection.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from quire.server.errors import ApiError


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason to end a connection."""

    status: int
    code: str
    message: str

    def response(self, headers: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
        """The whole answer, head and body, after which the connection ends."""
        return whole_answer(ApiError(self.status, self.message, code=self.code), headers, closes=True)


def whole_answer(
    error: ApiError, headers: Iterable[tuple[bytes, bytes]], *, closes: bool, has_body: bool = True
) -> bytes:
    """An error as the bytes of HTTP, in one piece. has_body: whether it has one beside its length, as HEAD has not."""
    body = msgspec.json.encode(error.body())
    lines = [f"{name}: {value}\r\n" for name, value in error.headers().items() if name != "Connection"]
    ours = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" + "".join(lines)
    head = [STATUS_LINE[error.status], *(b"%b: %b\r\n" % header for header in headers), ours.encode()]
    return b"".join((*head, b"connection: close\r\n\r\n" if closes else b"\r\n", body if has_body else b""))


MALFORMED = Refusal(400, "malformed_request", "this is not valid HTTP/1.1")
BAD_LENGTH = Refusal(400, "malformed_request", "Content-Length and Transfer-Encoding must not both be there, nor twice")
BAD_ENCODING = Refusal(400, "malformed_request", "the only Transfer-Encoding understood here is chunked")
BAD_HOST = Refusal(400, "malformed_request", "a request has one Host header")
TOO_MANY_CHUNKS = Refusal(400, "too_many_chunks", "the body comes in too many small chunks: send larger ones")
URL_TOO_LONG = Refusal(414, "url_too_long", "the URL is longer than 8192 bytes")
HEADERS_TOO_LARGE = Refusal(431, "headers_too_large", "the headers are more than 100, or larger than 32768 bytes")
TIMED_OUT = Refusal(408, "request_timeout", "the request did not arrive completely in time")
TOO_MANY_CONNECTIONS = Refusal(503, "too_many_connections", "the server has too many connections: try again later")
