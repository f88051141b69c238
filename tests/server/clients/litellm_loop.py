"""LiteLLM: an answer whole and streamed, a refusal, and an agent's loop that sends its own messages back."""

import json
import sys
from typing import Any

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "weather", "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}  # fmt: skip


def answers(given: dict[str, Any]) -> list[Any]:
    """Return what a whole and a streamed answer have, and the message of a refusal."""
    asked = {**given, "messages": [{"role": "user", "content": "hi"}]}
    whole = litellm.completion(**asked, max_tokens=5)
    chunks = list(litellm.completion(**asked, stream=True))
    try:
        litellm.completion(**asked, temperature=7)
    except litellm.BadRequestError as error:
        refusal = str(error)
    return [
        whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage.completion_tokens,
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), refusal,
    ]  # fmt: skip


def loop(given: dict[str, Any], *, streams: bool, whole: bool) -> dict[str, Any]:
    """Return the last answer of two turns with a tool. `whole`: messages are sent back with keys that are null."""
    turns: list[Any] = []
    keys: set[str] = set()
    for question in ("How is Rome?", "And now?"):
        turns.append({"role": "user", "content": question})
        for _ in range(2):
            asked = {**given, "messages": turns, "tools": [TOOL]}
            if streams:
                answer: Any = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
            else:
                answer = litellm.completion(**asked)
            message = answer.choices[0].message
            sent = message.model_dump(exclude_none=not whole)
            keys.update(key for key, value in sent.items() if value is not None)
            turns.append(sent)
            for call in message.tool_calls or ():
                city = json.loads(call.function.arguments)["city"]
                turns.append(
                    {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": f"sunny in {city}"}
                )
    return {"answer": turns[-1]["content"], "keys": sorted(keys)}


def main(url: str, model: str) -> Any:
    """Use LiteLLM's providers for OpenAI's API, vLLM and Anthropic's API."""
    given = {"api_key": "any", "max_retries": 0}
    providers = {"openai": url + "/v1", "hosted_vllm": url + "/v1", "anthropic": url}
    loops = {
        provider: [
            loop({**given, "model": f"{provider}/{model}", "api_base": base}, streams=streams, whole=streams)
            for streams in (False, True)
        ]
        for provider, base in providers.items()
    }
    return answers({**given, "model": f"openai/{model}", "api_base": url + "/v1"}), loops


print(json.dumps(main(**json.loads(sys.argv[1]))))
