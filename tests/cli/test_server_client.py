"""Keys, proxies, and what becomes of a server's errors."""

import json
import time
from contextlib import closing
from typing import Any

import pytest

from quire.cli.server_address import ServerUnreachableError
from quire.cli.server_client import ServerAnswerError, ServerClient, client_settings
from quire.server.gate import UNKNOWN_KEY
from tests.cli.stub_server import Handler, chunks, stub_server


def test_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert client_settings("host")["headers"] == {}
    monkeypatch.setenv("QUIRE_API_KEY", "first, other")
    assert client_settings("host")["headers"] == {"Authorization": "Bearer first"}


def test_the_proxy_of_the_environment_is_not_for_this_machine() -> None:
    assert client_settings("http://127.0.0.1:1")["trust_env"] is False
    assert client_settings("http://[::1]:1")["trust_env"] is False
    assert client_settings("http://models.example")["trust_env"] is True


def test_a_wrong_key_is_called_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "wrong")
    error = {"message": UNKNOWN_KEY, "type": "authentication_error", "param": None, "code": "invalid_api_key"}
    refused = str(ServerAnswerError.of(401, json.dumps({"error": error}).encode()))
    assert refused == f"the server answers 401: {UNKNOWN_KEY}; the key sent is that of QUIRE_API_KEY"
    assert refused.count("not ") == 1


@pytest.mark.parametrize(
    ("status", "exit_code"), [(400, 2), (401, 5), (403, 5), (404, 3), (422, 2), (429, 5), (500, 5), (503, 5)]
)
def test_errors_in_openai_s_shape(status: int, exit_code: int) -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        handler.send_json(status, {"error": {"message": "because", "type": "t", "param": None, "code": "the_code"}})

    with stub_server(answer) as server, ServerClient(server.url) as client:
        for ask in (lambda: client.get_json("/x"), lambda: client.post("/x", {}), lambda: [*client.stream("/x", {})]):
            with pytest.raises(ServerAnswerError, match=f"answers {status}: because") as caught:
                ask()
            assert (caught.value.code, caught.value.exit_code) == ("the_code", exit_code)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"error": "text"}', b"null", b"\xff", b""])
def test_errors_in_any_other_shape(body: bytes) -> None:
    error = ServerAnswerError.of(502, body)
    assert error.code == "server_error"
    assert error.message.startswith("the server answers 502: ")


def test_nothing_of_a_server_s_message_reaches_the_terminal_unseen() -> None:
    body = {"error": {"message": "\x1b[2Jgone\r\n" + "x" * 10_000, "code": "a\x1bb"}}
    error = ServerAnswerError.of(500, json.dumps(body).encode())
    assert error.message.isprintable()
    assert len(error.message) < 600
    assert error.code == "server_error"


def test_nobody_there() -> None:
    with stub_server(lambda *_: None) as server:
        url = server.url
    with ServerClient(url) as client:
        with pytest.raises(ServerUnreachableError, match="start one with `quire serve`"):
            client.get_text("/")
        with pytest.raises(ServerUnreachableError):
            list(client.stream("/", {}))


def test_no_json() -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "2")
        handler.end_headers()
        handler.wfile.write(b"hi")

    with stub_server(answer) as server, ServerClient(server.url) as client:
        assert client.get_text("/") == "hi"
        with pytest.raises(ServerAnswerError, match="not JSON"):
            client.get_json("/")


@pytest.mark.parametrize("cut", [0, 1, 7])
def test_events_in_any_pieces(cut: int) -> None:
    sent = chunks("a", "ü")
    with stub_server(lambda handler, body: handler.send_events(sent, cut=cut)) as server:
        with ServerClient(server.url) as client:
            assert list(client.stream("/x", {"model": "tiny"})) == sent[:-1]
        assert server.requests[0][2] == {"model": "tiny", "stream": True}


@pytest.mark.parametrize(
    ("event", "message"), [({"error": {"message": "died", "code": "engine_dead"}}, "died"), ("{", "not JSON")]
)
def test_an_error_between_events(event: Any, message: str) -> None:
    sent = [*chunks("a")[:2], event]
    with stub_server(lambda handler, body: handler.send_events(sent)) as server, ServerClient(server.url) as client:
        got = []
        with pytest.raises(ServerAnswerError, match=message):
            got.extend(client.stream("/x", {}))


def test_a_broken_connection() -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100")
        handler.end_headers()
        handler.wfile.write(json.dumps({"choices": []}).encode())
        handler.close_connection = True

    with (
        stub_server(answer) as server,
        ServerClient(server.url) as client,
        pytest.raises(ServerUnreachableError, match="broke"),
    ):
        client.post("/x", {})


def test_closing_the_events_closes_the_connection() -> None:
    left = []

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        try:
            handler.send_events(chunks(*["a"] * 2000), gap_s=0.005)
        except OSError:
            left.append(True)

    with stub_server(answer) as server, ServerClient(server.url) as client:
        with closing(client.stream("/x", {})) as events:
            next(events)
        for _ in range(1000):
            if left:
                break
            time.sleep(0.005)
    assert left


def test_a_key_that_the_server_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    assert ServerAnswerError.of(401, b"no").message.endswith("; set QUIRE_API_KEY")
    monkeypatch.setenv("QUIRE_API_KEY", "wrong")
    assert ServerAnswerError.of(401, b"no").message.endswith("; the key sent is that of QUIRE_API_KEY")


def test_reasons_are_words() -> None:
    with ServerClient("http://127.0.0.1:1") as client, pytest.raises(ServerUnreachableError) as caught:
        client.get_json("/x")
    assert "no server at http://127.0.0.1:1: Connection refused; start one" in caught.value.message


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<!DOCTYPE html><title>404</title>", "a web page"),
        (b"", "no reason was given"),
        (b"404 page\x1b not found\n", "404 page  not found"),
    ],
)
def test_an_answer_in_another_shape_may_be_of_no_server_of_models(body: bytes, said: str) -> None:
    error = ServerAnswerError.of(404, body)
    assert error.message == f"the server answers 404: {said}; if it is no server of models, correct --url"
    assert error.exit_code == 5


def test_a_server_that_is_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.server_client.GET_S", 0.1)

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        time.sleep(0.6)
        handler.send_json(200, {"late": True})

    with stub_server(answer) as server, ServerClient(server.url) as client:
        with pytest.raises(ServerUnreachableError, match="has not answered in time"):
            client.get_json("/v1/models")
        assert client.post("/x", {}) == {"late": True}, "what the model computes may take long"
