"""Checks of programs about one row of a model: the mask of a chunk, and the tokens that sampling keeps.

What is right is found by running the engine: its attention is read off a model, its sampler is drawn from.
Next to read: `programs.py`, the tasks.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.engine.llm_engine import LLMEngine
from quire.outputs import RequestOutput
from quire.sampling.native import NativeRowSampler
from quire.sampling.state import SamplingState
from quire.sampling_params import SamplingParams
from quire.types import NewRequest
from quire_lessons.compare.results import RunSettings
from quire_lessons.compare.rig import Rig, SharedExecutor
from quire_lessons.learn.exercise import Wrong
from quire_lessons.learn.program import LearnerProgram, require_numbers, shown

MASK_CASES = ((0, 5), (6, 3), (9, 1), (4, 6))
"""Cached and new tokens of chunks."""
NUM_DRAWS = 4000
"""Draws after which a token of probability 0.05 is still missing once in 10^89 times."""
NUM_REPORTED = 5
MODEL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": True, "rope_theta": 10000.0,
}  # fmt: skip
Row = list[tuple[int, int, float]]
"""Rank, id and log-probability of the likeliest next tokens."""


def engine_mask(num_tokens: int) -> list[list[bool]]:
    """Find which positions each token of a prompt attends to, by running a model of one layer with random weights.

    The token at position j is changed: rows whose likeliest next tokens change attend to it.
    """
    rig = Rig(
        RunSettings(),
        "random weights",
        lambda *_: None,
        MODEL,
        load_format="dummy",
        dtype="float32",
        max_num_seqs=1,
        max_model_len=64,
        block_size=16,
        num_blocks_override=8,
    )
    try:
        prompts = [[at + 32 * (at == changed) for at in range(num_tokens)] for changed in range(-1, num_tokens)]
        usual, *others = [_likeliest(rig, prompt) for prompt in prompts]
        return [[other[row] != usual[row] for other in others] for row in range(num_tokens)]
    finally:
        rig.executor.shutdown()


_serial = itertools.count()


def _likeliest(rig: Rig, prompt: list[int]) -> list[Row]:
    """Return the likeliest next tokens behind each token of a prompt."""
    engine = LLMEngine(rig.config, SharedExecutor(rig.executor))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=NUM_REPORTED, ignore_eos=True)
    # A row's tokens are reported with the token behind it, so the last row needs one too.
    engine.add_request(f"mask-{next(_serial)}", {"prompt_token_ids": [*prompt, 0]}, params)
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    output = outputs[-1]
    assert isinstance(output, RequestOutput)
    # The token behind it is reported too, whatever its rank.
    return [
        sorted(
            (item.rank, token_id, item.logprob)
            for token_id, item in row.items()
            if item.rank is not None and item.rank <= NUM_REPORTED
        )
        for row in (output.prompt_logprobs or [])
        if row is not None
    ]


def check_mask(program: LearnerProgram) -> None:
    """Compare the mask of chunks with the positions that the engine's attention reads."""
    truth = engine_mask(max(sum(case) for case in MASK_CASES))
    for num_cached, num_new in MASK_CASES:
        rows, case = program.call("mask", num_cached, num_new), f"mask({num_cached}, {num_new})"
        if not hasattr(rows, "__len__") or len(rows) != num_new:
            raise Wrong(
                f"{case} must have {num_new} rows, one per new token; it returns {shown(rows)}.",
                f"{case} 应有 {num_new} 行，每个新 token 一行，却返回 {shown(rows)}。",
            )
        for at, row in enumerate(rows):
            values = require_numbers(row, f"{case} [{at}]", num_cached + num_new)
            for position, value in enumerate(values):
                if bool(value) != truth[num_cached + at][position]:
                    raise _wrong_cell(f"{case} [{at}]", num_cached + at, position, is_read=not value)


def _wrong_cell(case: str, own: int, position: int, *, is_read: bool) -> Wrong:
    if is_read:
        return Wrong(
            f"{case} is the token at position {own}. The engine reads position {position} for it, this mask hides it: a"
            " token attends to itself and to all earlier positions, cached or not.",
            f"{case} 是位置 {own} 的 token。引擎为它读位置 {position}，这个掩码却遮住了：token 关注自己和之前的所有"
            "位置，无论是否来自缓存。",
        )
    return Wrong(
        f"{case} is the token at position {own}. The engine does not read position {position} for it, this mask lets"
        " it:"
        " no token attends to a later one.",
        f"{case} 是位置 {own} 的 token。引擎不为它读位置 {position}，这个掩码却放行：token 看不到排在后面的 token。",
    )


USUAL = (0.40, 0.30, 0.15, 0.10, 0.05)
KEEP_CASES: tuple[tuple[tuple[float, ...], float, float, str, str], ...] = (
    (USUAL, 0.9, 0.0, "the token that crosses top_p stays", "跨过 top_p 的那个 token 保留"),
    ((0.05, 0.30, 0.10, 0.40, 0.15), 0.8, 0.0, "the likeliest tokens count, wherever they stand",
                                               "看概率大小，不看排列位置"),
    (USUAL, 1.0, 0.3, "min_p is relative to the likeliest token", "min_p 是相对于最可能的 token 的"),
    (USUAL, 0.01, 0.0, "the likeliest token always stays", "最可能的 token 总要保留"),
    (USUAL, 0.8, 0.3, "min_p comes first, and top_p refers to what it leaves", "先 min_p，top_p 作用于剩下的"),
    ((0.25, 0.25, 0.25, 0.25), 0.5, 0.0, "of equal tokens the lower ids come first", "概率相等时 id 小的在前"),
    (USUAL, 1.0, 0.0, "nothing is dropped", "什么都不丢"),
)  # fmt: skip
"""Probabilities, top_p, min_p, and the rule that decides."""


def drawn_tokens(probabilities: Sequence[float], top_p: float, min_p: float) -> list[int]:
    """Return every token that the engine's sampler draws in `NUM_DRAWS` draws from these probabilities."""
    params = SamplingParams(top_p=top_p, min_p=min_p, max_tokens=None)
    sampler, states = NativeRowSampler(len(probabilities)), []
    for seed in range(NUM_DRAWS):
        states.append(SamplingState(NewRequest(str(seed), (0,), 1, params, None, (), seed), params, len(probabilities)))
        sampler.add(states[-1])
    logits = np.tile(np.log(np.array(probabilities, np.float32)), (NUM_DRAWS, 1))
    return sorted({token_id for token_id, _ in sampler.sample(logits, states) if token_id is not None})


def check_keep(program: LearnerProgram) -> None:
    """Compare the tokens that the learner's function keeps with those that the engine's sampler can draw."""
    for probabilities, top_p, min_p, rule, rule_zh in KEEP_CASES:
        case = f"keep({list(probabilities)}, {top_p}, {min_p})"
        kept = require_numbers(program.call("keep", list(probabilities), top_p, min_p), case, len(probabilities))
        own = [token_id for token_id, value in enumerate(kept) if value > 0]
        usual = drawn_tokens(probabilities, top_p, min_p)
        if own != usual:
            raise Wrong(
                f"{case} keeps the tokens {own}; the engine draws from {usual}: {rule}.",
                f"{case} 保留 token {own}；引擎从 {usual} 中抽取：{rule_zh}。",
            )
        total = sum(probabilities[token_id] for token_id in usual)
        for token_id in usual:
            expected = probabilities[token_id] / total
            if abs(kept[token_id] - expected) > 1e-6:
                raise Wrong(
                    f"{case}: token {token_id} has {kept[token_id]:.4g}, right is {expected:.4g}. What is kept is"
                    " scaled"
                    f" to a sum of 1; this sum is {sum(kept):.4g}.",
                    f"{case}：token {token_id} 是 {kept[token_id]:.4g}，应为 {expected:.4g}。保留下来的要缩放到和为 1；"
                    f"这里的和是 {sum(kept):.4g}。",
                )
