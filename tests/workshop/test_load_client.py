"""Streams as a load client reads them, and loads in closed and open loops."""

import asyncio
import threading
from typing import Any

import pytest

from quire.cli.server_client import ServerUnreachableError, StreamedAnswer
from quire_workshop.load_client import Load, LoadTarget, StreamClient, highest_rate, percentile, put_load
from tests.cli.stub_server import Handler, StubServer, chunks, stub_server

BODY = {"model": "tiny", "messages": [], "stream": True}


def ask(server: StubServer, times: int = 1, key: str = "") -> list[StreamedAnswer]:
    async def run() -> list[StreamedAnswer]:
        client = StreamClient(LoadTarget(server.url, "/v1/chat/completions", key))
        try:
            return [await client.ask(BODY) for _ in range(times)]
        finally:
            client.close()

    return asyncio.run(run())


@pytest.mark.parametrize("cut", [0, 1, 100_000])
def test_stream_is_read_in_pieces_of_any_size(cut: int) -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        handler.send_events(chunks("Grü", "ße", "!"), cut=cut)

    with stub_server(answer) as server:
        (seen,) = ask(server)
    assert seen.text == "Grüße!"
    assert (seen.num_prompt_tokens, seen.num_tokens, seen.num_cached_tokens) == (7, 3, 2)
    assert len(seen.chunk_times) == 3
    assert seen.started_s <= seen.chunk_times[0] <= seen.ended_s
    assert seen.error is None


def test_connection_is_reused_and_sends_the_key() -> None:
    ports = set()

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        ports.add(handler.client_address)
        handler.send_events(chunks("a"))

    with stub_server(answer) as server:
        assert [seen.text for seen in ask(server, 3, key="secret")] == ["a"] * 3
    assert len(ports) == 1
    assert server.requests[0][1]["Authorization"] == "Bearer secret"


def test_error_event_ends_a_stream_with_its_message() -> None:
    events = [*chunks("a")[:2], {"error": {"message": "the engine died"}}, "[DONE]"]
    with stub_server(lambda handler, body: handler.send_events(events)) as server:
        (seen,) = ask(server)
    assert (seen.text, seen.error) == ("a", "the engine died")


def test_broken_connection_keeps_the_text() -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n')
        handler.close_connection = True

    with stub_server(answer) as server:
        first, second = ask(server, 2)
    for seen in (first, second):
        assert (seen.text, seen.error) == ("a", "the connection ended before the answer")


def test_crlf_lines_and_missing_usage_are_understood() -> None:
    events = (
        b': ping\r\n\r\ndata: {"choices":[{"delta":{"content":"a"}}]}\r\n\r\n'
        b'data:{"choices":[{"delta":{"content":"b"}}]}\r\n\r\ndata: [DONE]\r\n\r\n'
    )

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Content-Length", str(len(events)))
        handler.end_headers()
        handler.wfile.write(events)

    with stub_server(answer) as server:
        (seen,) = ask(server)
    assert (seen.text, seen.num_tokens, len(seen.chunk_times), seen.error) == ("ab", 2, 2, None)


def test_server_of_another_protocol_is_an_error_without_a_status() -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        handler.wfile.write(b"220 mail.example ready\r\n")
        handler.close_connection = True

    with stub_server(answer) as server:
        (seen,) = ask(server)
    assert (seen.status, "no valid HTTP" in str(seen.error)) == (0, True)


def test_address_without_a_server_is_unreachable() -> None:
    with pytest.raises(ServerUnreachableError, match="no server at "):
        put_load(LoadTarget("127.0.0.1:1/v1", "/v1/chat/completions"), Load(concurrency=1), bodies(1))


def bodies(count: int) -> list[dict[str, Any]]:
    return [{"index": index} for index in range(count)]


def test_closed_loop_keeps_all_clients_busy_and_sends_each_body_once() -> None:
    # Four clients must be there at once, or the barrier breaks.
    together = threading.Barrier(4, timeout=30)

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        together.wait()
        handler.send_events(chunks("a", "b"))

    with stub_server(answer) as server:
        result = put_load(LoadTarget(server.url, "/v1/chat/completions"), Load(concurrency=4), bodies(12))
    assert sorted(body["index"] for _, _, body in server.requests) == list(range(12))
    assert len(result.good) == 12
    assert result.tokens_per_s == pytest.approx(24 / result.duration_s)


def test_open_loop_does_not_wait_for_answers() -> None:
    together = threading.Barrier(5, timeout=30)

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        together.wait()
        handler.send_events(chunks("a"))

    with stub_server(answer) as server:
        result = put_load(LoadTarget(server.url, "/v1/chat/completions"), Load(rate=200), bodies(5))
    assert len(result.good) == 5


@pytest.mark.parametrize(("percent", "expected"), [(1, 1), (50, 5), (90, 9), (91, 10), (99, 10)])
def test_percentiles_are_values_that_occurred(percent: int, expected: float) -> None:
    assert percentile([7, 1, 2, 10, 9, 8, 3, 4, 5, 6], percent) == expected


@pytest.mark.parametrize("capacity", [0.01, 0.2, 5.5, 37.0])
def test_highest_rate_is_found_from_below(capacity: float) -> None:
    found = highest_rate(lambda rate: rate <= capacity, 1.0)
    assert found == 0 if capacity < 1 / 16 else found <= capacity < found * 1.2
