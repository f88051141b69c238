"""Libraries and tools of users that run agents, unchanged, against a server on a real port: they run in environments
of their own, see `clients/running.py`.
"""

import json
import re

import pytest

from tests.server.clients.running import ASKS, call, run, scripted, weather_agent
from tests.server.fake_engine import in_loop

OPENAI3 = "openai3"


def forms(prompt: str) -> str:
    """Return the answer of an agent that also fills in forms."""
    last = prompt[prompt.rindex("[user]") :]
    if "FORM" not in last:
        return weather_agent(prompt)
    return call("final_result", city="Rome") if "FORM tool" in last else '{"city": "Rome"}'


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_pydantic_ai(api: str) -> None:
    @in_loop
    async def check() -> None:
        async with scripted(forms) as model:
            found = await run(OPENAI3, "pydantic_ai_agent.py", api=api, url=model.url, model=model.model)
            said = model.conversation(5)
        print(found, said)
        assert found["outputs"] == ["It is sunny."] * 3

    check()


def filled_in(prompt: str) -> str:
    """Return the answer to instructor's request: a call of its only tool, or JSON."""
    city = {"city": "Ulm" if "taken" in prompt else "Rome"}
    named = re.match(r'Call .*?"name": "(\w+)"', prompt)
    if named is None:
        return json.dumps(city)
    return call(named[1], **({"tasks": [city, city]} if named[1] == "IterableCity" else city))


@in_loop
async def test_instructor() -> None:
    async with scripted(filled_in) as model:
        found = await run("openai2", "instructor_models.py", url=model.url, model=model.model)
    for f in found: print(f)


@in_loop
async def test_llm() -> None:
    async with scripted(forms) as model:
        found = await run("openai3", "llm_cli.py", url=model.url, model=model.model)
        for i in range(len(model.engine.submitted)): print("P", i, model.conversation(i))
    for f in found: print(repr(f))
