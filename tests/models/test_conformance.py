"""Every architecture on tiny random weights, planned and op by op: Transformers' logits, in all steps and blocks."""

from typing import Any

import pytest
import torch

from quire.models.registry import model_types
from tests.models.harness import Runner, random_tokens
from tests.models.oracle import Pair
from tests.models.tiny_configs import LLAMA, TINY_CONFIGS
from tests.runtime.plan.harness import PlanRunner

TOLERANCE = 1e-4
"""Largest difference from Transformers' logits, relative to the largest logit, in fp32."""
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
    "olmo2: whole tiles": ("olmo2", {**LLAMA, **WIDE}),
    "granite: whole tiles": ("granite", {**TINY_CONFIGS["granite"]["multiples"], **WIDE}),
    "gemma3_text: whole tiles": ("gemma3_text", {**TINY_CONFIGS["gemma3_text"]["two bases"], **WIDE}),
    "opt: whole tiles": ("opt", {**TINY_CONFIGS["opt"]["norm before"], "hidden_size": 64, "ffn_dim": 96}),
}


def has_two_forms(fields: dict[str, Any]) -> bool:
    """True if latent attention takes another form for long chunks than for decodes, which rounds otherwise."""
    return 2 * fields.get("kv_lora_rank", 0) > fields.get("qk_nope_head_dim", 0) + fields.get("v_head_dim", 0)


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {}


@pytest.fixture(params=CONFIGS)
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    if request.param not in pairs:
        pairs[request.param] = Pair(*CONFIGS[request.param])
    return pairs[request.param]


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape
    assert not found.isnan().any()
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("model_type", model_types())
def test_every_model_file_has_tiny_configs(model_type: str) -> None:
    assert TINY_CONFIGS.get(model_type), f"add configs for {model_type} to tests/models/tiny_configs.py"


def test_prompts_whole_and_in_chunks(pair: Pair) -> None:
    prompts = [(random_tokens(length, 53), chunk) for length, chunk in ((1, None), (33, 16), (67, None), (67, 13))]
    expected = [pair.expected(token_ids) for token_ids, _ in prompts]
    for runner in (*pair.runners(scatter=1), pair.runner(block_size=32)):
        for (token_ids, chunk), logits in zip(prompts, expected, strict=True):
            assert_close(runner.run(runner.add(token_ids), chunk), logits)


def test_ragged_steps_of_prompts_chunks_and_decodes(pair: Pair) -> None:
    """Each request of a plan has the bits that it has alone."""
    prompts = [random_tokens(length, 53, seed) for seed, length in enumerate((21, 9, 14, 60, 2))]
    expected = [pair.expected(token_ids) for token_ids in prompts]
    alone = pair.runner(scatter=5)
    for runner in pair.runners():
        streams = [runner.add(token_ids) for token_ids in prompts]
        before = runner.step([(streams[0], 20), (streams[1], 8), (streams[3], 47)])
        mixed = runner.step([(streams[1], 1), (streams[2], 14), (streams[0], 1), (streams[4], 1), (streams[3], 13)])
        after = runner.step([(streams[4], 1)])
        found = [
            torch.cat(parts)
            for parts in (
                [before[0], mixed[2]], [before[1], mixed[0]], [mixed[1]], [before[2], mixed[4]], [mixed[3], after[0]],
            )
        ]  # fmt: skip
        for token_ids, logits, wanted in zip(prompts, found, expected, strict=True):
            assert_close(logits, wanted)
            if isinstance(runner, PlanRunner) and not has_two_forms(pair.hf_config):
                assert torch.equal(logits, alone.run(alone.add(token_ids)))


def test_shared_prefix_blocks_and_blocks_left_behind(pair: Pair) -> None:
    """A shared prefix is not computed again; what a window has left becomes the null block, which holds NaN.

    Recurrent states may enlarge errors with each token: then Transformers' own in fp32 is the measure.
    """
    prefix = random_tokens(32, 53)
    for runner in pair.runners():
        first = runner.add(prefix + random_tokens(5, 53, seed=1))
        runner.step([(first, 32)])
        shared = 32 // runner.block_size
        second = runner.add(prefix + random_tokens(30, 53, seed=2), shares=first, num_shared_blocks=shared)
        runner.run(first)
        found = runner.step([(second, 9)])
        for group, ids in zip(runner.groups, second.block_ids, strict=True):
            if group.spec.window is not None:
                num_left = max(second.num_computed - group.spec.window + 1, 0) // runner.block_size
                ids[:num_left] = [0] * num_left
        found.append(runner.run(second, 1))
        has_state = any(group.spec.is_state for group in runner.groups)
        tolerance = max(TOLERANCE, 2 * pair.error(second.token_ids)) if has_state else TOLERANCE
        assert_close(torch.cat(found), pair.expected(second.token_ids)[32:], tolerance)


def test_plan_is_no_further_from_the_truth_than_op_by_op(pair: Pair) -> None:
    token_ids = random_tokens(67, 53)
    expected = pair.expected(token_ids)

    def run(runner: PlanRunner | Runner) -> torch.Tensor:
        return runner.run(runner.add(token_ids)).float()

    def error(runner: PlanRunner | Runner) -> float:
        """Return the error of most tokens: rounding may choose other experts for some."""
        return float((run(runner) - expected).square().mean(-1).sqrt().median())

    assert_close(run(pair.runner()), run(pair.eager()), 1e-5)
    for dtype in (torch.bfloat16, torch.float16):
        planned = pair.runner(dtype=str(dtype).removeprefix("torch."))
        assert error(planned) <= 2 * error(pair.eager(dtype))
