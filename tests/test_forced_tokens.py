"""Tokens that a grammar forces, taken several at once: the real SmolLM2 gives the same bits with drafts and without."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.llm import LLM
from quire.events import EventKind
from quire.sampling_params import SamplingParams
from quire.structured_outputs import ReasoningSpan, StructuredOutputsParams
from quire_lessons.compare.speculation import json_tasks

pytestmark = pytest.mark.model
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4, "max_model_len": 512, "batch_invariant": True, "enable_prefix_caching": False,
}  # fmt: skip
TASKS = json_tasks()[:3]
THINKING = ReasoningSpan(start="<think>", end="</think>", is_open=True, budget=6, closing="\nNow the data.\n</think>\n")
PLAIN = SamplingParams(temperature=0, max_tokens=64)
DRAWN = dataclasses.replace(PLAIN, temperature=1.0, top_p=0.95, seed=5)
CASES: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
    "greedy": (PLAIN, {}),
    "seeded": (DRAWN, {}),
    "compact": (PLAIN, {"disable_any_whitespace": True}),
    "penalties": (dataclasses.replace(DRAWN, repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.3), {}),
    "logprobs": (dataclasses.replace(PLAIN, logprobs=2), {}),
    "several answers": (dataclasses.replace(DRAWN, n=3), {}),
    "stop string in a key": (dataclasses.replace(PLAIN, stop=["_of"]), {}),
    "tokens end in a key": (dataclasses.replace(PLAIN, max_tokens=8), {}),
    "no token of a key": (dataclasses.replace(PLAIN, bad_words=["_", "name"]), {}),
    "biased": (dataclasses.replace(PLAIN, logit_bias={29: 30.0}), {}),
    "reasoning": (PLAIN, {"reasoning": THINKING}),
}


@pytest.fixture(scope="module")
def all_expected(smollm2_path: Path) -> dict[str, list[Any]]:
    """The answers of all cases without drafts, computed in one batch."""
    with LLM("smollm2", speculative="off", **OPTIONS | {"max_num_seqs": 64}) as llm:
        found = iter(answers(llm, CASES.values()))
    return {name: list(itertools.islice(found, len(TASKS))) for name in CASES}


@pytest.fixture(scope="module", params=[512, 8], ids=["enough blocks", "preempted"])
def llm(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[LLM]:
    """An engine with drafts; in few blocks requests preempt one another."""
    options = OPTIONS | {"num_blocks_override": request.param, "max_model_len": min(512, 32 * request.param - 64)}
    with LLM("smollm2", speculative="suffix", **options) as llm:
        # No matter what this machine makes of a row: forced tokens are to be verified.
        times = llm.llm_engine._drafting._times
        times.note(1, 1.0)
        times.note(100, 1.0)
        times.note = lambda num_rows, seconds: None  # type: ignore[method-assign]
        yield llm


def answers(llm: LLM, cases: Iterable[tuple[SamplingParams, dict[str, Any]]]) -> list[Any]:
    """Return the completions of each task, of one case after the other."""
    jobs = [
        (asked + "\n", dataclasses.replace(params, structured_outputs=StructuredOutputsParams(json=schema, **fields)))
        for params, fields in cases
        for asked, schema in TASKS
    ]
    return [
        [(item.token_ids, item.text, item.finish_reason, item.stop_reason, item.logprobs) for item in output.outputs]
        for output in llm.generate(*map(list, zip(*jobs, strict=True)), use_tqdm=False)
    ]


CROWDED = {"greedy", "several answers", "reasoning"}


@pytest.mark.parametrize("name", CASES)
def test_answers_are_the_same_with_forced_tokens_and_without(
    llm: LLM, all_expected: dict[str, list[Any]], name: str
) -> None:
    is_crowded = llm.llm_engine.scheduler.config.num_blocks == 8
    if is_crowded and name not in CROWDED:
        pytest.skip("three cases are enough to preempt")
    events, expected = llm.llm_engine.events, all_expected[name]
    seen = events.num_recorded
    assert answers(llm, [CASES[name]]) == expected
    kinds = [event.kind for event in events.since(seen)]
    assert (EventKind.PREEMPT in kinds) == is_crowded
    steps = [event.data for event in events.since(seen) if event.kind is EventKind.STEP]
    assert sum(step["num_accepted"] for step in steps) >= 3
    assert all(finish_reason != "error" for items in expected for _, _, finish_reason, *_ in items)


def test_forced_key_takes_one_step(llm: LLM) -> None:
    seen = llm.llm_engine.events.num_recorded
    spec = StructuredOutputsParams(choice=["the quick brown fox jumps over the lazy dog", "yes"])
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=spec, logit_bias={1195: 100.0})
    llm.generate(["Say it.\n"], params, use_tqdm=False)
    steps = [event.data for event in llm.llm_engine.events.since(seen) if event.kind is EventKind.STEP]
    num_tokens = len(llm.get_tokenizer().encode("the quick brown fox jumps over the lazy dog"))
    assert max(step["num_accepted"] for step in steps) >= num_tokens - 2
