"""OpenAI's client and LangChain, unchanged, against a server on a real port.

LiteLLM has a file of its own: `test_litellm.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.engine.builders import saying
from tests.server.fake_engine import MESSAGES, MODEL, FakeEngine, in_loop, listening, make_server, use_template

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
        )
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
AGENT = (
    "{% if tools %}Call <tool_call></tool_call> with one of {{ tools|tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function|tojson }}</tool_call>"
    "{% endfor %}{% endfor %}[assistant]"
)


@asynccontextmanager
async def calling() -> AsyncIterator[tuple[dict[str, Any], FakeEngine]]:
    """Return the settings of a strict client, for a model that calls a function."""
    app, engine = make_server(next_token=saying(SAYS), **LONG)
    use_template(app, AGENT)
    async with listening(app) as url:
        yield {"base_url": url + "/v1", "api_key": "any", "_strict_response_validation": True}, engine


def conversation(engine: FakeEngine, index: int) -> str:
    """Return the prompt of a request from its first user on."""
    prompt = bytes(token for token in engine.submitted[index].prompt_token_ids if token < 256).decode()
    return prompt[prompt.index("[user]") :]


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
    call = SAYS.replace(". <", ".<")
    assert conversation(engine, 1) == f"[user]How is Rome?[assistant]{call}[tool]sunny[assistant]"


# --- Answers sent back ------------------------------------------------------------------------


class Weather(BaseModel):
    """Weather of a city."""

    city: str


ASKED = '<tool_call>{"name": "Weather", "arguments": {"city": "Rome"}}</tool_call>'
TURNS: list[Any] = [{"role": "user", "content": "How is Rome?"}]


@asynccontextmanager
async def agents(asks: str, answers: str) -> AsyncIterator[tuple[dict[str, Any], FakeEngine]]:
    """Return the settings of a strict client. The model says `answers` if the prompt has a result, else `asks`."""

    def next_token(known: list[int], num_prompt_tokens: int, seed: int) -> int:
        prompt = bytes(token for token in known[:num_prompt_tokens] if token < 256)
        return saying(answers if b"[tool]" in prompt else asks)(known, num_prompt_tokens, seed)

    app, engine = make_server(next_token=next_token, **LONG)
    use_template(app, AGENT)
    async with listening(app) as url:
        yield {"base_url": url + "/v1", "api_key": "any", "_strict_response_validation": True}, engine


def result_of(call: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.id, "content": "sunny"}


@in_loop
async def test_openai_parsed_messages_can_be_sent_back() -> None:
    def use(client: openai.OpenAI) -> Any:
        tools = [openai.pydantic_function_tool(Weather)]
        parsed = client.chat.completions.parse(model=MODEL, messages=TURNS, tools=tools).choices[0].message
        with client.chat.completions.stream(model=MODEL, messages=TURNS, tools=tools) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices[0].message
        turns = [*TURNS]
        for message in (parsed, streamed):
            (call,) = message.tool_calls
            assert call.function.parsed_arguments == Weather(city="Rome")
            turns += [message, result_of(call)]
        plain = client.chat.completions.create(model=MODEL, messages=turns, tools=tools).choices[0].message
        form = {"messages": [*turns, plain, *TURNS], "response_format": Weather}
        typed = client.chat.completions.parse(model=MODEL, **form).choices[0].message
        assert typed.parsed == Weather(city="Rome")
        return client.chat.completions.create(model=MODEL, messages=[*turns, plain, *TURNS, typed, *TURNS])

    async with agents(ASKED, '{"city": "Rome"}') as (settings, engine):
        with openai.OpenAI(**settings) as client:
            await asyncio.to_thread(use, client)
    call = f"[assistant]{ASKED}[tool]sunny"
    said = f"[user]How is Rome?{call}{call}[assistant]" + '{"city": "Rome"}'
    assert (
        conversation(engine, -1)
        == f'{said}[user]How is Rome?[assistant]{{"city": "Rome"}}[user]How is Rome?[assistant]'
    )


@in_loop
async def test_openai_output_of_responses_can_be_sent_back_with_its_reasoning() -> None:
    def use(client: openai.OpenAI) -> Any:
        turns: list[Any] = [*TURNS]
        tool = openai.pydantic_function_tool(Weather)["function"]
        tools: list[Any] = [{"type": "function", **tool}]
        first = client.responses.create(model=MODEL, input=turns, tools=tools, reasoning={"effort": "low"})
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        turns += first.output
        turns.append({"type": "function_call_output", "call_id": first.output[2].call_id, "output": "sunny"})
        second = client.responses.create(model=MODEL, input=turns, tools=tools)
        assert second.output_text == "It is sunny."
        turns += [*second.output, *TURNS]
        parsed = client.responses.parse(model=MODEL, input=turns, tools=tools)
        turns += [*parsed.output, *TURNS]
        plain = [item.to_dict() if isinstance(item, BaseModel) else item for item in turns]
        for sent in (turns, plain):
            client.responses.create(model=MODEL, input=sent, tools=tools)

    asks, answers = f"<think>\nWhere?\n</think>\n\nLet me see. {ASKED}", "<think>\nFine.\n</think>\n\nIt is sunny."
    async with agents(asks, answers) as (settings, engine):
        with openai.OpenAI(**settings) as client:
            await asyncio.to_thread(use, client)
    question = "[user]How is Rome?"
    call = f"[assistant]<think>Where?</think>Let me see.{ASKED}[tool]sunny"
    answer = "[assistant]<think>Fine.</think>It is sunny."
    said = f"{question}{call}{answer}{question}{answer}{question}[assistant]"
    assert conversation(engine, -1) == conversation(engine, -2) == said


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


def langchain_chat() -> Any:
    return pytest.importorskip("langchain_openai", reason="LangChain is not installed").ChatOpenAI


@in_loop
async def test_langchain() -> None:
    chat = langchain_chat()
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


@pytest.mark.parametrize("settings", [{}, {"use_responses_api": True, "output_version": "responses/v1"}], ids=str)
def test_langchains_agent_loop(settings: dict[str, Any]) -> None:
    chat = langchain_chat()
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage

    @in_loop
    async def loop() -> None:
        async with agents(f"<think>Where?</think>{ASKED}", "<think>Fine.</think>It is sunny.") as (known, engine):
            model = chat(model=MODEL, base_url=known["base_url"], api_key="any", max_retries=0, **settings)
            model = model.bind_tools([Weather])
            turns: list[Any] = [SystemMessage([{"type": "text", "text": "Be brief."}]), HumanMessage("How is Rome?")]
            for _ in range(2):
                turns.append(await model.ainvoke(turns))
                for call in turns[-1].tool_calls:
                    assert call["args"] == {"city": "Rome"}
                    turns.append(ToolMessage("sunny", tool_call_id=call["id"], name=call["name"]))
            assert (len(turns), turns[-1].text) == (5, "It is sunny.")
            turns.append(HumanMessage("Thanks."))
            await model.ainvoke(turns)
            said = conversation(engine, -1)
        assert "[tool]sunny[assistant]" in said
        assert said.endswith("It is sunny.[user]Thanks.[assistant]")

    loop()
