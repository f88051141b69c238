"""`quire chat` against a server of a few lines."""

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from quire.cli import chat_client
from quire.cli.main import cli
from tests.cli.command_line import Terminal, call, parsed
from tests.cli.stub_server import Handler, StubServer, chunks, stub_server
from tests.cli.test_chat import Typist


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


def test_one_question() -> None:
    with stub_server(answer) as server:
        result = call("chat", "why", "--url", server.url, "--system", "Be brief.", "--temperature", "0")
        assert (result.exit_code, result.stdout) == (0, "Because.\n")
        assert "[stop] prompt 7 tok (2 cached) · 2 new" in result.stderr
        (body,) = bodies(server)
    assert body["model"] == "tiny"
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "why"}]
    assert (body["max_tokens"], body["temperature"]) == (512, 0.0)


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_a_piped_question(arguments: list[str]) -> None:
    with stub_server(answer) as server:
        assert call("chat", *arguments, "--url", server.url, "--model", "big", stdin="why\n").stdout == "Because.\n"
        assert (bodies(server)[0]["model"], bodies(server)[0]["messages"][0]["content"]) == ("big", "why")


def test_json_and_several_answers() -> None:
    with stub_server(answer) as server:
        value = parsed(call("chat", "why", "--url", server.url, "--json", "--n", "2"))
        assert (value["schema"], value["text"], value["finish_reason"]) == ("quire.chat/1", "No. 0", "stop")
        assert [item["text"] for item in value["completions"]] == ["No. 0", "No. 1"]
        assert call("chat", "why", "--url", server.url, "--n", "2").stdout == "[1/2]\nNo. 0\n[2/2]\nNo. 1\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--temperature", "9", "why"], 2, "temperature"),
        ([""], 2, "the prompt is empty"),
        (["--json"], 2, "standard input is empty"),
        (["why", "--url", "ftp://x"], 5, "not the address of a server"),
        (["why", "--url", "127.0.0.1:1"], 5, "start one with `quire serve`"),
    ],
)
def test_what_cannot_be_asked(arguments: list[str], code: int, message: str) -> None:
    result = call("chat", *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_answer_that_is_no_chat() -> None:
    with stub_server(lambda handler, body: handler.send_json(200, {"data": [{"id": "x"}]})) as server:
        result = call("chat", "why", "--url", server.url, "--json")
    assert result.exit_code == 5
    assert "did not answer with a chat completion" in result.stderr


def test_the_loop_of_quire_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    typist = Typist("one", "/set temperature 0.5", "two", "/stats")
    monkeypatch.setattr("builtins.input", typist)
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(chat_client, "Chat", _with_reader(typist))
    with stub_server(answer) as server, pytest.raises(SystemExit) as ended:
        cli.main(["chat", "--url", server.url])
    assert ended.value.code == 0
    first, second = bodies(server)
    assert [turn["content"] for turn in second["messages"]] == ["one", "Because.", "two"]
    assert "temperature" not in first
    assert (second["temperature"], second["n"]) == (0.5, 1)
    captured = capsys.readouterr()
    assert captured.out == "Because.\nBecause.\n"
    assert "turns: 2" in captured.err


def _with_reader(typist: Typist) -> Any:
    from quire.cli.chat import Chat

    return lambda *arguments, **settings: Chat(*arguments, **settings, read_line=typist)


def test_ctrl_c_ends_a_question_with_130() -> None:
    first_piece = threading.Event()

    def slow(handler: Handler, body: dict[str, Any]) -> None:
        if not body:
            return answer(handler, body)
        first_piece.set()
        return handler.send_events(chunks(*["a"] * 5000), gap_s=0.01)

    with stub_server(slow) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "quire", "chat", "why", "--url", server.url],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert process.stdout is not None
        assert first_piece.wait(60)
        assert process.stdout.read(2) == "aa"
        os.kill(process.pid, signal.SIGINT)
        rest, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert set(rest) <= set("a\n")
    assert "[interrupted]" in stderr
    assert "Traceback" not in stderr


def test_an_error_after_some_text_has_a_line_of_its_own() -> None:
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


def test_log_probabilities_are_in_the_json() -> None:
    def tells(handler: Handler, body: dict[str, Any]) -> None:
        choice = {"message": {"content": "a"}, "finish_reason": "stop", "logprobs": {"content": [{"logprob": -1.0}]}}
        handler.send_json(200, {"choices": [choice], "data": [{"id": "tiny"}]})

    with stub_server(tells) as server:
        value = parsed(call("chat", "why", "--url", server.url, "--json", "--logprobs", "0"))
    assert value["completions"] == [
        {"index": 0, "text": "a", "finish_reason": "stop", "logprobs": {"content": [{"logprob": -1.0}]}}
    ]
