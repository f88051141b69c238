"""A server's models and answers, as the chat sees them."""

import json
from typing import Any

import pytest

from quire.cli.chat_client_answers import ServedModel, ServerAnswerer, StreamedAnswer, find_model, request_body
from quire.cli.server_client import ServerAnswerError, ServerClient
from quire.errors import InvalidParameterError, ModelNotFoundError
from quire.structured_outputs import StructuredOutputsParams
from tests.cli.stub_server import Handler, chunks, stub_server


def found(status: int, value: Any, name: str | None) -> ServedModel:
    answer = lambda handler, body: handler.send_json(status, value)  # noqa: E731
    with stub_server(answer) as server, ServerClient(server.url) as client:
        return find_model(client, name)


CARDS = {"data": [{"id": "one", "max_model_len": 64}, {"id": "two"}]}


def test_the_first_model_or_the_one_named() -> None:
    assert found(200, CARDS, None) == ServedModel("one", 64)
    assert found(200, CARDS, "two") == ServedModel("two", None)
    assert found(200, CARDS, "unlisted") == ServedModel("unlisted", None)
    assert found(404, {}, "named") == ServedModel("named", None)


@pytest.mark.parametrize("value", [{"data": []}, {}, [], {"data": [3]}, {"data": [{"id": None}]}])
def test_no_model(value: Any) -> None:
    with pytest.raises(ModelNotFoundError, match="name one with --model"):
        found(200, value, None)


def test_a_refused_key_is_not_a_missing_list() -> None:
    with pytest.raises(ServerAnswerError, match="set QUIRE_API_KEY"):
        found(401, {}, "named")


def test_bodies() -> None:
    assert request_body("m", [], {"temperature": 0.5, "logprobs": 3}) == {
        "model": "m", "messages": [], "temperature": 0.5, "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip


def test_the_form_of_an_answer_is_sent_as_it_was_given() -> None:
    form = StructuredOutputsParams(choice=["a", "b"])
    body = request_body("m", [], {"structured_outputs": form})
    assert json.loads(json.dumps(body))["structured_outputs"] == {"choice": ["a", "b"]}


def test_the_statistics_line() -> None:
    answer = StreamedAnswer()
    for index, event in enumerate(chunks("a", "b", "c")[:-1]):
        answer.take(event, 0.5 + 0.25 * index)
    assert answer.text == "abc"
    line = answer.statistics_line(100)
    assert line == "[stop] prompt 7 tok (2 cached) · 3 new · TTFT 750 ms · 4.0 tok/s · ctx 10/100 (10%)"
    assert "ctx" not in answer.statistics_line(None)
    answer.timings = {"predicted_per_second": 61.24}
    assert "61.2 tok/s" in answer.statistics_line(None)


def test_what_was_stopped_counts_its_pieces() -> None:
    answer = StreamedAnswer(interrupted=True)
    for event in chunks("a", "b")[:3]:
        answer.take(event, 1.0)
    assert answer.statistics_line(100) == "[interrupted] 2 pieces of text · TTFT 1.00 s"


def test_an_answer_is_asked_for_and_streamed() -> None:
    pieces: list[str] = []
    with stub_server(lambda handler, body: handler.send_events(chunks("Be", "cause."))) as server:
        with ServerClient(server.url) as client:
            answerer = ServerAnswerer(client, ServedModel("m"), {"max_tokens": 5})
            reply = answerer.answer([{"role": "user", "content": "why"}], {"temperature": 0.0}, pieces.append)
            assert (reply.text, pieces, reply.interrupted) == ("Because.", ["Be", "cause."], False)
            with pytest.raises(InvalidParameterError):
                answerer.check({"temperature": 9})
        assert server.requests[0][2] == {
            "model": "m", "messages": [{"role": "user", "content": "why"}], "max_tokens": 5, "temperature": 0.0,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip


def test_ctrl_c_keeps_what_came_and_hangs_up() -> None:
    hung_up: list[bool] = []

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        try:
            handler.send_events(chunks(*["a"] * 5000), gap_s=0.002)
        except OSError:
            hung_up.append(True)

    def stop(text: str) -> None:
        raise KeyboardInterrupt

    with stub_server(answer) as server, ServerClient(server.url) as client:
        reply = ServerAnswerer(client, ServedModel("m"), {}).answer([], {}, stop)
        assert (reply.text, reply.interrupted) == ("a", True)
        server.shutdown()
