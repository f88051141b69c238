"""An engine with a draft model: the same outputs as without one, and guesses that are as good as the draft model is."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from quire.drafts import drafting
from quire.drafts.executor_drafts import ExecutorDrafts
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError
from quire.events import EventKind
from quire.sampling_params import SamplingParams
from quire.types import Draft
from tests.engine.test_drafts import GREEDY, PARAMS, outputs_of
from tests.tiny_engine import VOCAB_SIZE, build, prompt, transformers, write_tiny, write_tiny_state_space

PROMPTS = [prompt(3, 61), prompt(4, 9), prompt(5, 33)]


def write_llama(path: Path, **changes: Any) -> Path:
    fields = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3,
    }  # fmt: skip
    return write_tiny(path, transformers.LlamaConfig(**fields | changes))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": write_llama(root / "llama"),
        "other": write_llama(root / "other", hidden_size=32, num_attention_heads=4, num_hidden_layers=2),
    }


@pytest.fixture(autouse=True)
def always_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guess five tokens behind every step, and verify all of them."""
    monkeypatch.setattr(drafting.StepTimes, "seconds", lambda self, num_rows: 1.0)
    monkeypatch.setattr(drafting, "MIN_GAIN", 0.0)
    monkeypatch.setattr(ExecutorDrafts, "choose", lambda *_: 5)
    monkeypatch.setattr("quire.drafts.suffix.SuffixProposer.propose", lambda *_: Draft())


def build_with(model: Path, draft: Path | None, **options: Any) -> LLMEngine:
    source = {} if draft is None else {"draft_model": str(draft)}
    settings = {"block_size": 16, "batch_invariant": True, "speculative": "draft" if draft else "off"}
    return build(model, **settings | source | options)


def drafts_of(engine: LLMEngine) -> tuple[int, int]:
    """Return the draft tokens that were verified so far, and those that were right."""
    steps = [event.data for event in engine.events.of(EventKind.STEP)]
    return sum(step["num_drafts"] for step in steps), sum(step["num_accepted"] for step in steps)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 4},
    "preemption": {"num_blocks_override": 15, "swap_space": 0.0},
    "swap": {"num_blocks_override": 15},
    "int8": {"kv_cache_dtype": "int8"},
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_outputs_are_the_same_with_a_draft_model(models: dict[str, Path], params: SamplingParams) -> None:
    without = outputs_of(build_with(models["llama"], None), PROMPTS, params)
    for name in ("llama", "other"):
        engine = build_with(models["llama"], models[name])
        assert outputs_of(engine, PROMPTS, params) == without
        assert outputs_of(engine, PROMPTS, params) == without, "with prefix hits"
        assert drafts_of(engine)[0] > 0


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_guesses_of_the_model_itself_are_all_right(models: dict[str, Path], settings: dict[str, Any]) -> None:
    # A draft model computes in bfloat16, so the same weights give the same tokens as long as its cache is right.
    without = build_with(models["llama"], None, dtype="bfloat16", **settings)
    engine = build_with(models["llama"], models["llama"], dtype="bfloat16", **settings)
    params = dataclasses.replace(GREEDY, max_tokens=45)
    for _ in range(2):
        before = drafts_of(engine)
        assert outputs_of(engine, PROMPTS, params) == outputs_of(without, PROMPTS, params)
        num_verified, num_right = (now - then for now, then in zip(drafts_of(engine), before, strict=True))
        assert num_right == num_verified
        assert num_right > 5
    if "num_blocks_override" in settings:
        assert list(engine.events.of(EventKind.PREEMPT))


def test_draft_model_catches_up_after_steps_without_guesses(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = iter([0] * 2 + [5] * 3 + [0] * 3 + [5] * 100)
    monkeypatch.setattr(ExecutorDrafts, "choose", lambda *_: next(chosen))
    engine = build_with(models["llama"], models["llama"], dtype="bfloat16", max_num_batched_tokens=64)
    outputs_of(engine, [prompt(7, 200)], dataclasses.replace(GREEDY, max_tokens=100))
    num_verified, num_right = drafts_of(engine)
    assert num_right == num_verified > 30


def test_outputs_are_the_same_on_two_ranks(models: dict[str, Path]) -> None:
    params = PARAMS["drawn"]
    without = outputs_of(build_with(models["llama"], None, tensor_parallel_size=2), PROMPTS, params)
    engine = build_with(models["llama"], models["other"], tensor_parallel_size=2)
    try:
        assert outputs_of(engine, PROMPTS, params) == without
        assert drafts_of(engine)[0] > 0
    finally:
        engine.shutdown()


def test_draft_model_of_a_shorter_context_stops_guessing_at_its_end(models: dict[str, Path], tmp_path: Path) -> None:
    short = write_llama(tmp_path / "short", max_position_embeddings=48)
    engine = build_with(models["llama"], short)
    assert outputs_of(engine, [prompt(5, 33)], GREEDY) == outputs_of(
        build_with(models["llama"], None), [prompt(5, 33)], GREEDY
    )
    assert 0 < drafts_of(engine)[0] <= 15 * 5


def test_wrong_draft_models_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    larger = write_llama(tmp_path / "larger", vocab_size=VOCAB_SIZE + 20)
    with pytest.raises(ConfigError, match=r"vocabulary of 320 tokens, and the model one of 300"):
        build_with(models["llama"], larger)
    with pytest.raises(ConfigError, match="recurrent state"):
        build_with(models["llama"], write_tiny_state_space(tmp_path / "state"))
    with pytest.raises(ConfigError, match="add --draft-model"):
        build_with(models["llama"], None, speculative="draft")
    with pytest.raises(ConfigError, match="contradicts speculative='suffix'"):
        build_with(models["llama"], models["other"], speculative="suffix")
    with pytest.raises(ConfigError, match="one stage"):
        build_with(models["llama"], models["other"], pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="native plan"):
        build_with(models["llama"], models["other"], enforce_eager=True)


def test_draft_model_alone_chooses_its_kind_of_drafts(models: dict[str, Path]) -> None:
    engine = build_with(models["llama"], models["other"], speculative="auto")
    assert engine.config.speculative == "draft"
    plain = build_with(models["llama"], None)
    assert sum(len(group.layer_indices) for group in engine.config.scheduler.kv_cache_groups) == 5
    assert sum(len(group.layer_indices) for group in plain.config.scheduler.kv_cache_groups) == 3
