"""An engine that drafts by itself, on a tiny Llama: the same outputs as without drafts, in fewer steps."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.drafts import drafting
from quire.engine.llm_engine import LLMEngine
from quire.events import EventKind
from quire.sampling_params import SamplingParams
from quire.structured_outputs import StructuredOutputsParams
from tests.scheduler.integrity import check_integrity
from tests.tiny_engine import VOCAB_SIZE, build, prompt, write_tiny_llama, write_tiny_state_space

GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=2)
BIAS = np.linspace(0, 0.01, VOCAB_SIZE)
PARAMS = {
    "greedy": GREEDY,
    "drawn": dataclasses.replace(GREEDY, temperature=0.05, seed=5),
    "penalties": dataclasses.replace(GREEDY, repetition_penalty=1.05, frequency_penalty=0.1),
    "grammar": dataclasses.replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="(ab|cd){30}")),
    "dry": dataclasses.replace(GREEDY, dry_multiplier=0.02, dry_base=1.1),
    "mirostat": dataclasses.replace(GREEDY, temperature=0.05, mirostat=2, mirostat_tau=0.2, seed=5),
    "xtc": dataclasses.replace(GREEDY, temperature=0.05, xtc_probability=0.1, dynatemp_range=0.02, seed=5),
    "processor": dataclasses.replace(
        GREEDY, logits_processors=[lambda token_ids, logits: logits - len(token_ids) * BIAS]
    ),
    "several": dataclasses.replace(GREEDY, n=2, temperature=0.1, seed=9),
    "stop": dataclasses.replace(GREEDY, stop=["zq"]),
    "length": dataclasses.replace(GREEDY, max_tokens=45),
}
PROMPTS = [prompt(3, 20) * 3 + prompt(3, 7), prompt(4, 9) * 4]
RUNS = itertools.count()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LLMEngine]:
    directory = write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
    return {mode: build(directory, block_size=16, speculative=mode, batch_invariant=True) for mode in ("off", "auto")}


@pytest.fixture
def free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each step take equally long: every draft is verified."""
    monkeypatch.setattr(drafting.StepTimes, "seconds", lambda self, num_rows: 1.0)
    monkeypatch.setattr(drafting, "MIN_GAIN", 0.0)


def outputs_of(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    run = next(RUNS)
    for index, token_ids in enumerate(prompts):
        engine.add_request(f"{run}-{index}", {"prompt_token_ids": token_ids}, params)
    found: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = [
                    (item.token_ids, item.logprobs, item.text, item.finish_reason) for item in output.outputs
                ]
        check_integrity(engine.scheduler)
    return [found[f"{run}-{index}"] for index in range(len(prompts))]


def counts(engine: LLMEngine) -> tuple[int, int, int]:
    """Return the steps, the draft tokens and the accepted ones so far."""
    steps = [event.data for event in engine.events.of(EventKind.STEP)]
    return len(steps), sum(step["num_drafts"] for step in steps), sum(step["num_accepted"] for step in steps)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_outputs_are_the_same_with_drafts(
    engines: dict[str, LLMEngine], free_rows: None, params: SamplingParams
) -> None:
    without = outputs_of(engines["off"], PROMPTS, params)
    assert outputs_of(engines["auto"], PROMPTS, params) == without
    _, drafts_before, accepted_before = counts(engines["auto"])
    assert outputs_of(engines["auto"], PROMPTS, params) == without, "with drafts from the answers before"
    _, num_drafts, num_accepted = counts(engines["auto"])
    assert num_accepted > accepted_before
    assert num_drafts > drafts_before
    assert counts(engines["off"])[1] == 0


def test_answer_given_before_is_accepted_whole(engines: dict[str, LLMEngine], free_rows: None) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=100)
    first = outputs_of(engines["auto"], [prompt(8, 12)], params)
    before = counts(engines["auto"])
    assert outputs_of(engines["auto"], [prompt(8, 12)], params) == first
    num_steps, _, num_accepted = (now - then for now, then in zip(counts(engines["auto"]), before, strict=True))
    assert num_accepted > 80
    assert num_steps < 20


def test_engine_drafts_only_where_answers_stay_the_same(tmp_path: Path, engines: dict[str, LLMEngine]) -> None:
    assert engines["auto"].config.speculative == "suffix"
    assert engines["off"].config.speculative == "off"
    with_state = build(write_tiny_state_space(tmp_path / "state"), block_size=16)
    assert with_state.config.speculative == "off"
    assert "recurrent" in next(item.reason for item in with_state.config.decisions if item.name == "speculative")
    op_by_op = build(write_tiny_llama(tmp_path / "llama"), block_size=8, enforce_eager=True)
    assert op_by_op.config.speculative == "off"
