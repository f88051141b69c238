"""Structured outputs of the real SmolLM2, alone, batched, preempted, forked and cut; oracles are json and re."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.llm import LLM
from quire.events import EventKind
from quire.outputs import CompletionOutput
from quire.sampling_params import SamplingParams
from quire.structured_outputs import StructuredOutputsParams
from quire.text.tool_calls.formats import GENERIC, uses_tools
from quire.text.tool_calls.parser import ContentDelta, ToolArgumentsDelta, ToolCallParser, ToolCallStart
from quire.text.tool_calls.requests import tool_choice_schema, tool_names, tools_system_prompt

pytestmark = pytest.mark.model
Spec = StructuredOutputsParams
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["happy", "sad", None]},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
CHOICES = ["red", "green", "dark blue", "naïve"]
PROMPT = "Describe a person as JSON.\n"


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        {"name", "age", "mood"} <= set(value) <= {"name", "age", "mood", "friends"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and value["mood"] in ("happy", "sad", None)
        and all(isinstance(name, str) and len(name) <= 8 for name in value.get("friends", []))
        and len(value.get("friends", [])) <= 2
    )


SPECS: dict[str, tuple[StructuredOutputsParams, Any]] = {
    "schema": (Spec(json=PERSON), is_person),
    "compact schema": (Spec(json=PERSON, disable_any_whitespace=True), is_person),
    "regex": (Spec(regex=DATE), lambda text: re.fullmatch(DATE, text)),
    "choice": (Spec(choice=CHOICES), lambda text: text in CHOICES),
    "grammar": (
        Spec(grammar='root ::= "[" item ("," item){0,3} "]"\nitem ::= [a-z]{1,5}'),
        lambda text: re.fullmatch(r"\[[a-z]{1,5}(,[a-z]{1,5}){0,3}\]", text),
    ),
}


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    llm = LLM("smollm2", max_num_seqs=8, max_model_len=512, num_blocks_override=128, batch_invariant=True)
    yield llm
    llm.llm_engine.shutdown()


def completions(llm: LLM, spec: StructuredOutputsParams | None, *prompts: str, **fields: Any) -> list[CompletionOutput]:
    params = SamplingParams(**{"max_tokens": 200, "temperature": 0, "structured_outputs": spec, **fields})
    outputs = llm.generate(list(prompts) or [PROMPT], params, use_tqdm=False)
    return [completion for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("name", SPECS)
def test_greedy_and_drawn_texts_follow_the_constraint(llm: LLM, name: str) -> None:
    spec, is_good = SPECS[name]
    drawn = [SamplingParams(max_tokens=300, temperature=1, seed=seed, structured_outputs=spec) for seed in range(7)]
    params = [SamplingParams(max_tokens=200, temperature=0, structured_outputs=spec), *drawn]
    found = [output.outputs[0] for output in llm.generate([PROMPT] * 8, params, use_tqdm=False)]
    assert [item.finish_reason for item in found] == ["stop"] * 8
    assert [item.text for item in found if not is_good(item.text)] == []
    assert len({item.text for item in found[1:]}) > 1


DRAWN = {"temperature": 1, "seed": 4}


def test_batched_and_preempted_requests_have_the_same_tokens_as_alone(llm: LLM) -> None:
    prompts = [PROMPT, "A list:\n", "Once upon a time there was a king who had a son.\n", "{", "1, 2, 3"]
    spec = SPECS["schema"][0]
    fields: list[dict[str, Any]] = [{"temperature": 0}, DRAWN, {"temperature": 0}, DRAWN, DRAWN]
    params = [SamplingParams(max_tokens=200, structured_outputs=spec, **some) for some in fields]
    alone = [
        llm.generate([text], some, use_tqdm=False)[0].outputs[0] for text, some in zip(prompts, params, strict=True)
    ]
    (plain,) = completions(llm, None, "Hello", max_tokens=40)
    # Rows with and without a grammar in the same steps.
    mixed = llm.generate([*prompts, "Hello"], [*params, SamplingParams(max_tokens=40, temperature=0)], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in mixed[:-1]] == [item.token_ids for item in alone]
    assert mixed[-1].outputs[0].token_ids == plain.token_ids
    assert all(is_person(item.text) for item in alone)
    few = {"block_size": 16, "num_blocks_override": 17, "max_model_len": 256, "enable_prefix_caching": False}
    crowded = LLM("smollm2", max_num_seqs=8, batch_invariant=True, **few)
    preempted = [output.outputs[0] for output in crowded.generate(prompts * 2, params * 2, use_tqdm=False)]
    assert crowded.llm_engine.events.of(EventKind.PREEMPT)
    crowded.llm_engine.shutdown()
    assert [item.token_ids for item in preempted] == [item.token_ids for item in alone] * 2


def test_required_tool_is_called(llm: LLM) -> None:
    """The chat template has no tools: the system message describes them, and the schema forces a call."""
    city = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tools = [
        {"type": "function", "function": {"name": "get_weather", "description": "Weather now", "parameters": city}},
        {"type": "function", "function": {"name": "get_time"}},
    ]
    assert not uses_tools(llm.get_tokenizer().chat_template)
    schema = tool_choice_schema(tools, "required", parallel_tool_calls=False)
    params = SamplingParams(max_tokens=100, temperature=0, structured_outputs=Spec(json=schema))
    messages = [
        {"role": "system", "content": tools_system_prompt(tools)},
        {"role": "user", "content": "What is the weather in Paris?"},
    ]
    text = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
    parser = ToolCallParser(GENERIC, tool_names=tool_names(tools))
    start, *deltas = [*parser.feed(text), *parser.finish()]
    assert isinstance(start, ToolCallStart)
    assert start.name in tool_names(tools)
    arguments = json.loads("".join(delta.text for delta in deltas if isinstance(delta, ToolArgumentsDelta)))
    assert isinstance(arguments["city"], str) if start.name == "get_weather" else arguments == {}
    assert not any(isinstance(delta, ContentDelta) for delta in deltas)
