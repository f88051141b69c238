"""Answers are shown by their kind, and sent on so: plain continuations, JSON, calls of tools, special tokens."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.cli.tiny_directory import make_tiny_directory
from tests.page.conftest import LIMIT_MS, OpenPage
from tests.page.test_conversations import ask, save
from tests.server.serving import Serving, serving

expect.set_options(timeout=LIMIT_MS)
CHAT = "**/v1/chat/completions"


@pytest.fixture
def server(tiny_server: Serving) -> Serving:
    return tiny_server


@pytest.fixture(scope="module")
def base_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Serve a model without a chat template."""
    model = make_tiny_directory(tmp_path_factory.mktemp("model"), template=None, max_position_embeddings=512)
    with serving(model) as server:
        yield server


def answer_with(page: Page, *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    """Let the page's requests be answered with these parts. Returns: the bodies, as they come."""
    bodies: list[dict[str, Any]] = []

    def answer(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        common = {"id": "chatcmpl-x", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
        choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
        lines = [f"data: {json.dumps({**common, 'choices': [choice]})}\n\n" for choice in choices]
        route.fulfill(content_type="text/event-stream", body="".join([*lines, "data: [DONE]\n\n"]))

    page.route(CHAT, answer)
    return bodies


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send", exact=True).click()


def test_model_without_a_chat_template_continues_texts(base_server: Serving, open_page: OpenPage) -> None:
    page = open_page(base_server.url)
    expect(page.locator("#log")).to_contain_text("tiny has no chat template: it continues texts")
    page.get_by_text("Parameters").click()
    assert page.get_by_label("system message").count() == 0
    page.get_by_label("max_tokens").fill("5")
    page.get_by_label("temperature").fill("0")
    page.get_by_label("Text to continue").fill("Once upon")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator(".stats")).to_contain_text("[length]")
    expect(page.locator(".stats")).to_contain_text("5 new")
    expect(page.locator(".stats")).to_contain_text("prompt 9 tokens")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".stats")).not_to_contain_text("prompt 9 tokens")
    page.get_by_text("Rendered prompt").click()
    expect(page.locator("pre").first).to_contain_text("Once upon")


def test_json_is_shown_on_lines_and_calls_with_their_arguments(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    call = {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": '{"city": '}}
    rest = {"index": 0, "function": {"arguments": '"<b>Oslo"}'}}
    bodies = answer_with(
        page, {"content": '{"a": [1,'}, {"content": " 2]}"}, {"tool_calls": [call]}, {"tool_calls": [rest]}
    )
    send(page, "What is the weather?")
    expect(page.locator(".fence pre").first).to_have_text('{\n  "a": [\n    1,\n    2\n  ]\n}')
    expect(page.locator(".call")).to_contain_text("Calls the tool weather")
    expect(page.locator(".call pre")).to_have_text('{\n  "city": "<b>Oslo"\n}')
    send(page, "And now?")
    expect(page.locator("article.user")).to_have_count(2)
    expect(page.locator(".call")).to_have_count(2)
    sent = bodies[1]["messages"][1]["tool_calls"]
    assert sent == [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "<b>Oslo"}'}}
    ]


def test_reasoning_is_folded_once_the_answer_begins(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    answer_with(page, {"reasoning_content": "Let me think. "}, {"content": "Yes."})
    send(page, "Is it?")
    expect(page.locator(".markdown").last).to_have_text("Yes.")
    assert not page.get_by_text("Let me think.").is_visible()
    page.get_by_text("Reasoning").click()
    expect(page.get_by_text("Let me think.")).to_be_visible()


def test_parameters_are_in_sight_and_an_unset_limit_is_not_sent(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    bodies = answer_with(page, {"content": "Yes."})
    summary = page.locator(".parameters summary")
    expect(summary).to_contain_text("tiny · until the answer ends · no system message")
    send(page, "Hi")
    expect(page.locator(".markdown")).to_have_text("Yes.")
    assert "max_tokens" not in bodies[0]
    page.get_by_text("Parameters").click()
    page.get_by_label("max_tokens").fill("7")
    page.get_by_label("system message").fill("Answer like a pirate")
    further = page.get_by_label("further fields of the request, as JSON")
    further.fill('{"response_format": {"type": "json_object"}}')
    expect(summary).to_contain_text("tiny · max_tokens 7 · system: Answer like a pirate · further fields")
    send(page, "Again")
    expect(page.locator(".markdown")).to_have_count(2)
    assert bodies[1]["max_tokens"] == 7
    assert bodies[1]["response_format"] == {"type": "json_object"}
    assert bodies[1]["messages"][0] == {"role": "system", "content": "Answer like a pirate"}
    further.fill("{oops")
    send(page, "Third")
    expect(page.get_by_role("alert")).to_contain_text("Not sent: the further fields are no JSON")
    assert page.get_by_label("Message", exact=True).input_value() == "Third"
    assert len(bodies) == 2


def test_continued_text_forks_at_a_token(base_server: Serving, open_page: OpenPage) -> None:
    page = open_page(base_server.url)
    page.get_by_role("button", name="Tokens", exact=True).click()
    page.get_by_text("Parameters").click()
    page.get_by_label("max_tokens").fill("12")
    page.get_by_label("temperature").fill("0")
    page.get_by_label("Text to continue").fill("Once upon")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator(".stats")).to_contain_text("12 new")
    page.get_by_label("special tokens").check()  # a random model's tokens may be parts of characters
    expect(page.locator(".token")).to_have_count(12)  # the X-ray's steps may come a moment later
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda request: "completions" in request.url and bodies.append(request.post_data_json))
    page.locator(".token").nth(5).press("Enter")
    expect(page.locator(".alternatives li")).to_have_count(8)
    page.locator(".alternatives button").first.click()
    future = page.locator(".split article").nth(1).locator(".token")
    expect(future).to_have_count(6 + 12)
    assert [len(prompt) for prompt in bodies[0]["prompt"]] == [9 + 6]
    future.nth(8).press("Enter")
    page.get_by_role("button", name="Fork into all 7").click()
    expect(page.locator(".split article").nth(8).locator(".token")).to_have_count(9 + 12)
    assert {tuple(prompt[:-1]) for prompt in bodies[1]["prompt"]} == {tuple(bodies[1]["prompt"][0][:-1])}
    assert bodies[1]["prompt"][0][:15] == bodies[0]["prompt"][0]
    assert len({prompt[-1] for prompt in bodies[1]["prompt"]}) == 7


def test_result_of_a_call_is_sent_as_a_message_of_the_tool(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    calls = [
        {"index": i, "id": f"call_{i}", "function": {"name": name, "arguments": "{}"}}
        for i, name in enumerate(("weather", "clock"))
    ]
    bodies = answer_with(page, {"tool_calls": calls})
    send(page, "What is the weather?")
    page.get_by_label("Result of weather").fill('{"sky": "<b>grey"}')
    page.get_by_label("Result of clock").fill("noon")
    page.unroute(CHAT)
    bodies = answer_with(page, {"content": "It is grey."})
    page.get_by_role("button", name="Send results").click()
    expect(page.locator(".markdown").last).to_have_text("It is grey.")
    assert [message["role"] for message in bodies[0]["messages"]] == ["user", "assistant", "tool", "tool"]
    assert bodies[0]["messages"][2:] == [
        {"role": "tool", "content": '{"sky": "<b>grey"}', "tool_call_id": "call_0"},
        {"role": "tool", "content": "noon", "tool_call_id": "call_1"},
    ]
    results = page.locator("article.tool")
    expect(results.first).to_contain_text("Result of weather")
    expect(results.first.locator("pre")).to_have_text('{\n  "sky": "<b>grey"\n}')
    expect(page.get_by_label("Result of clock")).to_have_count(0)
    save(page)
    page.reload()
    expect(results.nth(1)).to_contain_text("Result of clock")
    page.get_by_role("button", name="Other results").click()
    page.get_by_label("Result of clock").fill("midnight")
    page.get_by_role("button", name="Send results").click()
    expect(results.first.locator(".branches")).to_contain_text("2 of 2")
    expect(results.nth(1)).to_contain_text("midnight")


def test_result_that_cannot_be_sent_stays_in_its_box(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url, allowed=("400",))
    answer_with(page, {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "clock", "arguments": "{}"}}]})
    send(page, "What time is it?")
    page.get_by_label("Message", exact=True).fill("a draft")
    page.get_by_label("Result of clock").fill("noon")
    page.unroute(CHAT)
    refusal = json.dumps({"error": {"message": "no room", "code": None}})
    page.route(CHAT, lambda route: route.fulfill(status=400, content_type="application/json", body=refusal))
    page.get_by_role("button", name="Send result").click()
    expect(page.get_by_role("alert")).to_contain_text("Not sent: no room")
    expect(page.locator("article.tool")).to_have_count(0)
    assert page.get_by_label("Result of clock").input_value() == "noon"
    assert page.get_by_label("Message", exact=True).input_value() == "a draft"
    page.unroute(CHAT)
    answer_with(page, {"content": "It is noon."})
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".markdown").last).to_have_text("It is noon.")
    expect(page.locator("article.tool")).to_contain_text("noon")


@pytest.mark.model
def test_special_tokens_are_hidden_unless_asked_for(smollm2_server: Serving, open_page: OpenPage) -> None:
    page = open_page(smollm2_server.url)
    page.get_by_role("button", name="Tokens", exact=True).click()
    ask(page, "Say: Hello", max_tokens=200)
    expect(page.locator(".stats")).to_contain_text("[stop]")
    num_text = page.locator(".token").count()
    assert "<|im_end|>" not in page.locator("article.assistant").inner_text()
    page.get_by_label("special tokens").check()
    expect(page.locator(".token")).to_have_count(num_text + 1)
    special = page.locator(".token.special")
    assert "<|im_end|>" in special.inner_text()
    assert special.evaluate("token => getComputedStyle(token).userSelect") == "none"
