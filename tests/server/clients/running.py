"""Clients as processes of environments of their own, against a server whose model is a function of the prompt.

`make test` makes these environments and names their folder in QUIRE_TEST_CLIENTS; then nothing can be skipped. The
scripts of this folder run in them: they get JSON as their argument, and print JSON as their last line.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.builders import EOS, NextToken
from tests.server.fake_engine import MODEL, listening, make_server, use_template

NAMED = os.environ.get("QUIRE_TEST_CLIENTS")
FOLDER = Path(NAMED or Path(sys.prefix) / "clients")
SCRIPTS = Path(__file__).parent
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
"""Else LiteLLM's table of prices and its tokenizer are fetched."""
LIMIT_S = 300.0
"""A client's imports take seconds, and more beside other tests."""
START = "import gc, runpy, sys; gc.disable(); runpy.run_path(sys.argv.pop(1), run_name='__main__')"
"""Runs a script: looking for garbage would be a sixth of the time of a client's imports, which make none."""
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


@dataclass(frozen=True, slots=True)
class Used:
    """Result of a script, and the prompts of its requests from their first user on."""

    found: Any
    prompts: list[str]


ASKS = "<think>Where?</think>Let me see. " + call("weather", city="Rome")
ANSWERS = "<think>Fine.</think>It is sunny."
_TURN = "{0}[tool]sunny in Rome[assistant]"
TURNS = f"[user]How is Rome?[assistant]{_TURN}{{1}}[user]And now?[assistant]{_TURN}"
"""The conversation before the last answer, with the text of calls and that of an answer."""


def weather_agent(prompt: str) -> str:
    """Return the answer of a model that calls a tool, and answers after its result."""
    return ANSWERS if "[tool]" in prompt[prompt.rindex("[user]") :] else ASKS


def text_of(token_ids: Any) -> str:
    """Return tokens of bytes as text."""
    return bytes(token for token in token_ids if token < 256).decode()


def scripted(reply: Callable[[str], str]) -> NextToken:
    """Answer each prompt with `reply(prompt)`."""
    replies: dict[tuple[int, ...], bytes] = {}

    def next_token(known: list[int], num_prompt_tokens: int, seed: int) -> int:
        prompt = tuple(known[:num_prompt_tokens])
        if prompt not in replies:
            replies[prompt] = reply(text_of(prompt)).encode()
        position = len(known) - num_prompt_tokens
        return replies[prompt][position] if position < len(replies[prompt]) else EOS

    return next_token


def use(environment: str, script: str, reply: Callable[[str], str] = weather_agent, **given: Any) -> Used:
    """Run a script of this folder against a model that answers each prompt with `reply(prompt)`.

    It gets `url` and `model`. Skips where the environment does not exist.
    """
    python = FOLDER / environment / "bin" / "python"
    if not (NAMED or python.exists()):
        pytest.skip(f"{python} does not exist: `make test` sets it up")

    async def work() -> Used:
        app, engine = make_server(next_token=scripted(reply), **LONG)
        use_template(app, TEMPLATE)
        async with listening(app) as url:
            asked = json.dumps({"url": url, "model": MODEL, **given})
            command = [str(python), "-I", "-c", START, str(SCRIPTS / script), asked]
            settings: Any = {"capture_output": True, "text": True, "check": False, "env": {**os.environ, **OFFLINE}}
            done = await asyncio.to_thread(subprocess.run, command, timeout=LIMIT_S, **settings)
        assert done.returncode == 0, done.stderr
        prompts = [text_of(request.prompt_token_ids) for request in engine.submitted]
        return Used(json.loads(done.stdout.splitlines()[-1]), [prompt[prompt.index("[user]") :] for prompt in prompts])

    return asyncio.run(work())
