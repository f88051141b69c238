"""LiteLLM against a server on a real port. Its pinned versions contradict Quire's, so it has an environment of its own.

`make test` makes that environment and names its interpreter in QUIRE_TEST_CLIENTS; then nothing here can be skipped.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.builders import saying
from tests.server.fake_engine import MODEL, listening, make_server

NAMED = os.environ.get("QUIRE_TEST_CLIENTS")
INTERPRETER = Path(NAMED or Path(sys.prefix) / "clients" / "bin" / "python")
CALLS = Path(__file__).with_name("litellm_calls.py")
LIMIT_S = 120
TEXT = "Hello wörld"
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
LONG = {"num_blocks": 2000, "max_model_len": 2048, "max_num_batched_tokens": 2048}


async def call_with_litellm() -> subprocess.CompletedProcess[str]:
    talking, _ = make_server(next_token=saying(TEXT))
    calling, _ = make_server(next_token=saying(CALL), **LONG)
    async with listening(talking) as url, listening(calling) as tools_url:
        command = [str(INTERPRETER), str(CALLS), url + "/v1", MODEL, tools_url + "/v1"]
        return await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """Of all calls: importing LiteLLM takes seconds."""
    if not (NAMED or INTERPRETER.exists()):
        pytest.skip("LiteLLM has no environment here: `make test` sets it up")
    done = asyncio.run(call_with_litellm())
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_blocking(answers: dict[str, Any]) -> None:
    found = answers["blocking"]
    assert (found["text"], found["finish_reason"], found["num_tokens"]) == (TEXT[:5], "length", 5)
    assert (found["streamed"], found["streamed_num_tokens"]) == (TEXT, 13)


def test_async(answers: dict[str, Any]) -> None:
    assert answers["async"] == {"text": TEXT, "streamed": TEXT}


def test_errors_have_its_classes(answers: dict[str, Any]) -> None:
    assert "temperature" in answers["blocking"]["refusal"]
    assert "other" in answers["blocking"]["unknown_model"]
    assert "maximum context length" in answers["blocking"]["overflow"]


def test_tools(answers: dict[str, Any]) -> None:
    call = ["weather", {"city": "Rome"}]
    assert answers["tools"] == {"whole": [call], "streamed": [call]}


def test_embeddings(answers: dict[str, Any]) -> None:
    assert answers["embedding"] == [[2, 98], [3, 122]]
