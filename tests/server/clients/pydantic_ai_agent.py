"""An agent of pydantic-ai over three APIs: a loop with a tool in three turns, streamed too, and structured output."""

import asyncio
import json
import sys
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    """A city."""

    city: str


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


FORMS: dict[str, Any] = {"tool": ToolOutput(City), "native": NativeOutput(City), "prompted": PromptedOutput(City)}


async def use(model: Any, modes: list[str]) -> dict[str, Any]:
    """Return the texts of three turns, the kinds of events of the last one, and the results of `modes`."""
    agent = Agent(model, instructions="Be brief.", tools=[weather])
    first = await agent.run("How is Rome?")
    second = await agent.run("And now?", message_history=first.all_messages())
    kinds: set[str] = set()

    async def watch(_: Any, events: Any) -> None:
        kinds.update([event.event_kind async for event in events])

    third = await agent.run("Once more?", message_history=second.all_messages(), event_stream_handler=watch)
    cities = []
    for mode in modes:
        form = Agent(model, output_type=FORMS[mode])
        result = await form.run(f"FORM {mode}")
        again = await form.run(f"FORM {mode}", message_history=result.all_messages())
        cities += [result.output.city, again.output.city]
    return {"texts": [first.output, second.output, third.output], "kinds": sorted(kinds), "cities": cities}


async def main(url: str, model: str) -> list[dict[str, Any]]:
    """Use the three APIs."""
    openai = OpenAIProvider(base_url=url + "/v1", api_key="any")
    anthropic = AnthropicProvider(base_url=url, api_key="any")
    return [
        await use(OpenAIChatModel(model, provider=openai), [*FORMS]),
        await use(OpenAIResponsesModel(model, provider=openai), [*FORMS]),
        # It knows by their names which of Anthropic's models have native output.
        await use(AnthropicModel(model, provider=anthropic), ["tool", "prompted"]),
    ]


print(json.dumps(asyncio.run(main(**json.loads(sys.argv[1])))))
