"""Libraries and commands that people run agents with, unchanged, against a server on a real port.

They run in environments of their own: `clients/running.py`.
"""

import json
import re

from tests.server.clients.running import ASKS, TURNS, call, use, weather_agent

ANSWER = "It is sunny."
CALLS = ASKS.replace(". <", ".<")
"""As it comes back: text loses the blanks before a call."""


def forms(prompt: str) -> str:
    """Return the answer of an agent that also fills in forms."""
    last = prompt[prompt.rindex("[user]") :]
    if "FORM" not in last:
        return weather_agent(prompt)
    return call("final_result", city="Rome") if "FORM tool" in last else '{"city": "Rome"}'


def filled_in(prompt: str) -> str:
    """Return the answer to instructor's request: a call of its only tool, or JSON."""
    city = {"city": "Ulm" if "taken" in prompt else "Rome"}
    named = re.match(r'Call .*?"name": "(\w+)"', prompt)
    found = {"tasks": [city, city]} if "Which cities?" in prompt else city
    return json.dumps(found) if named is None else call(named[1], **found)


def test_pydantic_ai_over_chat_responses_and_messages() -> None:
    used = use("openai3", "pydantic_ai_agent.py", forms)
    for found, modes in zip(used.found, (3, 3, 2), strict=True):
        assert found["texts"] == [ANSWER] * 3
        assert {"function_tool_call", "function_tool_result", "part_delta", "final_result"} <= {*found["kinds"]}
        assert found["cities"] == ["Rome"] * 2 * modes
    said = TURNS.format(CALLS, f"<think>Fine.</think>{ANSWER}")
    assert [prompt for prompt in used.prompts if prompt == said] == [said] * 3


def test_instructor_in_its_modes() -> None:
    used = use("openai2", "instructor_models.py", filled_in)
    assert len(used.found) == 5
    for mode, found in used.found.items():
        assert found == ["Rome", "Rome", ["Rome", "Rome"], "Ulm"], mode


def test_llm_command_over_chat_and_responses() -> None:
    used = use("openai3", "llm_cli.py", forms)
    for whole, streamed, called, continued, chatted, form in used.found:
        assert whole == streamed == ASKS.replace("<think>Where?</think>", "")
        assert called == continued == f"Let me see. {ANSWER}"
        assert f"\n{called}\n" in chatted
        assert json.loads(form) == {"city": "Rome"}
    said = TURNS.format(CALLS, ANSWER).replace("<think>Where?</think>", "")
    assert [prompt for prompt in used.prompts if prompt == said] == [said] * 2
