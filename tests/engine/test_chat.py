"""Chats of `LLM` and `AsyncLLM`: tools, reasoning and constraints, by the same code as the server's."""

import json
from typing import Any

import pytest

from quire.engine.async_llm import AsyncLLM
from quire.engine.llm import LLM
from quire.errors import ChatTemplateError, InvalidParameterError, RequestError
from quire.outputs import ChatCompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams
from quire.structured_outputs import StructuredOutputsParams
from tests.engine.async_builders import played
from tests.engine.builders import ScriptedExecutor, make_engine, saying

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather of a city"}}]
CALL = '{"name": "weather", "arguments": {"city": "Ulm"}}'
ASK = [{"role": "user", "content": "hi"}]
THINKS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ reasoning_effort }}<think>\n"
LONG = {"num_blocks": 1000, "max_model_len": 1024, "max_num_batched_tokens": 1024}
PARAMS = SamplingParams(max_tokens=100)


def chat(text: str, messages: list[Any] = ASK, params: SamplingParams = PARAMS, **options: Any) -> RequestOutput:
    engine, _ = make_engine(saying(text), **LONG)
    (output,) = LLM.from_engine(engine).chat(messages, params, use_tqdm=False, **options)
    return output


def message(output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    assert isinstance(completion, ChatCompletionOutput)
    return completion.message


def test_tools_are_described_and_calls_are_read() -> None:
    output = chat(CALL, tools=TOOLS)
    assert "Weather of a city" in (output.prompt or "")
    (call,) = message(output)["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Ulm"})
    assert output.outputs[0].text == CALL
    history = [*ASK, message(output), {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
    assert "sunny" in (chat("Fine.", history, tools=TOOLS).prompt or "")


def test_plain_answer_is_a_message() -> None:
    assert message(chat("Fine.")) == {"role": "assistant", "content": "Fine."}


def test_reasoning_is_apart_and_its_effort_reaches_the_template() -> None:
    output = chat("Hm.</think>\n\nFour.", chat_template=THINKS, reasoning_effort="high")
    assert (output.prompt or "").endswith("high<think>")
    assert (message(output)["reasoning"], message(output)["content"]) == ("Hm.", "Four.")


def test_constraint_begins_after_the_reasoning() -> None:
    engine, _ = make_engine(saying("Hm.</think>{}"), **LONG)
    asked: list[SamplingParams] = []
    generate = LLM.generate

    def spy(self: LLM, prompts: Any, params: Any, **options: Any) -> Any:
        asked.extend(params)
        return generate(self, prompts, params, **options)

    llm = LLM.from_engine(engine)
    llm.generate = spy.__get__(llm)  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(json_object=True))
    llm.chat(ASK, params, use_tqdm=False, chat_template=THINKS, reasoning_budget=8)
    (sent,) = asked
    assert sent.structured_outputs is not None
    assert sent.structured_outputs.json_object
    span = sent.structured_outputs.reasoning
    assert span is not None
    assert (span.is_open, span.end, span.budget) == (True, "</think>", 8)


def test_demanded_tool_binds_the_answer() -> None:
    with pytest.raises(InvalidParameterError, match="tool_choice"):
        chat("x", tools=TOOLS, tool_choice="sometimes")
    output = chat(f"[{CALL}]", tools=TOOLS, tool_choice="required")
    assert len(message(output)["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("messages", "options", "error"),
    [
        ([{"role": "user", "content": 3}], {}, ChatTemplateError),
        (ASK, {"continue_final_message": True}, RequestError),
        (ASK, {"chat_template": "rag"}, ChatTemplateError),
        (ASK, {"chat_template_kwargs": {"tools": 1}}, RequestError),
        (ASK, {"tools": [{"type": "function"}]}, InvalidParameterError),
        (ASK, {"tools": "weather"}, InvalidParameterError),
    ],
)
def test_mistakes_are_found_before_anything_runs(messages: Any, options: dict[str, Any], error: type) -> None:
    engine, executor = make_engine(saying("x"), **LONG)
    with pytest.raises(error):
        LLM.from_engine(engine).chat(messages, use_tqdm=False, **options)
    assert executor.num_steps == 0


@played(saying("Hm.</think>Four."), **LONG, multi_step_decode=1)
async def test_messages_of_a_stream_grow(llm: AsyncLLM, executor: ScriptedExecutor) -> None:
    found = [message(item) async for item in llm.chat(ASK, PARAMS, chat_template=THINKS)]
    assert (found[-1]["reasoning"], found[-1]["content"]) == ("Hm.", "Four.")
    contents = [item["content"] for item in found]
    assert contents == sorted(contents)


@played(saying(CALL), **LONG, multi_step_decode=1)
async def test_call_of_a_stream_is_no_content_before_it_is_complete(llm: AsyncLLM, executor: ScriptedExecutor) -> None:
    found = [message(item) async for item in llm.chat(ASK, PARAMS, tools=TOOLS)]
    assert not any(item["content"] for item in found)
    assert "tool_calls" in found[-1]
