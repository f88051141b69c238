"""Every architecture on tiny random weights through its plan: Transformers' logits, whatever the steps and blocks."""

from typing import Any

import pytest
import torch
import transformers

from quire.models.registry import model_types
from tests.models.harness import Runner, build_model, random_tokens
from tests.models.tiny_configs import LLAMA, TINY_CONFIGS, full_config
from tests.runtime.plan.harness import PlanRunner, make_checkpoint, make_config

TOLERANCE = 1e-4
"""Largest difference from Transformers' logits, relative to the largest logit, in fp32."""
PROMPT_LEN = 67
WIDE = {"hidden_size": 64, "intermediate_size": 96}
"""Whole tiles and blocks of 32 columns, so that gates are fused and weights can be quantised."""
CONFIGS = {
    f"{model_type}: {name}": (model_type, fields)
    for model_type in model_types()
    for name, fields in TINY_CONFIGS.get(model_type, {}).items()
} | {
    "llama: whole tiles": ("llama", {**LLAMA, **WIDE}),
    "mistral: whole tiles": ("mistral", {**LLAMA, **WIDE, "sliding_window": 20}),
    "qwen3: whole tiles": ("qwen3", {**LLAMA, **WIDE, "head_dim": 32, "tie_word_embeddings": True}),
    "opt: whole tiles": ("opt", {**TINY_CONFIGS["opt"]["norm before"], "hidden_size": 64, "ffn_dim": 96}),
}


class Pair:
    """Transformers' model and its weights as a checkpoint."""

    def __init__(self, name: str) -> None:
        model_type, fields = CONFIGS[name]
        config = transformers.CONFIG_MAPPING[model_type](**fields)
        self.oracle = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        generator = torch.Generator().manual_seed(11)
        for parameter in self.oracle.parameters():
            scale = 1.5 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.data.normal_(float(parameter.ndim == 1), scale, generator=generator)
        self.hf_config = full_config(model_type, fields)
        self.checkpoint = make_checkpoint(self.hf_config, self.oracle.state_dict())

    def runner(self, **options: Any) -> PlanRunner:
        scatter = options.pop("scatter", 0)
        return PlanRunner(make_config(self.hf_config, **options), self.checkpoint, scatter=scatter)

    def expected(self, token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.oracle(torch.tensor([token_ids]), use_cache=False).logits[0]

    def eager(self, token_ids: list[int], dtype: torch.dtype) -> torch.Tensor:
        """Our own model, op by op."""
        runner = Runner(build_model(self.hf_config, self.oracle.state_dict()).to(dtype))
        return runner.run(runner.add(token_ids)).float()


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {}


@pytest.fixture(params=CONFIGS)
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    if request.param not in pairs:
        pairs[request.param] = Pair(request.param)
    return pairs[request.param]


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape
    assert not found.isnan().any()
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("block_size", [16, 32])
def test_prompts_whole_and_in_chunks(pair: Pair, block_size: int) -> None:
    runner = pair.runner(block_size=block_size, scatter=block_size)
    for length, chunk in ((1, None), (2, 1), (33, 16), (PROMPT_LEN, None), (PROMPT_LEN, 13)):
        token_ids = random_tokens(length, 53)
        assert_close(runner.run(runner.add(token_ids), chunk), pair.expected(token_ids))


def test_ragged_steps_of_prompts_chunks_and_decodes(pair: Pair) -> None:
    """And every request has the bits that it has alone."""
    runner = pair.runner()
    lengths = (21, 9, 14, 60, 2)
    streams = [runner.add(random_tokens(length, 53, seed)) for seed, length in enumerate(lengths)]
    before = runner.step([(streams[0], 20), (streams[1], 8), (streams[3], 47)])
    mixed = runner.step([(streams[1], 1), (streams[2], 14), (streams[0], 1), (streams[4], 1), (streams[3], 13)])
    after = runner.step([(streams[4], 1)])
    found = [
        torch.cat(parts)
        for parts in (
            [before[0], mixed[2]], [before[1], mixed[0]], [mixed[1]], [before[2], mixed[4]], [mixed[3], after[0]],
        )
    ]  # fmt: skip
    alone = pair.runner(scatter=5)
    for stream, logits in zip(streams, found, strict=True):
        assert_close(logits, pair.expected(stream.token_ids))
        assert torch.equal(logits, alone.run(alone.add(stream.token_ids)))


def test_shared_prefix_blocks_and_blocks_left_behind(pair: Pair) -> None:
    """A shared prefix is not computed again; what a window has left becomes the null block, which holds NaN."""
    runner = pair.runner()
    prefix = random_tokens(32, 53)
    first = runner.add(prefix + random_tokens(5, 53, seed=1))
    runner.run(first)
    second = runner.add(prefix + random_tokens(30, 53, seed=2), shares=first, num_shared_blocks=2)
    found = runner.step([(second, 9)])
    for group, ids in zip(runner.config.scheduler.kv_cache_groups, second.block_ids, strict=True):
        if group.spec.window is not None:
            num_left = max(second.num_computed - group.spec.window + 1, 0) // runner.block_size
            ids[:num_left] = [0] * num_left
    found.append(runner.run(second, 1))
    assert_close(torch.cat(found), pair.expected(second.token_ids)[32:])


def test_the_plan_is_no_further_from_the_truth_than_eager(pair: Pair) -> None:
    token_ids = random_tokens(PROMPT_LEN, 53)
    expected = pair.expected(token_ids)
    runner = pair.runner()
    found, eager = runner.run(runner.add(token_ids)), pair.eager(token_ids, torch.float32)
    assert_close(found, eager, 1e-5)

    def error(logits: torch.Tensor) -> float:
        return float((logits - expected).square().mean().sqrt())

    bfloat16 = pair.runner(dtype="bfloat16")
    assert error(bfloat16.run(bfloat16.add(token_ids))) <= 2 * error(pair.eager(token_ids, torch.bfloat16))
    float16 = pair.runner(dtype="float16")
    assert error(float16.run(float16.add(token_ids))) <= 2 * error(pair.eager(token_ids, torch.float16))


def test_a_runner_notices_reads_of_memory_never_written(pairs: dict[str, Pair]) -> None:
    """The harness itself: its pool is NaN, so that the tests above would fail."""
    runner = Pair("llama: groups of 2").runner()
    stream = runner.add(random_tokens(20, 53))
    stream.num_computed = 4
    assert runner.run(stream).isnan().any()
