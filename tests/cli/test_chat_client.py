"""`quire chat` against a stub server."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.cli import chat
from quire.cli.chat_client import request_body
from quire.cli.main import cli
from quire.structured_outputs import StructuredOutputsParams
from tests.cli.command_line import Terminal, call, parsed
from tests.cli.stub_server import Handler, StubServer, chunks, stub_server


def answer(handler: Handler, body: dict[str, Any]) -> None:
    if not body:
        handler.send_json(200, {"data": [{"id": "tiny", "max_model_len": 100}]})
    elif body.get("stream"):
        handler.send_events(chunks("Be", "cause."))
    else:
        choices = [
            {"index": index, "message": {"role": "assistant", "content": f"No. {index}"}, "finish_reason": "stop"}
            for index in range(body.get("n", 1))
        ]
        handler.send_json(200, {"model": "tiny", "choices": choices, "usage": {"prompt_tokens": 3}})


def bodies(server: StubServer) -> list[dict[str, Any]]:
    return [body for _, _, body in server.requests if body]


def test_question_is_answered() -> None:
    with stub_server(answer) as server:
        result = call("chat", "why", "--url", server.url, "--system", "Be brief.", "--temperature", "0")
        assert (result.exit_code, result.stdout) == (0, "Because.\n")
        assert "[stop] prompt 7 tok (2 cached) · 2 new" in result.stderr
        (body,) = bodies(server)
    assert body["model"] == "tiny"
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "why"}]
    assert (body["max_tokens"], body["temperature"]) == (512, 0.0)
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


def test_answers_are_json_or_numbered() -> None:
    with stub_server(answer) as server:
        value = parsed(call("chat", "why", "--url", server.url, "--json", "--n", "2"))
        assert (value["schema"], value["text"], value["finish_reason"]) == ("quire.chat/1", "No. 0", "stop")
        assert [item["text"] for item in value["completions"]] == ["No. 0", "No. 1"]
        assert call("chat", "why", "--url", server.url, "--n", "2").stdout == "[1/2]\nNo. 0\n[2/2]\nNo. 1\n"


def test_continue_goes_on_with_the_chat_saved_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with stub_server(answer) as server:
        result = call("chat", "--continue", "--url", server.url)
        assert (result.exit_code, "no chat is saved yet" in result.stderr) == (2, True)
        os.utime(chat.save_chat("old", [{"role": "user", "content": "old"}]), (1, 1))
        chat.save_chat("new", [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}])
        assert call("chat", "why", "--continue", "--url", server.url).exit_code == 2
        assert call("chat", "--continue", "--url", server.url, stdin="two\n").exit_code == 0
        assert [message["content"] for message in bodies(server)[0]["messages"]] == ["one", "1", "two"]
    assert [message["content"] for message in chat.load_chat("new")] == ["one", "1", "two", "Because."]


def test_answer_of_another_api_is_an_error() -> None:
    with stub_server(lambda handler, body: handler.send_json(200, {"data": [{"id": "x"}]})) as server:
        result = call("chat", "why", "--url", server.url, "--json")
    assert result.exit_code == 5
    assert "did not answer with a chat completion" in result.stderr


def test_chat_keeps_history_and_settings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("one\n/set temperature 0.5\ntwo\n/stats\n/set\n"))
    with stub_server(answer) as server, pytest.raises(SystemExit) as ended:
        cli.main(["chat", "--url", server.url])
    assert ended.value.code == 0
    first, second = bodies(server)
    assert [turn["content"] for turn in second["messages"]] == ["one", "Because.", "two"]
    assert "temperature" not in first
    assert (second["temperature"], second["n"]) == (0.5, 1)
    captured = capsys.readouterr()
    assert captured.out.count("Because.\n") == 2
    assert "turns: 2" in captured.err
    assert "  temperature = 0.5  (chosen)\n" in captured.err
    assert "  top_p = the server's\n" in captured.err


def test_error_after_some_text_has_its_own_line() -> None:
    def breaks_off(handler: Handler, body: dict[str, Any]) -> None:
        if handler.command == "GET":
            handler.send_json(200, {"data": [{"id": "tiny"}]})
            return
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b'data: {"choices": [{"delta": {"content": "half"}}]}\n\n')
        handler.close_connection = True

    with stub_server(breaks_off) as server:
        result = call("chat", "why", "--url", server.url)
    assert (result.exit_code, result.stdout) == (5, "half\n")
    assert result.stderr.endswith("broke: it was closed before the answer was complete\n")


def test_body_has_openai_names_and_the_structure_as_it_was_given() -> None:
    structured = StructuredOutputsParams(choice=["a", "b"])
    body = request_body("m", [], {"temperature": 0.5, "logprobs": 3, "structured_outputs": structured})
    assert json.loads(json.dumps(body)) == {
        "model": "m", "messages": [], "temperature": 0.5, "logprobs": True, "top_logprobs": 3,
        "structured_outputs": {"choice": ["a", "b"]},
    }  # fmt: skip
