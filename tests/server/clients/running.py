"""Clients as processes of environments of their own, against a server whose model is a function of the prompt.

`make test` makes these environments and names their folder in QUIRE_TEST_CLIENTS; then nothing can be skipped. The
scripts of this folder run in them: they get JSON as their argument, and print JSON as their last line.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.builders import EOS
from tests.server.fake_engine import FakeEngine, listening, make_server, use_template

NAMED = os.environ.get("QUIRE_TEST_CLIENTS")
FOLDER = Path(NAMED or Path(sys.prefix) / "clients")
SCRIPTS = Path(__file__).parent
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
"""Else LiteLLM's table of prices and its tokenizer are fetched."""
LONG = {"num_blocks": 4000, "max_model_len": 8192, "max_num_batched_tokens": 8192}
TEMPLATE = (
    "{% if tools %}Call <tool_call></tool_call> with one of {{ tools|tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function|tojson }}</tool_call>"
    "{% endfor %}{% endfor %}[assistant]"
)


def call(name: str, **arguments: Any) -> str:
    """Return the text of a call in the format of `TEMPLATE`."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


ASKS = "<think>Where?</think>Let me see. " + call("weather", city="Rome")
ANSWERS = "<think>Fine.</think>It is sunny."


def weather_agent(prompt: str) -> str:
    """Return the answer of a model that calls a tool, and answers after its result."""
    return ANSWERS if "[tool]" in prompt[prompt.rindex("[user]") :] else ASKS


class ScriptedModel:
    """A server whose model answers each prompt with `reply(prompt)`."""

    def __init__(self, url: str, engine: FakeEngine, model: str) -> None:
        self.url = url
        self.engine = engine
        self.model = model

    def conversation(self, index: int = -1) -> str:
        """Return the prompt of a request from its first user on."""
        prompt = text_of(self.engine.submitted[index].prompt_token_ids)
        return prompt[prompt.index("[user]") :]


def text_of(token_ids: Any) -> str:
    """Return tokens of bytes as text."""
    return bytes(token for token in token_ids if token < 256).decode()


@contextlib.asynccontextmanager
async def scripted(reply: Callable[[str], str] = weather_agent) -> AsyncIterator[ScriptedModel]:
    """Serve a scripted model on a free port."""
    replies: dict[tuple[int, ...], bytes] = {}

    def next_token(known: list[int], num_prompt_tokens: int, seed: int) -> int:
        prompt = tuple(known[:num_prompt_tokens])
        if prompt not in replies:
            replies[prompt] = reply(text_of(prompt)).encode()
        position = len(known) - num_prompt_tokens
        return replies[prompt][position] if position < len(replies[prompt]) else EOS

    app, engine = make_server(next_token=next_token, **LONG)
    use_template(app, TEMPLATE)
    async with listening(app) as url:
        yield ScriptedModel(url, engine, app.state.quire.model_name)


def interpreter(environment: str) -> Path:
    """Return the Python of an environment. Skips where there is none."""
    path = FOLDER / environment / "bin" / "python"
    if not (NAMED or path.exists()):
        pytest.skip(f"there is no {path} here: `make test` sets it up")
    return path


async def run(environment: str, script: str, **given: Any) -> Any:
    """Run a script of this folder. Returns: what it prints."""
    command = [str(interpreter(environment)), str(SCRIPTS / script), json.dumps(given)]
    settings = {"capture_output": True, "text": True, "check": False, "env": {**os.environ, **OFFLINE}}
    done = await asyncio.to_thread(subprocess.run, command, **settings)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
