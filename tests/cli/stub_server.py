"""An OpenAI-compatible server of a few lines, for tests of clients: it answers every request with given bytes."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[["Handler", dict[str, Any]], None]


class Handler(BaseHTTPRequestHandler):
    """Reads the body and has the server's `answer` write the rest."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, dict(self.headers), body))
        self.server.answer(self, body)

    def do_GET(self) -> None:
        if self.path == "/v1/models" and self.server.models:
            self.send_json(200, {"object": "list", "data": [{"id": name} for name in self.server.models]})
            return
        self.server.requests.append((self.path, dict(self.headers), {}))
        self.server.answer(self, {})

    def log_message(self, *arguments: Any) -> None:
        pass

    def send_json(self, status: int, value: Any, **headers: str) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(data)

    def send_events(self, events: list[Any], *, cut: int = 0, gap_s: float = 0.0) -> None:
        """Send a stream of events in chunks of `cut` bytes (0: one chunk per event)."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        data = [f"data: {item if isinstance(item, str) else json.dumps(item)}\n\n".encode() for item in events]
        whole = b"".join(data)
        for piece in [whole[start : start + cut] for start in range(0, len(whole), cut)] if cut else data:
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.flush()
            time.sleep(gap_s)
        self.wfile.write(b"0\r\n\r\n")


class StubServer(ThreadingHTTPServer):
    """Keeps what it was asked in `requests`: (path, headers, body)."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, answer: Answer, models: Sequence[str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = models
        self.answer = answer
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a client that leaves is no error here."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def stub_server(answer: Answer, *, models: Sequence[str] = ()) -> Iterator[StubServer]:
    """Start a stub. `models`: it lists these by itself."""
    with StubServer(answer, models) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


def chunks(*texts: str, num_prompt_tokens: int = 7, num_cached_tokens: int = 2) -> list[Any]:
    """Return the events of a streamed chat completion."""
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    deltas = [{"role": "assistant", "content": ""}, *({"content": text} for text in texts)]
    events: list[Any] = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    usage = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": len(texts),
        "total_tokens": num_prompt_tokens + len(texts),
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
    end = {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    return [*events, end, {**head, "choices": [], "usage": usage}, "[DONE]"]
