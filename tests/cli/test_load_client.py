import asyncio
from typing import Any

import pytest

from quire.cli.load_client import Answer, Endpoint, StreamClient
from quire.cli.server_address import ServerUnreachableError
from tests.cli.stub_server import Handler, StubServer, chunks, stub_server

BODY = {"model": "tiny", "messages": [], "stream": True}


def ask(server: StubServer, times: int = 1, key: str = "") -> list[Answer]:
    async def run() -> list[Answer]:
        client = StreamClient(Endpoint.parse(server.url, "/v1/chat/completions", key))
        try:
            return [await client.ask(BODY) for _ in range(times)]
        finally:
            client.close()

    return asyncio.run(run())


@pytest.mark.parametrize("cut", [0, 1, 7, 100_000])
def test_a_stream_is_read_however_it_is_cut(cut: int) -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        handler.send_events(chunks("Grü", "ße", "!"), cut=cut)

    with stub_server(answer) as server:
        (seen,) = ask(server)
    assert seen.text == "Grüße!"
    assert (seen.num_prompt_tokens, seen.num_tokens, seen.num_cached_tokens) == (7, 3, 2)
    assert len(seen.chunk_times) == 3
    assert seen.started_s <= seen.chunk_times[0] <= seen.ended_s
    assert seen.error is None


def test_one_connection_serves_many_requests_and_carries_the_key() -> None:
    ports = set()

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        ports.add(handler.client_address)
        handler.send_events(chunks("a"))

    with stub_server(answer) as server:
        assert [seen.text for seen in ask(server, 3, key="secret")] == ["a"] * 3
    assert len(ports) == 1
    path, headers, body = server.requests[0]
    assert (path, body, headers["Authorization"]) == ("/v1/chat/completions", BODY, "Bearer secret")


def test_a_refusal_is_an_answer_with_its_reason() -> None:
    with stub_server(lambda handler, body: handler.send_json(429, {"error": "full"}, Retry_After="3")) as server:
        (seen,) = ask(server)
    assert "full" in str(seen.error)
    assert seen.retry_after_s == 3
    assert seen.chunk_times == []


def test_an_error_in_the_middle_of_a_stream() -> None:
    events = [*chunks("a")[:2], {"error": {"message": "the engine died"}}, "[DONE]"]
    with stub_server(lambda handler, body: handler.send_events(events)) as server:
        (seen,) = ask(server)
    assert (seen.text, seen.error) == ("a", "the engine died")


def test_a_connection_that_breaks_off() -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        handler.wfile.write(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n')
        handler.close_connection = True

    with stub_server(answer) as server:
        first, second = ask(server, 2)
    for seen in (first, second):
        assert (seen.text, seen.error) == ("a", "the server closed the connection")


def test_nobody_there() -> None:
    with stub_server(lambda handler, body: None) as server:
        url = server.url
    client = StreamClient(Endpoint.parse(url, "/v1/chat/completions"))
    with pytest.raises(ServerUnreachableError, match="quire serve"):
        asyncio.run(client.ask(BODY))


def test_other_servers_end_lines_otherwise_and_do_not_count() -> None:
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


@pytest.mark.parametrize("url", ["https://x", "ftp://x", "http://", ""])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ServerUnreachableError, match="http://host:port"):
        Endpoint.parse(url, "/v1")


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "h:1", "http://h:1/v1"])
def test_the_base_url_may_end_in_v1(url: str) -> None:
    assert Endpoint.parse(url, "/v1/models") == Endpoint("h", 1, "/v1/models")


def test_a_server_of_something_else() -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        handler.wfile.write(b"220 mail.example ready\r\n")
        handler.close_connection = True

    with stub_server(answer) as server, pytest.raises(ServerUnreachableError, match="no HTTP server at "):
        ask(server)
