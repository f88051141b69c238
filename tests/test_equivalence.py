"""One request, many ways: however it is scheduled, a request's tokens are the same (fp32, tiny random Llama).

The engine is the real one, from options to outputs; only the scheduler's settings change between runs.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineOptions
from quire.engine.build import build_engine
from quire.engine.llm import LLM
from quire.engine.llm_engine import LLMEngine
from quire.events import EventKind
from quire.sampling_params import BeamSearchParams, SamplingParams

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

VOCAB_SIZE = 300
RUNS = itertools.count()
"""All engines here share one executor, which must never see a request id twice."""
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, top_p=0.95, seed=7, max_tokens=12, ignore_eos=True)


def prompt(number: int, length: int) -> list[int]:
    return [(31 * number + 17 * i + i * i) % VOCAB_SIZE for i in range(length)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> LLMEngine:
    """An engine on a tiny Llama that Transformers wrote to disk."""
    path = tmp_path_factory.mktemp("tiny-llama")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    _write_tokenizer(path)
    options = EngineOptions(
        model=str(path), dtype="float32", device="cpu", block_size=8, num_blocks_override=96, max_num_seqs=16
    )
    return build_engine(options)


def _write_tokenizer(path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"t{i}": i for i in range(VOCAB_SIZE)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0")).save(str(path / "tokenizer.json"))


def engine_with(base: LLMEngine, **settings: Any) -> LLMEngine:
    """A new engine with other scheduler settings on the same model and KV memory."""
    scheduler = dataclasses.replace(base.config.scheduler, **settings)
    config = dataclasses.replace(base.config, scheduler=scheduler)
    return LLMEngine(config, base._executor, base.tokenizer)


def llm_with(base: LLMEngine, **settings: Any) -> LLM:
    """The same as an `LLM`."""
    llm = LLM.from_engine(engine_with(base, **settings))
    llm._ids = itertools.count(1000 * next(RUNS))
    return llm


def tokens_of(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams, *, every: int = 1) -> list[Any]:
    """All tokens of all completions; one prompt joins every `every` steps; blocks are checked after each step."""
    run = next(RUNS)
    waiting = list(enumerate(prompts))
    found: dict[str, list[list[int]]] = {}
    num_steps = 0
    while waiting or engine.has_unfinished_requests():
        if waiting and num_steps % every == 0:
            index, token_ids = waiting.pop(0)
            engine.add_request(f"{run}-{index}", {"prompt_token_ids": token_ids}, params)
        for output in engine.step():
            if output.finished:
                assert not engine.errored, engine.dead_error
                found[output.request_id] = [completion.token_ids for completion in output.outputs]
        engine.scheduler.check_integrity()
        num_steps += 1
    return [found[f"{run}-{index}"] for index in range(len(prompts))]


LENGTHS = (1, 3, 8, 9, 40, 77)
PROMPTS = [prompt(number, length) for number, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=[GREEDY, DRAWN], ids=["greedy", "drawn"])
def case(request: pytest.FixtureRequest, base: LLMEngine) -> tuple[SamplingParams, list[Any]]:
    """Parameters, and the tokens of each prompt run alone, whole and without a prefix cache."""
    alone = [tokens_of(engine_with(base, enable_prefix_caching=False), [p], request.param)[0] for p in PROMPTS]
    assert len({tuple(tokens[0]) for tokens in alone}) == len(PROMPTS), "the model tells the prompts apart"
    return request.param, alone


@pytest.mark.parametrize("chunk", range(1, 65))
def test_chunked_equals_whole(base: LLMEngine, case: tuple[SamplingParams, list[Any]], chunk: int) -> None:
    params, alone = case
    engine = engine_with(base, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 16), enable_prefix_caching=False)
    assert tokens_of(engine, PROMPTS[-2:], params) == alone[-2:]


@pytest.mark.parametrize("every", [1, 2, 5])
def test_batched_equals_alone(base: LLMEngine, case: tuple[SamplingParams, list[Any]], every: int) -> None:
    params, alone = case
    engine = engine_with(base, max_num_batched_tokens=48, enable_prefix_caching=False)
    assert tokens_of(engine, PROMPTS, params, every=every) == alone


def test_prefix_cached_equals_fresh(base: LLMEngine, case: tuple[SamplingParams, list[Any]]) -> None:
    params, alone = case
    engine = engine_with(base)
    assert tokens_of(engine, PROMPTS, params) == alone
    assert tokens_of(engine, PROMPTS, params) == alone
    engine.add_request("hit", {"prompt_token_ids": PROMPTS[-1]}, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].num_cached_tokens == LENGTHS[-1] // 8 * 8


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_preempted_equals_not_preempted(base: LLMEngine, params: SamplingParams) -> None:
    prompts = [prompt(number, 30) for number in range(4)]
    alone = [tokens_of(engine_with(base, enable_prefix_caching=False), [p], params)[0] for p in prompts]
    # Three prompts of 4 blocks are admitted into 13; each grows to 6.
    engine = engine_with(base, num_blocks=14, enable_prefix_caching=False)
    assert tokens_of(engine, prompts, params) == alone
    assert engine.events.of(EventKind.PREEMPT)


@pytest.mark.parametrize("num_blocks", [96, 16])
def test_forked_equals_separate_runs(base: LLMEngine, num_blocks: int) -> None:
    engine = engine_with(base, num_blocks=num_blocks, max_num_seqs=8)
    together = tokens_of(engine, [PROMPTS[4]], dataclasses.replace(DRAWN, n=4))[0]
    separate = [
        tokens_of(engine_with(base), [PROMPTS[4]], dataclasses.replace(DRAWN, seed=7 + index))[0][0]
        for index in range(4)
    ]
    assert together == separate
    assert len({tuple(tokens) for tokens in together}) > 1


def test_forks_share_the_prompts_blocks(base: LLMEngine) -> None:
    engine = engine_with(base)
    engine.add_request("four", {"prompt_token_ids": PROMPTS[5]}, dataclasses.replace(DRAWN, n=4))
    free_before = engine.scheduler._blocks.num_free
    while engine.scheduler.num_running < 4:
        engine.step()
    engine.step()  # each now owns a copy of the partial block, or the block itself
    used = free_before - engine.scheduler._blocks.num_free
    assert used <= -(-LENGTHS[5] // 8) + 3
    engine.abort_request("four")
    engine.step()
    engine.scheduler.check_integrity()
    assert engine.scheduler._blocks.num_free == free_before


@pytest.mark.parametrize("num_blocks", [96, 20])
def test_beam_search_equals_search_without_an_engine(base: LLMEngine, num_blocks: int) -> None:
    """Beams in shared blocks, also when preempted, give the texts of a search that recomputes every beam."""
    width, steps = 3, 6
    llm = llm_with(base, num_blocks=num_blocks, max_num_seqs=8)
    output = llm.beam_search(
        {"prompt_token_ids": PROMPTS[3]}, BeamSearchParams(beam_width=width, max_tokens=steps, ignore_eos=True)
    )[0]
    scorer = llm_with(base)
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(steps):
        grown = []
        for score, tokens in beams:
            params = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * width, ignore_eos=True)
            found = scorer.generate({"prompt_token_ids": PROMPTS[3] + tokens}, params, use_tqdm=False)[0].outputs[0]
            grown += [(score + item.logprob, [*tokens, token]) for token, item in found.logprobs[0].items()]
        beams = sorted(grown, key=lambda beam: -beam[0])[:width]
    assert [beam.token_ids for beam in output.sequences] == [tokens for _, tokens in beams]
    for ours, (score, _) in zip(output.sequences, beams, strict=True):
        assert ours.cumulative_logprob == pytest.approx(score, rel=1e-4)
