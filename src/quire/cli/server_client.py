"""The HTTP client of every verb that speaks to a server: address, key, errors in OpenAI's shape, streamed answers.

`ServerClient` blocks and asks for one answer at a time; `batch_run.py` uses `client_settings` with an asynchronous
client; `quire_workshop/load_client.py` has cheaper ones. httpx2 is imported at the first use, so
that help texts stay instant. Knows no verb. Next to read: `chat_client.py`.
"""

import contextlib
import json
import os
import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quire.cli.command import option
from quire.errors import ModelNotFoundError, QuireError, printable

if TYPE_CHECKING:
    import httpx2

DEFAULT_URL = "http://127.0.0.1:8000"
URL_HELP = f"the server  [the server of `quire ps`, else {DEFAULT_URL}; QUIRE_URL]"
url_option = option("--url", envvar="QUIRE_URL", help=URL_HELP)
served_model_option = option("--model", metavar="NAME", help="the model's name there  [the server's first]")
CHAT_PATH = "/v1/chat/completions"
KEY_VARIABLES = ("QUIRE_API_KEY", "OPENAI_API_KEY")
CONNECT_S = 10.0
ANSWER_S = 600.0
"""Limit of a generation: a server sends nothing before the first token, and a long prompt takes minutes."""
GET_S = 30.0
"""Limit of a request that needs no model."""
MAX_MESSAGE = 500
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_EXIT_CODES = {400: 2, 401: 5, 403: 5, 404: 3, 405: 2, 413: 2, 415: 2, 422: 2}


class ServerUnreachableError(QuireError):
    """No server of models answers at the address."""

    code = "server_unreachable"
    exit_code = 5


class ServerAnswerError(QuireError):
    """The server answered with an error. `http_status`: of HTTP; `code`: the server's own code."""

    exit_code = 5

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.http_status = status
        self.code = code
        self.exit_code = _EXIT_CODES.get(status, 5)

    @classmethod
    def of(cls, status: int, body: bytes) -> "ServerAnswerError":
        """Make the error from an answer's body, in OpenAI's shape or any other."""
        try:
            found = json.loads(body)["error"]
            message, code = str(found["message"]), str(found.get("code") or found.get("type"))
        except (ValueError, KeyError, TypeError, AttributeError):
            # Not OpenAI's shape: a web page, for example, which is not shown.
            text = body[:200].decode("utf-8", "replace").strip()
            said = "a web page" if text.startswith("<") else printable(text) or "no reason was given"
            hint = key_hint() if status == 401 else "if it is no server of models, correct --url"
            error = cls(status, f"the server answers {status}: {said}; {hint}", "server_error")
            error.exit_code = 5 if status == 404 else error.exit_code  # this 404 is not about a model
            return error
        hint = f"; {key_hint()}" if status == 401 else ""
        # The message goes to a terminal: printable characters only, and at most `MAX_MESSAGE` of them.
        text = f"the server answers {status}: {printable(message, limit=MAX_MESSAGE)}{hint}"
        return cls(status, text, code if re.fullmatch(r"[\w.-]{1,64}", code) else "server_error")


def find_url(url: str | None) -> str:
    """Return `url`, else the address of the server that `quire ps` lists, else `DEFAULT_URL`.

    Raises: ServerUnreachableError if several servers run and none of them has the default address.
    """
    if url is not None:
        return url
    from quire.server.registration import find

    urls = [note.url for note in find()]
    if len(urls) > 1 and DEFAULT_URL not in urls:
        raise ServerUnreachableError(f"{len(urls)} servers run here: choose one with --url: {', '.join(urls)}")
    return urls[0] if len(urls) == 1 else DEFAULT_URL


def base_url(url: str) -> str:
    """Return an address ("host:8000", "http://host:8000/v1") as a URL without the API's version.

    Raises: ServerUnreachableError.
    """
    whole = url if "://" in url else f"http://{url}"
    with contextlib.suppress(ValueError):
        parts = urlsplit(whole)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
    raise ServerUnreachableError(f"--url {url!r} is not the address of a server: http://host:port")


def api_key() -> str:
    """Return the first key of `QUIRE_API_KEY`, else of `OPENAI_API_KEY`; empty without one."""
    return _found_key()[1]


def key_hint() -> str:
    """Say of a refused key which variable to set, or which variable it came from."""
    name, key = _found_key()
    return f"the key sent is that of {name}" if key else f"set {KEY_VARIABLES[0]}"


def _found_key() -> tuple[str, str]:
    keys = ((name, os.environ.get(name, "").split(",")[0].strip()) for name in KEY_VARIABLES)
    return next(((name, key) for name, key in keys if key), ("", ""))


def client_settings(url: str, *, read_s: float = ANSWER_S) -> dict[str, Any]:
    """Return the arguments of httpx2's clients. Raises: ServerUnreachableError."""
    import httpx2

    key, base = api_key(), base_url(url)
    is_local = urlsplit(base).hostname in LOOPBACK
    return {
        "base_url": base,
        # A proxy of the environment cannot reach this machine's own addresses.
        "trust_env": not is_local,
        # Reading the certificates of all authorities, which plain HTTP has no use for, takes 50 ms.
        "verify": not is_local or urlsplit(base).scheme != "http",
        "headers": {"Authorization": f"Bearer {key}"} if key else {},
        "timeout": httpx2.Timeout(read_s, connect=CONNECT_S),
    }


class ServerClient:
    """A blocking client of one server; a context manager."""

    def __init__(self, url: str, *, read_s: float = ANSWER_S) -> None:
        """Raises: ServerUnreachableError if `url` is no address."""
        import httpx2

        self._http = httpx2.Client(**client_settings(url, read_s=read_s))
        self._get_timeout = httpx2.Timeout(min(read_s, GET_S), connect=CONNECT_S)
        self.url = base_url(url)

    def __enter__(self) -> "ServerClient":
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def get_text(self, path: str) -> str:
        """Return the body of a GET. Raises: ServerUnreachableError, ServerAnswerError."""
        return self._answer("GET", path, timeout=self._get_timeout).text

    def get_json(self, path: str) -> Any:
        """Return the JSON of a GET. Raises: ServerUnreachableError, ServerAnswerError."""
        return _json(self.get_text(path))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON that answers a POST. Raises: ServerUnreachableError, ServerAnswerError."""
        return _json(self._answer("POST", path, json=dict(body)).text)

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the events of a streamed answer. Closing the generator closes the connection: the server stops then.

        Raises: ServerUnreachableError, ServerAnswerError, which may also come between events.
        """
        with errors_named(self.url), self._http.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                raise ServerAnswerError.of(response.status_code, response.read())
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                if line.startswith("data:"):
                    yield _event(data)

    def event_lines(self, path: str) -> Generator[str, None, None]:
        """Yield the data lines of server-sent events; "" for a comment. Raises: as `stream`."""
        with errors_named(self.url), self._http.stream("GET", path) as response:
            if response.status_code != 200:
                raise ServerAnswerError.of(response.status_code, response.read())
            for line in response.iter_lines():
                if line.startswith(("data: ", ":")):
                    yield line.removeprefix("data: ") if line[0] == "d" else ""

    def _answer(self, method: str, path: str, **settings: Any) -> "httpx2.Response":
        with errors_named(self.url):
            response = self._http.request(method, path, **settings)
        if response.status_code != 200:
            raise ServerAnswerError.of(response.status_code, response.content)
        return response


@contextlib.contextmanager
def errors_named(url: str) -> Iterator[None]:
    """Raises: ServerUnreachableError in place of httpx2's errors."""
    import httpx2

    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        message = f"no server at {url}: {_reason(error)}; start one with `quire serve`"
        raise ServerUnreachableError(message) from None
    except httpx2.ReadTimeout:
        raise ServerUnreachableError(f"{url} has not answered in time: it may hang, or be busy") from None
    except (httpx2.TransportError, httpx2.DecodingError) as error:
        raise ServerUnreachableError(f"the connection to {url} broke: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Describe an exception of the HTTP client without numbers of the operating system."""
    text = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
    is_closed = type(error).__name__ == "RemoteProtocolError" and ("closed" in text or "disconnected" in text)
    return "it was closed before the answer was complete" if is_closed else text


def _json(text: str) -> Any:
    try:
        return json.loads(text)
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


@dataclass(frozen=True)
class ServedModel:
    """A model of a server; `max_model_len` is None where the server does not tell."""

    name: str
    max_model_len: int | None = None


def find_model(client: ServerClient, name: str | None) -> ServedModel:
    """Return the model of this name, else the server's first. A name that the server does not list is kept.

    Raises: ModelNotFoundError if no name is given and the server lists no model; ServerAnswerError.
    """
    cards: list[dict[str, Any]] = []
    try:
        cards = [card for card in client.get_json("/v1/models")["data"] if isinstance(card.get("id"), str)]
    except ServerAnswerError as error:
        if name is None or error.http_status in (401, 403):
            raise
    except (KeyError, TypeError, AttributeError):
        pass
    if name is None and not cards:
        raise ModelNotFoundError(f"{client.url} lists no model: name one with --model")
    chosen: dict[str, Any] = next((card for card in cards if name in (None, card["id"])), {"id": name})
    length = chosen.get("max_model_len")
    return ServedModel(str(chosen["id"]), length if isinstance(length, int) and length > 0 else None)


@dataclass(slots=True)
class StreamedAnswer:
    """A streamed answer as its client saw it. Times are of `time.perf_counter()`; `chunk_times`: pieces of text."""

    started_s: float
    status: int = 0
    chunk_times: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    text: str = ""
    reasoning: str = ""
    error: str | None = None
    finish_reason: str | None = None
    server_tokens_per_s: float | None = None

    def take(self, event: Mapping[str, Any], now_s: float) -> str:
        """Add one event; returns the text that it brought, first its reasoning, which `text` leaves out."""
        text = ""
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            content = delta.get("content") or choice.get("text") or ""
            self.text += content
            reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
            self.reasoning += reasoning
            text += reasoning + content
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if text:
            self.chunk_times.append(now_s)
        if usage := event.get("usage"):
            self.num_prompt_tokens = int(usage.get("prompt_tokens") or 0)
            self.num_tokens = int(usage.get("completion_tokens") or 0)
            self.num_cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        if timings := event.get("timings"):
            self.server_tokens_per_s = timings.get("predicted_per_second")
        return text

    @property
    def message(self) -> dict[str, Any]:
        """Return the answer as a message of the history."""
        reasoning = {"reasoning": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.text, **reasoning}

    @property
    def time_to_first_s(self) -> float:
        """Seconds from sending the request to the first text."""
        return self.chunk_times[0] - self.started_s

    @property
    def tokens_per_s(self) -> float | None:
        """Return the server's measurement, else the rate after the first piece of text; None for a single piece."""
        if self.server_tokens_per_s:
            return float(self.server_tokens_per_s)
        num_tokens = self.num_tokens or len(self.chunk_times)
        took_s = self.chunk_times[-1] - self.chunk_times[0] if self.chunk_times else 0.0
        return (num_tokens - 1) / took_s if num_tokens > 1 and took_s > 0 else None
