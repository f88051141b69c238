"""Sessions of agents, which send their whole history each turn, in every kind of cache: each turn finds the one before.

`test_kv_tiers.py` has sessions that go on after a restart.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.cache_spec import CHECKPOINT_INTERVALS
from quire.engine.llm_engine import LLMEngine
from quire.sampling_params import SamplingParams
from tests.engine.builders import finals, run
from tests.tiny_engine import VOCAB_SIZE, build, transformers, write_tiny

SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "max_position_embeddings": 16384, "initializer_range": 0.3,
}  # fmt: skip
LEN_SYSTEM, NUM_TURNS, LEN_ANSWER = 5000, 12, 30


def dense() -> Any:
    return transformers.LlamaConfig(**SIZES, num_hidden_layers=2, num_key_value_heads=2)


def windows() -> Any:
    return transformers.Gemma3TextConfig(
        **SIZES, num_hidden_layers=2, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, sliding_window=128,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip


def all_windows() -> Any:
    return transformers.MistralConfig(
        **SIZES, num_hidden_layers=2, num_key_value_heads=2, head_dim=16, sliding_window=128
    )


def linear_attention() -> Any:
    return transformers.Qwen3NextConfig(
        **SIZES, num_hidden_layers=2, num_key_value_heads=2, head_dim=16, bos_token_id=1, eos_token_id=2,
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16, mlp_only_layers=[0, 1],
    )  # fmt: skip


def convolutions() -> Any:
    return transformers.Lfm2Config(
        **SIZES, num_hidden_layers=2, num_key_value_heads=2, layer_types=["conv", "full_attention"]
    )


def state_space() -> Any:
    return transformers.Mamba2Config(
        vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16, n_groups=2, state_size=16,
        initializer_range=0.3, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


CONFIGS: dict[str, Callable[[], Any]] = {
    "dense": dense, "windows": windows, "all windows": all_windows, "linear attention": linear_attention,
    "convolutions": convolutions, "state space": state_space,
}  # fmt: skip


@pytest.fixture(scope="module", params=CONFIGS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    model = write_tiny(tmp_path_factory.mktemp("model"), CONFIGS[request.param]())
    engine = build(model, max_model_len=8192, num_blocks_override=600, num_threads=2)
    yield engine
    engine.shutdown()


def tokens(name: str, count: int) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


def ask(engine: LLMEngine, prompt: list[int], max_tokens: int = LEN_ANSWER) -> tuple[list[int], int]:
    """Return the answer, and the prompt tokens that were cached."""
    engine.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    output = finals(run(engine))["a"]
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def interval_of(engine: LLMEngine) -> int | None:
    """Return the tokens between two checkpoints of recurrent states; None without states."""
    return engine.scheduler.blocks.checkpoints._interval


def kept(engine: LLMEngine, num_computed: int) -> int:
    """Return how many of the computed tokens of an earlier turn the next one must find."""
    interval, block_size = interval_of(engine), engine.config.scheduler.block_size
    if interval is None:
        return num_computed // block_size * block_size
    return num_computed // interval * interval


def test_each_turn_finds_the_turn_before(engine: LLMEngine) -> None:
    block_size, interval = engine.config.scheduler.block_size, interval_of(engine)
    prompt = tokens("system", LEN_SYSTEM)
    num_missed = []
    answer, _ = ask(engine, prompt)
    for turn in range(1, NUM_TURNS):
        of_prompt = (len(prompt) - 1) // block_size * block_size
        if interval is not None and of_prompt % interval < CHECKPOINT_INTERVALS[0]:
            of_prompt -= of_prompt % interval  # so near behind a checkpoint no other one is made
        history = prompt + answer
        prompt = history + tokens(f"question {turn}", 20 + 7 * turn % 40)
        answer, num_cached = ask(engine, prompt)
        # The last token of an answer is sampled and never computed.
        assert num_cached >= max(of_prompt, kept(engine, len(history) - 1))
        num_missed.append(len(prompt) - num_cached)
    # That is 98 % of a session that begins with 20,000 tokens.
    assert sum(num_missed) / len(num_missed) <= 0.02 * 20_000


def test_checkpoints_within_a_long_answer_are_found(engine: LLMEngine) -> None:
    prompt = tokens("essay", 3 * (interval_of(engine) or 256) - 20)
    answer, _ = ask(engine, prompt, 60)
    _, num_cached = ask(engine, prompt + answer + tokens("and?", 10))
    assert num_cached >= kept(engine, len(prompt) + 59)


def test_changed_date_costs_only_what_follows_it(engine: LLMEngine) -> None:
    before, after = tokens("rules", 2100), tokens("tools", 1500)
    ask(engine, [*before, 11, 12, *after])
    changed = [*before, 13, 12, *after]
    answer, num_cached = ask(engine, changed)
    assert num_cached == kept(engine, len(before))
    _, num_cached = ask(engine, changed + answer + tokens("next", 10))
    assert num_cached >= kept(engine, len(changed))


def test_sessions_with_the_same_system_text_share_it(engine: LLMEngine) -> None:
    system = tokens("shared system", 3000)
    ask(engine, system + tokens("a", 300))
    assert ask(engine, system + tokens("b", 300))[1] == kept(engine, len(system))
