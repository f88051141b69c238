"""How verbs speak to a server, with its errors as Quire's own. For people's pace, one at a time.

`load_client.py` is for load. Knows no verb. Next to read: `server_address.py`, `chat_client.py`.
"""

import contextlib
import json
import re
from collections.abc import Generator, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx2

from quire.cli.server_address import ServerUnreachableError, api_key, base_url, key_hint
from quire.errors import QuireError, printable

CONNECT_S = 10.0
ANSWER_S = 600.0
"""A long prompt on a slow machine: nothing is sent before its first token."""
GET_S = 30.0
"""What needs no model is not worth waiting for."""
MAX_MESSAGE = 500
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_EXIT_CODES = {400: 2, 401: 5, 403: 5, 404: 3, 405: 2, 413: 2, 415: 2, 422: 2}


class ServerAnswerError(QuireError):
    """The server answered with an error. `status`: of HTTP; `code`: the server's own word."""

    exit_code = 5

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.http_status = status
        self.code = code
        self.exit_code = _EXIT_CODES.get(status, 5)

    @classmethod
    def of(cls, status: int, body: bytes) -> "ServerAnswerError":
        """From an answer in OpenAI's shape, or any other."""
        try:
            found = json.loads(body)["error"]
            message, code = str(found["message"]), _word(found.get("code") or found.get("type"))
        except (ValueError, KeyError, TypeError, AttributeError):
            return cls._of_other(status, body)
        # It goes to a terminal: no control characters, and not a page of it.
        message = printable(message[:MAX_MESSAGE])
        hint = f"; {key_hint()}" if status == 401 else ""
        return cls(status, f"the server answers {status}: {message}{hint}", code)

    @classmethod
    def _of_other(cls, status: int, body: bytes) -> "ServerAnswerError":
        """From an answer in no shape of OpenAI's, such as a web page, which is not shown."""
        text = body[:200].decode("utf-8", "replace").strip()
        said = "a web page" if text.startswith("<") else printable(text) or "no reason was given"
        hint = key_hint() if status == 401 else "if it is no server of models, correct --url"
        error = cls(status, f"the server answers {status}: {said}; {hint}", "server_error")
        error.exit_code = 5 if status == 404 else error.exit_code  # it does not speak of a model
        return error


def client_settings(url: str, *, read_s: float = ANSWER_S) -> dict[str, Any]:
    """What an HTTP client, blocking or not, is made with. Raises: ServerUnreachableError."""
    key, base = api_key(), base_url(url)
    return {
        "base_url": base,
        # A proxy of the environment cannot reach this machine's own addresses.
        "trust_env": urlsplit(base).hostname not in LOOPBACK,
        "headers": {"Authorization": f"Bearer {key}"} if key else {},
        "timeout": httpx2.Timeout(read_s, connect=CONNECT_S),
    }


class ServerClient:
    """A blocking client of one server; a context manager."""

    def __init__(self, url: str, *, read_s: float = ANSWER_S) -> None:
        """Raises: ServerUnreachableError if `url` is no address."""
        self._http = httpx2.Client(**client_settings(url, read_s=read_s))
        self._get_s = min(read_s, GET_S)
        self.url = base_url(url)

    def __enter__(self) -> "ServerClient":
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def get_text(self, path: str) -> str:
        """The body of a GET. Raises: ServerUnreachableError, ServerAnswerError."""
        return _checked(self._get(path)).text

    def get_json(self, path: str) -> Any:
        """The JSON of a GET. Raises: ServerUnreachableError, ServerAnswerError."""
        return _json(_checked(self._get(path)))

    def _get(self, path: str) -> httpx2.Response:
        with self._reported():
            return self._http.get(path, timeout=httpx2.Timeout(self._get_s, connect=CONNECT_S))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that answers a body. Raises: ServerUnreachableError, ServerAnswerError."""
        with self._reported():
            response = self._http.post(path, json=dict(body))
        return _json(_checked(response))

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of a streamed answer; closing the generator closes the connection, which stops the server's work.

        Raises: ServerUnreachableError, ServerAnswerError, which may also come between events.
        """
        with self._reported(), self._http.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                raise ServerAnswerError.of(response.status_code, response.read())
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                yield _event(data)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise ServerUnreachableError(
                f"no server at {self.url}: {_reason(error)}; start one with `quire serve`"
            ) from None
        except httpx2.ReadTimeout:
            raise ServerUnreachableError(
                f"{self.url} has not answered in time: does it hang, or do much else?"
            ) from None
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise ServerUnreachableError(f"the connection to {self.url} broke: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """An exception of the HTTP client in words for people, without numbers of the operating system."""
    text = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
    if isinstance(error, httpx2.RemoteProtocolError) and ("closed" in text or "disconnected" in text):
        return "it was closed before the answer was complete"
    return text


def _word(code: object) -> str:
    """A code that can stand in `error[code]`."""
    text = str(code or "")
    return text if re.fullmatch(r"[\w.-]{1,64}", text) else "server_error"


def _checked(response: httpx2.Response) -> httpx2.Response:
    if response.status_code != 200:
        raise ServerAnswerError.of(response.status_code, response.content)
    return response


def _json(response: httpx2.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        raise ServerAnswerError(200, "the server's answer is not JSON: is it a server of models?", "not_json") from None


def _event(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise ServerAnswerError(200, f"the server sent an event that is not JSON: {data[:80]!r}", "not_json")
    if event.get("error"):
        raise ServerAnswerError.of(500, data.encode())
    return event
