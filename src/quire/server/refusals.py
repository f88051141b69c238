"""What a connection answers by itself, before there is a request that the application could answer.

In OpenAI's shape, like every error. Next to read: `connection.py`.
"""

from dataclasses import dataclass
from http import HTTPStatus

from quire.server.errors import ApiError


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason to end a connection."""

    status: int
    code: str
    message: str

    def response(self) -> bytes:
        """The whole answer, head and body."""
        answer = ApiError(self.status, self.message, code=self.code).response()
        head = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}".encode(), b"connection: close"]
        head += [name + b": " + value for name, value in answer.raw_headers]
        return b"\r\n".join(head) + b"\r\n\r\n" + bytes(answer.body)


MALFORMED = Refusal(400, "malformed_request", "this is not valid HTTP/1.1")
BAD_LENGTH = Refusal(400, "malformed_request", "Content-Length and Transfer-Encoding must not both be there, nor twice")
BAD_ENCODING = Refusal(400, "malformed_request", "the only Transfer-Encoding understood here is chunked")
BAD_HOST = Refusal(400, "malformed_request", "a request has one Host header")
TOO_MANY_CHUNKS = Refusal(400, "too_many_chunks", "the body comes in too many small chunks: send larger ones")
URL_TOO_LONG = Refusal(414, "url_too_long", "the URL is longer than 8192 bytes")
HEADERS_TOO_LARGE = Refusal(431, "headers_too_large", "the headers are more than 100, or larger than 32768 bytes")
TIMED_OUT = Refusal(408, "request_timeout", "the request did not arrive completely in time")
TOO_MANY_CONNECTIONS = Refusal(503, "too_many_connections", "the server has too many connections: try again later")
