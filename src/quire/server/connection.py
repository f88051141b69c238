"""One HTTP connection: uvicorn's protocol over httptools, with the limits that it lacks.

Next to read: `run.py`.
"""

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 32 << 10
MAX_HEADERS = 100


class Connection(HttpToolsProtocol):
    """Refuses requests whose headers are too large or too many."""

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._header_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header. Raises: HttpParserError if it is one too many."""
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES or len(self.headers) >= MAX_HEADERS:
            raise httptools.HttpParserError("too many headers")
        super().on_header(name, value)
