"""`quire serve` with the real model in its own process: served answers are those of `LLM` in this one."""

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from quire import LLM, SamplingParams
from tests.server.serving import serving

pytestmark = pytest.mark.model
MODEL = "tiny"
QUESTIONS = ["Why is the sky blue?", "Name three colours.", "Écris une phrase en français. 🙂"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=2)


@pytest.fixture(scope="module")
def client(smollm2_path: Path) -> Iterator[openai.OpenAI]:
    with serving(smollm2_path, "--batch-invariant") as server:
        server.wait_until("/health/ready", 200)
        yield openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0, _strict_response_validation=True)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM(smollm2_path, max_model_len=1024, batch_invariant=True)


def test_chat_whole_and_streamed(client: openai.OpenAI, llm: LLM) -> None:
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        (expected,) = llm.chat(messages, GREEDY)
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=24, logprobs=True, top_logprobs=2
        )
        assert answer.choices[0].message.content == expected.outputs[0].text
        assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
        logprobs = answer.choices[0].logprobs.content
        assert sum(entry.logprob for entry in logprobs) == pytest.approx(expected.outputs[0].cumulative_logprob)
        assert (
            b"".join(bytes(entry.bytes) for entry in logprobs)
            .decode(errors="ignore")
            .startswith(expected.outputs[0].text[:20])
        )
        stream = client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=24, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected.outputs[0].text


def test_responses_and_a_schema(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.chat([{"role": "user", "content": QUESTIONS[1]}], GREEDY)
    answer = client.responses.create(model=MODEL, input=QUESTIONS[1], temperature=0, max_output_tokens=24)
    assert answer.output_text == expected.outputs[0].text
    schema = {
        "type": "object",
        "properties": {"colours": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3}},
        "required": ["colours"],
        "additionalProperties": False,
    }
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTIONS[1]}],
        max_tokens=200,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "colours", "schema": schema}},
    )
    assert set(json.loads(chat.choices[0].message.content)["colours"]) <= {"red", "blue"}
