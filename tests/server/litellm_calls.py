"""Calls that `test_litellm.py` makes with LiteLLM, in an interpreter that has it: no other import, JSON to stdout.

    python litellm_calls.py URL MODEL TOOLS_URL

Each call is one entry of the object; TOOLS_URL is a server with a model that calls the tool.
"""

import asyncio
import json
import os
import sys
from typing import Any

# Its table of prices and its tokenizer would be fetched.
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}

import litellm

MESSAGES = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


def settings(url: str, model: str) -> dict[str, Any]:
    return {"model": f"openai/{model}", "api_base": url, "api_key": "any", "messages": MESSAGES, "max_retries": 0}


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def blocking(given: dict[str, Any]) -> dict[str, Any]:
    whole = litellm.completion(**given, max_tokens=5)
    chunks = list(litellm.completion(**given, stream=True, stream_options={"include_usage": True}))
    found: dict[str, Any] = {
        "text": whole.choices[0].message.content,
        "finish_reason": whole.choices[0].finish_reason,
        "num_tokens": whole.usage.completion_tokens,
        "streamed": text_of(chunks),
        "streamed_num_tokens": chunks[-1].usage.completion_tokens,
    }
    try:
        litellm.completion(**given, temperature=7)
    except litellm.BadRequestError as error:
        found["refusal"] = str(error)
    try:
        litellm.completion(**{**given, "messages": [{"role": "user", "content": "x" * 300}]})
    except litellm.ContextWindowExceededError as error:
        found["overflow"] = str(error)
    try:
        litellm.completion(**{**given, "model": "openai/other"})
    except litellm.NotFoundError as error:
        found["unknown_model"] = str(error)
    return found


async def in_loop(given: dict[str, Any]) -> dict[str, Any]:
    whole = await litellm.acompletion(**given)
    chunks = [chunk async for chunk in await litellm.acompletion(**given, stream=True)]
    return {"text": whole.choices[0].message.content, "streamed": text_of(chunks)}


def tools(given: dict[str, Any]) -> dict[str, Any]:
    asked = {**given, "tools": [WEATHER], "tool_choice": "required"}
    whole = litellm.completion(**asked)
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    return {
        name: [
            (call.function.name, json.loads(call.function.arguments)) for call in answer.choices[0].message.tool_calls
        ]
        for name, answer in (("whole", whole), ("streamed", streamed))
    }


def embedding(given: dict[str, Any]) -> list[list[float]]:
    answer = litellm.embedding(
        model=given["model"], api_base=given["api_base"], api_key="any", input=["ab", "xyz"], encoding_format="float"
    )
    return [item["embedding"] for item in answer.data]


if __name__ == "__main__":
    url, model, tools_url = sys.argv[1:]
    given = settings(url, model)
    done = {"blocking": blocking(given), "async": asyncio.run(in_loop(given)), "embedding": embedding(given)}
    print(json.dumps({**done, "tools": tools(settings(tools_url, model))}))
