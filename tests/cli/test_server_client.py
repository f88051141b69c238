"""Addresses, keys, models, streams, and errors of a server as Quire's own."""

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cli.server_client import (
    DEFAULT_URL,
    ServedModel,
    ServerAnswerError,
    ServerClient,
    ServerUnreachableError,
    StreamedAnswer,
    api_key,
    base_url,
    client_settings,
    find_model,
    find_url,
    key_hint,
)
from quire.errors import ModelNotFoundError
from tests.cli.stub_server import Handler, chunks, stub_server


def test_proxy_of_the_environment_is_not_used_for_this_machine() -> None:
    assert client_settings("http://127.0.0.1:1")["trust_env"] is False
    assert client_settings("http://[::1]:1")["trust_env"] is False
    assert client_settings("http://models.example")["trust_env"] is True


@pytest.mark.parametrize(("status", "exit_code"), [(400, 2), (401, 5), (404, 3), (429, 5), (500, 5)])
def test_error_in_openai_shape_keeps_its_code(status: int, exit_code: int) -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        handler.send_json(status, {"error": {"message": "because", "type": "t", "param": None, "code": "the_code"}})

    with stub_server(answer) as server, ServerClient(server.url) as client:
        for ask in (lambda: client.get_json("/x"), lambda: client.post("/x", {}), lambda: [*client.stream("/x", {})]):
            with pytest.raises(ServerAnswerError, match=f"answers {status}: because") as caught:
                ask()
            assert (caught.value.code, caught.value.exit_code) == ("the_code", exit_code)


def test_message_of_a_server_is_made_printable() -> None:
    body = {"error": {"message": "\x1b[2Jgone\r\n" + "x" * 10_000, "code": "a\x1bb"}}
    error = ServerAnswerError.of(500, json.dumps(body).encode())
    assert error.message.isprintable()
    assert len(error.message) < 600
    assert error.code == "server_error"


@pytest.mark.parametrize(
    ("event", "message"), [({"error": {"message": "died", "code": "engine_dead"}}, "died"), ("{", "not JSON")]
)
def test_error_event_ends_the_stream(event: Any, message: str) -> None:
    sent = [*chunks("a")[:2], event]
    with stub_server(lambda handler, body: handler.send_events(sent)) as server, ServerClient(server.url) as client:
        got = []
        with pytest.raises(ServerAnswerError, match=message):
            got.extend(client.stream("/x", {}))


@pytest.mark.parametrize("delta", [{"reasoning": "Hm."}, {"reasoning": "Hm.", "reasoning_content": "Hm."}])
def test_reasoning_is_text_of_the_stream_but_not_of_the_answer(delta: dict[str, str]) -> None:
    answer = StreamedAnswer(0.0)
    assert answer.take({"choices": [{"delta": delta}]}, 1.0) == "Hm."
    assert (answer.text, answer.chunk_times) == ("", [1.0])


def test_broken_connection_or_answer_without_json_is_an_error() -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100" if handler.command == "POST" else "2")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(b"hi")

    with stub_server(answer) as server, ServerClient(server.url) as client:
        assert client.get_text("/") == "hi"
        with pytest.raises(ServerAnswerError, match="not JSON"):
            client.get_json("/")
        with pytest.raises(ServerUnreachableError, match="broke"):
            client.post("/x", {})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<!DOCTYPE html><title>404</title>", "a web page"),
        (b"", "no reason was given"),
        (b"404 page\x1b not found\n", "404 page\\x1b not found"),
        (b"[]", "[]"),
        (b"\xff", "\ufffd"),
    ],
)
def test_answer_in_another_shape_may_be_of_another_kind_of_server(body: bytes, said: str) -> None:
    error = ServerAnswerError.of(404, body)
    assert error.message == f"the server answers 404: {said}; if it is no server of models, correct --url"
    assert (error.code, error.exit_code) == ("server_error", 5)


def test_silent_server_times_out_except_for_an_answer_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.server_client.GET_S", 0.05)
    timed_out = threading.Event()

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        if handler.command == "POST":
            timed_out.wait(0.1)  # longer than a GET may take
            handler.send_json(200, {"late": True})
        else:
            timed_out.wait(30)

    with stub_server(answer) as server, ServerClient(server.url) as client:
        assert client.post("/x", {}) == {"late": True}
        with pytest.raises(ServerUnreachableError, match="has not answered in time"):
            client.get_json("/v1/models")
        timed_out.set()


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://host/v1/", "http://host"),
        ("https://host:1/models/v1", "https://host:1/models"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_address_becomes_a_base_url(url: str, base: str) -> None:
    assert base_url(url) == base


@pytest.mark.parametrize("url", ["", "ftp://host", "http://host:99999", "http://[::1"])
def test_malformed_address_is_an_error(url: str) -> None:
    with pytest.raises(ServerUnreachableError, match="not the address"):
        base_url(url)


def test_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert (api_key(), key_hint(), client_settings("host")["headers"]) == ("", "set QUIRE_API_KEY", {})
    assert ServerAnswerError.of(401, b"no").message.endswith("; set QUIRE_API_KEY")
    monkeypatch.setenv("OPENAI_API_KEY", "second")
    assert (api_key(), key_hint()) == ("second", "the key sent is that of OPENAI_API_KEY")
    monkeypatch.setenv("QUIRE_API_KEY", "first, other")
    assert client_settings("host")["headers"] == {"Authorization": "Bearer first"}
    assert ServerAnswerError.of(401, b"no").message.endswith("; the key sent is that of QUIRE_API_KEY")


@pytest.mark.parametrize(
    ("running", "found"),
    [
        ([], DEFAULT_URL),
        (["http://127.0.0.1:9001"], "http://127.0.0.1:9001"),
        (["http://127.0.0.1:9001", DEFAULT_URL], DEFAULT_URL),
        (["http://127.0.0.1:9001", "http://127.0.0.1:9002"], None),
    ],
)
def test_running_server_is_found_without_an_address(
    running: list[str], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = [SimpleNamespace(url=url) for url in running]
    monkeypatch.setattr("quire.server.registration.find", lambda: notes)
    assert find_url("http://mine") == "http://mine"
    if found is not None:
        assert find_url(None) == found
    else:
        with pytest.raises(ServerUnreachableError, match="2 servers run here: choose one with --url: http://127"):
            find_url(None)


def model_of(status: int, value: Any, name: str | None) -> ServedModel:
    answer = lambda handler, body: handler.send_json(status, value)  # noqa: E731
    with stub_server(answer) as server, ServerClient(server.url) as client:
        return find_model(client, name)


def test_model_is_the_named_one_or_the_first() -> None:
    cards = {"data": [{"id": "one", "max_model_len": 64}, {"id": "two"}]}
    assert model_of(200, cards, None) == ServedModel("one", 64)
    assert model_of(200, cards, "two") == ServedModel("two", None)
    assert model_of(200, cards, "unlisted") == ServedModel("unlisted", None)
    assert model_of(404, {}, "named") == ServedModel("named", None)
    with pytest.raises(ServerAnswerError, match="set QUIRE_API_KEY"):
        model_of(401, {}, "named")


@pytest.mark.parametrize("value", [{"data": []}, {}, [], {"data": [3]}, {"data": [{"id": None}]}])
def test_server_without_models_needs_a_name(value: Any) -> None:
    with pytest.raises(ModelNotFoundError, match="name one with --model"):
        model_of(200, value, None)
