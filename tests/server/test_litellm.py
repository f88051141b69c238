"""LiteLLM, unchanged, in an environment of its own: `clients/running.py`."""

import pytest

from tests.server.clients.running import ASKS, TURNS, Used, use, weather_agent

TEXT = "Hello wörld"


@pytest.fixture(scope="module")
def used() -> Used:
    return use("openai2", "litellm_loop.py", lambda prompt: TEXT if "[user]hi" in prompt else weather_agent(prompt))


def test_answers_whole_and_streamed_and_a_refusal(used: Used) -> None:
    *found, refusal = used.found[0]
    assert found == [TEXT[:5], "length", 5, TEXT]
    assert "temperature" in refusal


def test_agent_loop_sends_litellms_own_keys_back(used: Used) -> None:
    loops = used.found[1]
    assert {provider: [way["answer"] for way in ways] for provider, ways in loops.items()} == dict.fromkeys(
        ("openai", "hosted_vllm", "anthropic"), ["It is sunny."] * 2
    )
    assert {"provider_specific_fields", "reasoning_content", "tool_calls"} <= {*loops["openai"][0]["keys"]}
    assert "thinking_blocks" in loops["anthropic"][0]["keys"]
    prompts = [prompt for prompt in used.prompts if "How is Rome?" in prompt]
    said = TURNS.format(ASKS.replace(". <", ".<"), "<think>Fine.</think>It is sunny.")
    assert prompts[3::4] == [said] * 6
