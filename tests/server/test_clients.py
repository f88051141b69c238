"""OpenAI's client and LangChain, unchanged, against a server on a real port.

LiteLLM has a file of its own: `test_litellm.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from tests.engine.builders import saying
from tests.server.fake_engine import MESSAGES, MODEL, FakeEngine, in_loop, listening, make_server

TEXT = "Hello wörld"
LONG = {"num_blocks": 2000, "max_model_len": 2048, "max_num_batched_tokens": 2048}


@asynccontextmanager
async def serving(text: str = TEXT) -> AsyncIterator[tuple[str, FakeEngine]]:
    app, engine = make_server(next_token=saying(text))
    async with listening(app) as url:
        yield url + "/v1", engine


async def with_openai(use: Callable[[openai.OpenAI], Any]) -> Any:
    """Run `use` in a thread, with a client that validates every answer strictly."""
    async with serving() as (url, engine):
        client = openai.OpenAI(base_url=url, api_key="any", max_retries=0, _strict_response_validation=True)
        result = await asyncio.to_thread(use, client)
        assert engine.num_requests == 0
        return result


@in_loop
async def test_openai_chat_whole_streamed_and_with_the_stream_helper() -> None:
    def use(client: openai.OpenAI) -> Any:
        asked: Any = {"model": MODEL, "messages": MESSAGES}
        whole = client.chat.completions.create(
            **asked, logprobs=True, top_logprobs=2, n=1, stop=["x"], seed=1, user="me"
        )  # fmt: skip
        with client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
            chunks = list(stream)
        with client.chat.completions.stream(**asked) as helper:
            for _ in helper:
                pass
            return whole, chunks, helper.get_final_completion()

    whole, (*chunks, last), final = await with_openai(use)
    assert whole.choices[0].message.content == final.choices[0].message.content == TEXT
    assert whole.usage.completion_tokens == 13
    (first, *_) = whole.choices[0].logprobs.content
    assert (first.bytes, len(first.top_logprobs)) == ([72], 2)
    assert whole.timings["predicted_n"] == 13
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage.total_tokens == 17


FUNCTIONS: list[Any] = [
    {"type": "function", "name": "weather", "description": "Weather of a city", "strict": True,
     "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
                    "additionalProperties": False}},
]  # fmt: skip
SAYS = 'Let me see. <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
KNOWS_TOOLS = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}{{ message.content }}{% endfor %}"
)


@asynccontextmanager
async def calling() -> AsyncIterator[tuple[dict[str, Any], FakeEngine]]:
    """Return the settings of a strict client, for a model that calls a function."""
    app, engine = make_server(next_token=saying(SAYS), **LONG)
    app.state.quire.supervisor.front_end.chat_template = KNOWS_TOOLS
    async with listening(app) as url:
        yield {"base_url": url + "/v1", "api_key": "any", "_strict_response_validation": True}, engine


def check_call(output: list[Any]) -> None:
    message, call = output
    assert message.content[0].text == "Let me see."
    assert (call.type, call.name, call.arguments, call.status) == (
        "function_call", "weather", '{"city": "Rome"}', "completed",
    )  # fmt: skip


@in_loop
async def test_openai_responses_with_functions() -> None:
    def use(client: openai.OpenAI) -> Any:
        asked: Any = {"model": MODEL, "tools": FUNCTIONS, "tool_choice": "auto"}
        first = client.responses.create(input="How is Rome?", **asked)
        result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "sunny"}
        again = client.responses.create(
            input=[{"role": "user", "content": "How is Rome?"}, *first.output, result], **asked
        )
        with client.responses.create(input="hi", stream=True, **asked) as stream:
            events = list(stream)
        with client.responses.stream(input="hi", **asked) as helper:
            kinds = [event.type for event in helper]
            final = helper.get_final_response()
        return first, again, events, kinds, final

    async with calling() as (settings, engine):
        with openai.OpenAI(**settings) as client:
            first, again, events, kinds, final = await asyncio.to_thread(use, client)
    for response in (first, again, events[-1].response, final):
        check_call(response.output)
        assert (response.tools[0].name, response.tool_choice) == ("weather", "auto")
    assert "response.function_call_arguments.done" in kinds
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == '{"city": "Rome"}'
    said = bytes(token for token in engine.submitted[1].prompt_token_ids if token < 256).decode()
    assert said.endswith("userHow is Rome?assistantLet me see.toolsunny")


@in_loop
async def test_openai_errors_have_their_classes_and_fields() -> None:
    def use(client: openai.OpenAI) -> Any:
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="other", messages=MESSAGES)
        return bad.value, missing.value

    bad, missing = await with_openai(use)
    assert (bad.param, bad.code) == ("temperature", "invalid_parameter")
    assert (missing.param, missing.code) == ("model", "model_not_found")


@in_loop
async def test_openai_sees_an_error_in_a_stream() -> None:
    async with serving() as (url, engine):
        engine.executor.in_step = lambda step: engine.die() if step == 4 else None
        async with openai.AsyncOpenAI(base_url=url, api_key="any") as client:
            with pytest.raises(openai.APIError, match="ended unexpectedly"):
                async for _ in await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True):
                    pass


@in_loop
async def test_langchain() -> None:
    chat = pytest.importorskip("langchain_openai", reason="LangChain is not installed").ChatOpenAI
    async with serving() as (url, _):
        model = chat(model=MODEL, base_url=url, api_key="any", temperature=0, max_retries=0)
        answer = await model.ainvoke([("system", "be brief"), ("human", "hi")])
        again = await model.ainvoke([("human", "hi"), answer, ("human", "more")])
        assert answer.content == again.content == TEXT
        assert answer.usage_metadata["output_tokens"] == 13
        chunks = [chunk async for chunk in model.astream("hi")]
        assert "".join(chunk.content for chunk in chunks) == TEXT
        with pytest.raises(openai.BadRequestError):
            await chat(model=MODEL, base_url=url, api_key="any", temperature=5).ainvoke("hi")
