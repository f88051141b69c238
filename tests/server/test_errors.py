"""Every error has OpenAI's shape and tells nothing internal."""

from typing import Any

import pytest

from quire.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineError,
    InvalidParameterError,
    MemoryCapacityError,
    ModelFileError,
    QueueFullError,
)
from quire.server.errors import ApiError, shown
from tests.server.fake_engine import assert_error, in_loop, make_server, requests_to


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "param"),
    [
        (ContextLengthError("x"), 400, "invalid_request_error", "context_length_exceeded", None),
        (InvalidParameterError("n", 0, "1"), 400, "invalid_request_error", "invalid_parameter", "n"),
        (QueueFullError("x"), 429, "rate_limit_error", "queue_full", None),
        (MemoryCapacityError("x"), 503, "server_error", "out_of_memory", None),
        (EngineDeadError("x"), 503, "server_error", "engine_dead", None),
        (EngineError("x"), 500, "server_error", "engine_error", None),
        (ModelFileError("x"), 500, "server_error", "model_file_invalid", None),
        (ApiError(404, "x", code="c", param="p"), 404, "not_found_error", "c", "p"),
        (ApiError(401, "x"), 401, "authentication_error", None, None),
    ],
)
def test_status_type_code_and_param(
    error: Exception, status: int, kind: str, code: str | None, param: str | None
) -> None:
    answer = ApiError.of(error)
    content = answer.body()["error"]
    assert (answer.status, content["type"], content["code"], content["param"]) == (status, kind, code, param)


def test_context_length_error_has_openais_words() -> None:
    message = ApiError.of(ContextLengthError("the prompt has 20 tokens")).message
    assert message == "this model's maximum context length is exceeded: the prompt has 20 tokens"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            "the prompt has 20 tokens, the context holds 16 including",
            "prompt is too long: 20 tokens > 16 maximum: the",
        ),
        (
            "the prompt has 300 characters, so at least 28 tokens; the context holds 16",
            "28 tokens > 16 maximum",
        ),
        ("the prompt is long", "prompt is too long: the prompt is long"),
    ],
)
def test_context_length_error_has_anthropics_words_below_messages(message: str, words: str) -> None:
    error = ApiError.of(ContextLengthError(message)).messages_body(None)["error"]
    assert words in error["message"]
    assert "maximum context length" not in error["message"]


def test_unexpected_exception_shows_only_its_class(caplog: pytest.LogCaptureFixture) -> None:
    answer = ApiError.of(ZeroDivisionError("secret: /etc/key"))
    assert (answer.status, answer.message) == (500, "internal error: ZeroDivisionError")
    assert "secret" in caplog.text


def test_values_are_shown_as_json_and_cut() -> None:
    assert [shown(value) for value in (None, True, 1.5, 'a"b', [1, 2], (), {})] == [
        "null", "true", "1.5", '"a\\"b"', "a list of 2 items", "a list of 0 items", "an object",
    ]  # fmt: skip
    assert len(shown("x" * 500)) <= 90
    assert shown(object()) == "a value of another type"
    assert ApiError.of(InvalidParameterError("f", None, "a number")).message == "f must be a number, got null"


def test_messages_are_bounded() -> None:
    assert len(ApiError(400, "x" * 10_000).body()["error"]["message"]) == 2000


def test_retry_after_is_whole_seconds_and_at_least_one() -> None:
    assert ApiError(429, "x", retry_after_s=0.2).headers() == {"Retry-After": "1"}
    assert ApiError(429, "x", retry_after_s=2.2).headers() == {"Retry-After": "3"}
    assert ApiError(429, "x").headers() == {}


@in_loop
async def test_unknown_route_is_404_with_a_hint_and_unknown_method_405() -> None:
    app, _ = make_server()
    async with requests_to(app) as client:
        assert_error(await client.get("/no/such/" + "x" * 500), 404, "route_not_found")
        assert_error(await client.get("/v1/chat/completions/"), 404, "route_not_found")
        for path in ("/chat/completions", "/v1/v1/chat/completions", "/v1/chat/completion"):
            answer = await client.post(path, json={})
            assert_error(answer, 404, "route_not_found")
            assert answer.json()["error"]["message"].endswith("(did you mean '/v1/chat/completions'?)")
        answer = await client.get("/v1/chat/completions")
        assert_error(answer, 405, "method_not_allowed")
        assert answer.headers["allow"] == "POST"
        assert_error(await client.request("BREW", "/v1/models"), 405, "method_not_allowed")


@in_loop
async def test_disconnect_while_sending_is_not_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    app, _ = make_server()
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"", "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http", "root_path": "",
    }  # fmt: skip
    await app(scope, receive, send)
    assert sent[0]["status"] == 499
    assert caplog.records == []
