"""A smoke test of LiteLLM. Its pinned versions contradict Quire's, so it has an environment of its own.

`make test` makes that environment and names its interpreter in QUIRE_TEST_CLIENTS; then nothing here can be skipped.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.builders import saying
from tests.server.fake_engine import MESSAGES, MODEL, in_loop, listening, make_server

NAMED = os.environ.get("QUIRE_TEST_CLIENTS")
INTERPRETER = Path(NAMED or Path(sys.prefix) / "clients" / "bin" / "python")
TEXT = "Hello wörld"
CALLS = """
import json, litellm, sys
given = json.loads(sys.argv[1])
whole = litellm.completion(**given, max_tokens=5)
chunks = list(litellm.completion(**given, stream=True))
try:
    litellm.completion(**given, temperature=7)
except litellm.BadRequestError as error:
    refusal = str(error)
print(json.dumps([
    whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage.completion_tokens,
    "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), refusal,
]))
"""
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
"""Else its table of prices and its tokenizer are fetched."""


@in_loop
async def test_answers_whole_and_streamed_and_a_refusal() -> None:
    if not (NAMED or INTERPRETER.exists()):
        pytest.skip("LiteLLM has no environment here: `make test` sets it up")
    app, _ = make_server(next_token=saying(TEXT))
    async with listening(app) as url:
        given = {"model": f"openai/{MODEL}", "api_base": url + "/v1", "api_key": "any", "messages": MESSAGES}
        command = [str(INTERPRETER), "-c", CALLS, json.dumps({**given, "max_retries": 0})]
        settings = {"capture_output": True, "text": True, "check": False, "env": {**os.environ, **OFFLINE}}
        done = await asyncio.to_thread(subprocess.run, command, **settings)
    assert done.returncode == 0, done.stderr
    *found, refusal = json.loads(done.stdout.splitlines()[-1])
    assert found == [TEXT[:5], "length", 5, TEXT]
    assert "temperature" in refusal
