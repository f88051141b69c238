"""Structured outputs of the real SmolLM2, alone, batched, preempted, forked and cut; oracles are json and re."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.llm import LLM
from quire.sampling_params import SamplingParams
from quire.structured_outputs import ReasoningSpan, StructuredOutputsParams

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


@pytest.mark.parametrize("name", SPECS)
def test_greedy_and_drawn_texts_follow_the_constraint(llm: LLM, name: str) -> None:
    spec, is_good = SPECS[name]
    drawn = [SamplingParams(max_tokens=300, temperature=1, seed=seed, structured_outputs=spec) for seed in range(7)]
    params = [SamplingParams(max_tokens=200, temperature=0, structured_outputs=spec), *drawn]
    found = [output.outputs[0] for output in llm.generate([PROMPT] * 8, params, use_tqdm=False)]
    assert [item.finish_reason for item in found] == ["stop"] * 8
    assert [item.text for item in found if not is_good(item.text)] == []
    assert len({item.text for item in found[1:]}) > 1


# --- Reasoning before the text ----------------------------------------------------------------

CLOSING = "\nI must answer now.\n</think>\n\n"
LONG_PROMPT = "Think about a person in many words, then describe them as JSON.\n<think>\n"


def span(budget: int | None, closing: str = "", *, is_open: bool = True) -> ReasoningSpan:
    return ReasoningSpan(start="<think>", end="</think>", is_open=is_open, budget=budget, closing=closing)


@pytest.mark.parametrize("closing", ["", CLOSING])
def test_reasoning_ends_at_its_budget_and_the_answer_follows_the_schema(llm: LLM, closing: str) -> None:
    spec = Spec(json=PERSON, reasoning=span(16, closing))
    params = [
        SamplingParams(max_tokens=300, temperature=temperature, seed=seed, structured_outputs=spec)
        for seed, temperature in enumerate([0, 1, 1, 1])
    ]
    found = [output.outputs[0] for output in llm.generate([LONG_PROMPT] * 4, params, use_tqdm=False)]
    tokenizer = llm.get_tokenizer()
    for item in found:
        reasoning, marker, answer = item.text.partition(closing or "</think>")
        assert marker
        assert is_person(answer)
        assert len(answer) - len(answer.lstrip("\n")) <= 2
        num_tokens = next(count for count in range(300) if marker in tokenizer.decode(item.token_ids[:count])) - len(
            tokenizer.encode(marker, add_special_tokens=False)
        )
        assert num_tokens <= 16
        assert tokenizer.decode(item.token_ids[:num_tokens]) == reasoning
    assert [item.finish_reason for item in found] == ["stop"] * 4


def test_budget_does_not_change_reasoning_before_it(llm: LLM) -> None:
    free = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    (plain,) = llm.generate([LONG_PROMPT], free, use_tqdm=False)
    for budget in (0, 1, 20):
        limited = SamplingParams(
            max_tokens=24, temperature=0, ignore_eos=True, structured_outputs=Spec(reasoning=span(budget, CLOSING))
        )
        (found,) = llm.generate([LONG_PROMPT], limited, use_tqdm=False)
        closing = llm.get_tokenizer().encode(CLOSING, add_special_tokens=False)
        expected = plain.outputs[0].token_ids[:budget] + closing
        assert found.outputs[0].token_ids[: len(expected)] == expected[:24]


@pytest.mark.parametrize("bias", [20.0, -20.0])
def test_text_begins_with_reasoning_or_with_the_answer(llm: LLM, bias: float) -> None:
    spec = Spec(json=PERSON, reasoning=span(8, is_open=False))
    (less_than,) = llm.get_tokenizer().encode("<", add_special_tokens=False)
    params = [
        SamplingParams(max_tokens=300, temperature=1, seed=seed, structured_outputs=spec, logit_bias={less_than: bias})
        for seed in range(4)
    ]
    texts = [output.outputs[0].text for output in llm.generate([PROMPT] * 4, params, use_tqdm=False)]
    assert [text.startswith("<think>") for text in texts] == [bias > 0] * 4
    assert all(is_person(text.partition("</think>")[2] if bias > 0 else text) for text in texts)
