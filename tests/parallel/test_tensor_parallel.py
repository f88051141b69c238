"""Ranks that share a model give the tokens of one worker, however the work is cut. The ranks are threads here."""

import functools
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
import torch

from quire._native import KvFormat
from quire.config import EngineConfig
from quire.grammar.matcher import TokenMatcher
from quire.insight.explain.device import Device
from quire.insight.explain.phases import Phase
from quire.insight.explain.subject import trace_rank
from quire.kernels.instruction import StepShape
from quire.models.registry import model_types
from quire.parallel.executor import Executor, InProcessExecutor
from quire.runtime.machine_limits import MachineLimits
from quire.sampling_params import PoolingParams, SamplingParams
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.structured_outputs import StructuredOutputsParams
from quire.types import RequestResult, RequestSpec, StepResult
from quire.weights.checkpoint import Checkpoint
from tests.models.tiny_configs import LLAMA, TINY_CONFIGS, full_config
from tests.parallel.thread_ranks import ThreadRanks, groups, on_ranks
from tests.runtime.plan.harness import make_config
from tests.runtime.test_tensor_parallel import fits, random_checkpoint
from tests.runtime.tiny_model import run_to_end, tokens_of

LENGTHS = (3, 17, 40, 1)
NUM_TOKENS = 9
WIDE = {
    **LLAMA, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "attention_bias": True,
    "num_hidden_layers": 3,
}  # fmt: skip
SIZES = [(2, 1), (1, 3), (2, 2), (2, 1, True)]
"""Ranks of a stage, stages, and whether they run op by op, with torch.distributed."""
CASES = [(model_type, name) for model_type in model_types() for name in list(TINY_CONFIGS.get(model_type, {}))[:2]]


def requests(vocab_size: int = 53, **params: Any) -> list[Request]:
    """Prompts of several lengths, greedy unless told otherwise."""
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **params})
    prompts = [[(11 * n + 5 * i * i + 3 * i) % vocab_size for i in range(count)] for n, count in enumerate(LENGTHS)]
    specs = [RequestSpec(f"r{n}", ids, sampling, max_tokens=NUM_TOKENS, seed=n) for n, ids in enumerate(prompts)]
    return [Request(spec) for spec in specs]


def make(
    hf_config: dict[str, Any], size: int, num_stages: int = 1, enforce_eager: bool = False, **options: Any
) -> tuple[EngineConfig, Executor]:
    sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages, "enforce_eager": enforce_eager}
    config = make_config(hf_config, **sizes, **options)
    return config, executor(config, checkpoint_of(json.dumps(hf_config)))


@functools.lru_cache(2)
def checkpoint_of(hf_config: str) -> Checkpoint:
    """Random weights that engines share unchanged."""
    return random_checkpoint(json.loads(hf_config))


def executor(config: EngineConfig, checkpoint: Checkpoint) -> Executor:
    if config.num_ranks == 1:
        return InProcessExecutor.create(config, checkpoint)
    return ThreadRanks(config, checkpoint)


def generate(config: EngineConfig, ranks: Executor, items: list[Request]) -> dict[str, list[RequestResult]]:
    settings = replace(config.scheduler, max_in_flight=ranks.max_in_flight)
    return run_to_end(Scheduler(settings), ranks, items)[0]


def tokens(found: dict[str, list[RequestResult]]) -> dict[str, list[int]]:
    return {name: tokens_of(items) for name, items in found.items()}


# --- Every model file -----------------------------------------------------------------------------


@pytest.mark.parametrize(("model_type", "name"), CASES)
def test_greedy_tokens_equal_those_of_one_worker(model_type: str, name: str) -> None:
    hf_config = full_config(model_type, TINY_CONFIGS[model_type][name])
    expected = tokens(generate(*make(hf_config, 1), requests()))
    num_ranks = max(size for size in (1, 2, 4) if fits(hf_config, size))
    # Two ranks are tested in two stages.
    for sizes in ((num_ranks, 1), (2, 2), (2, 1, True)) if num_ranks > 1 else ((1, 2),):
        assert tokens(generate(*make(hf_config, *sizes), requests())) == expected


# --- How the work is cut --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    return tokens(generate(*make(full_config("llama", WIDE), 1), requests()))


@pytest.mark.parametrize(
    ("size", "num_stages", "options"),
    [
        (2, 1, {"max_num_batched_tokens": 8}),
        (4, 1, {"max_num_batched_tokens": 16, "num_threads": 8}),
        (2, 1, {"num_blocks_override": 7, "max_model_len": 64}),
        (2, 1, {"multi_step_decode": 1}),
        (8, 1, {}),
        (1, 3, {"max_num_batched_tokens": 8}),
        (2, 3, {"max_num_batched_tokens": 8, "num_threads": 12}),
        (1, 2, {"num_blocks_override": 7, "max_model_len": 64}),
    ],
)
def test_chunked_preempted_and_single_steps_equal_one_worker(
    size: int, num_stages: int, options: dict[str, Any], alone: dict[str, list[int]]
) -> None:
    """Eight ranks hold each of the four KV heads twice."""
    assert tokens(generate(*make(full_config("llama", WIDE), size, num_stages, **options), requests())) == alone


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 2, "prompt_logprobs": 1},
        {"min_tokens": 4, "logit_bias": {3: 5.0}},
        {"temperature": 1.0, "top_k": 5},
        {"mirostat": 2, "mirostat_tau": 3.0, "dry_multiplier": 1.0, "dry_sequence_breakers": []},
        {"temperature": 0.7, "top_k": 13, "top_p": 0.8, "min_p": 0.02, "min_tokens": 4, "stop_token_ids": [3, 7]},
    ],
)
@pytest.mark.parametrize("sizes", SIZES)
def test_sampled_tokens_equal_one_worker(params: dict[str, Any], sizes: tuple[int, ...]) -> None:
    hf_config = full_config("llama", WIDE)
    expected = generate(*make(hf_config, 1), requests(**params))
    found = generate(*make(hf_config, *sizes), requests(**params))
    assert tokens(found) == tokens(expected)
    for name, results in expected.items():
        logprobs = [item for result in results for item in (*result.prompt_logprobs, *result.logprobs)]
        others = [item for result in found[name] for item in (*result.prompt_logprobs, *result.logprobs)]
        assert [item.token_ids for item in others] == [item.token_ids for item in logprobs]
        for item, other in zip(logprobs, others, strict=True):
            assert other.logprobs == pytest.approx(item.logprobs, abs=1e-4)


@pytest.mark.parametrize("params", [{"temperature": 0.7, "logprobs": 3, "prompt_logprobs": 2}, {"top_k": 5}])
@pytest.mark.parametrize("sizes", [(2, 1), (4, 1), (1, 3), (2, 2)])
def test_same_schedule_gives_the_same_bits(params: dict[str, Any], sizes: tuple[int, int]) -> None:
    """With any number of threads."""
    hf_config, found = full_config("llama", WIDE), []
    for num_threads in (4, 4, 8):
        items = requests(**{"temperature": 1.0, **params})
        found.append(generate(*make(hf_config, *sizes, num_threads=num_threads, multi_step_decode=1), items))
    assert found[0] == found[1] == found[2]


def test_forks_and_drafts_equal_one_worker() -> None:
    hf_config = full_config("llama", WIDE)
    found = []
    for sizes in ((1, 1), *SIZES):
        spec = requests(temperature=1.0, n=3)[1].spec
        leader, *siblings = (
            Request(msgspec.structs.replace(spec, request_id=f"s{index}", seed=50 + index)) for index in range(3)
        )
        leader.siblings = siblings
        guessing = requests()[2]
        guessing.draft_token_ids = (1, 2)
        found.append(tokens(generate(*make(hf_config, *sizes), [leader, guessing])))
    assert all(each == found[0] for each in found)


def test_embeddings_equal_one_worker() -> None:
    hf_config = full_config("llama", WIDE)
    vectors = []
    for sizes in ((1, 1), (4, 1), (1, 3), (2, 1, True)):
        changes = {"sampling": None, "pooling": PoolingParams(pooling="mean"), "reads_prefix_cache": False}
        request = Request(msgspec.structs.replace(requests()[2].spec, **changes))
        (result,) = generate(*make(hf_config, *sizes), [request])["r2"]
        vectors.append(torch.tensor(result.embedding))
    assert all(torch.allclose(vectors[0], vector, atol=1e-5) for vector in vectors)


@pytest.mark.parametrize("vocab_size", [5, 53])
def test_ranks_without_tokens_of_the_vocabulary_choose_none(vocab_size: int) -> None:
    """Five tokens on four ranks: two, two, one and padding."""
    hf_config = full_config("llama", {**LLAMA, "num_key_value_heads": 4, "vocab_size": vocab_size})
    for params in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 1}):
        expected = tokens(generate(*make(hf_config, 1), requests(vocab_size, **params)))
        for eager in (False, True):
            assert tokens(generate(*make(hf_config, 4, 1, eager), requests(vocab_size, **params))) == expected


def test_ranks_merge_the_first_of_the_largest_finite_logits() -> None:
    """Five tokens on four ranks: padding is larger than all logits of the first row."""
    nan, inf = math.nan, math.inf
    rows = [[-5, -4, -3, -2, -6], [1, 7, 2, 7, 7], [1, nan, 9, 2, 3], [1, 2, 3, 4, inf], [-inf] * 5]
    whole = torch.nn.functional.pad(torch.tensor(rows, dtype=torch.float32), (0, 3))
    joined = groups(4, vocab_size=5)
    found = on_ranks(4, lambda rank: joined[rank].likeliest(lambda: whole[:, 2 * rank : 2 * rank + 2].clone()))
    assert found == [[3, 1, None, None, None]] * 4
    assert on_ranks(4, lambda rank: joined[rank].likeliest(whole.clone)) == [None] * 4


@pytest.mark.parametrize(("size", "num_stages", "eager"), [(2, 1, False), (1, 2, False), (2, 1, True)])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}])
def test_logits_without_a_choice_are_an_error_on_every_rank(
    params: dict[str, Any], size: int, num_stages: int, eager: bool
) -> None:
    hf_config = full_config("llama", WIDE)
    sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages, "enforce_eager": eager}
    config, checkpoint = make_config(hf_config, **sizes), random_checkpoint(hf_config)
    checkpoint.tensors["norm.weight"].stored[...] = 0xFF  # NaN
    ranks = ThreadRanks(config, checkpoint)
    found = generate(config, ranks, requests(**params)[:1])
    assert [item.error is None for item in found["r0"]] == [False]
    assert not any(item.error is None for result in ranks.results for item in result.results)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("params", "num_best"),
    [
        ({"temperature": 1.0}, 0),
        ({"temperature": 1.0, "top_k": 5}, 5),
        ({"temperature": 1.0, "top_k": 5, "logprobs": 1}, 0),
        ({"temperature": 1.0, "top_k": 20}, 0),
        ({"temperature": 0.0}, 1),
    ],
)
def test_step_sums_twice_a_layer_and_once_for_the_embedding(
    params: dict[str, Any], num_best: int, num_ranks: int
) -> None:
    """The bytes that the ranks exchange are those that `quire explain` predicts; with top_k, keys instead of logits."""
    names, sent, predicted = traffic(full_config("llama", WIDE), params, num_ranks)
    rows, width, num_layers, columns = sum(LENGTHS), WIDE["hidden_size"], 3, math.ceil(53 / num_ranks)
    sums = 2 * num_layers + 1
    gathers = {} if num_best else {f"AllGather: x [{len(LENGTHS)}, {columns}] f32, out [{len(LENGTHS)}, 53] f32": 1}
    assert names == {f"AllReduce: x [{rows}, {width}] f32, out [{rows}, {width}] f32": sums, **gathers}
    assert predicted == 4 * sums * rows * width + len(LENGTHS) * (8 * num_best or 4 * columns)
    assert sent == [predicted] * num_ranks


def test_rows_with_different_numbers_of_best_logits_are_merged_together() -> None:
    items = [*requests(temperature=1.0, top_k=5)[:-1], *requests(temperature=0.0)[-1:]]
    _, sent, predicted = traffic(full_config("llama", WIDE), {"top_k": 5}, 2, items)
    assert sent == [predicted - 8 * 4] * 2


@pytest.mark.parametrize("model_type", ["deepseek_v2", "granitemoehybrid", "qwen2_moe", "qwen3_next"])
def test_experts_and_shared_ones_are_summed_together(model_type: str) -> None:
    """Each layer has one sum for its attention or state, and one for its MLPs."""
    fields = next(each for each in TINY_CONFIGS[model_type].values() if fits(full_config(model_type, each), 2))
    of_granite = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
    hf_config = full_config(model_type, {**fields, **(of_granite if model_type == "granitemoehybrid" else {})})
    expected = tokens(generate(*make(hf_config, 1), requests()))
    for sizes in ((2, 1), (2, 1, True)):
        assert tokens(generate(*make(hf_config, *sizes), requests())) == expected
    names, sent, predicted = traffic(hf_config, {"temperature": 1.0}, 2)
    sums = {name: count for name, count in names.items() if name.startswith("AllReduce")}
    rows, width = sum(LENGTHS), hf_config["hidden_size"]
    assert sums == {
        f"AllReduce: x [{rows}, {width}] f32, out [{rows}, {width}] f32": 2 * hf_config["num_hidden_layers"] + 1
    }
    assert sent == [predicted] * 2


def traffic(
    hf_config: dict[str, Any], params: dict[str, Any], num_ranks: int, items: Sequence[Request] = ()
) -> tuple[Counter[str], list[int], int]:
    """Compute all prompts in one step; `items`: others than requests with these parameters.

    Returns: names of the collectives that ran, the bytes that each rank sent, and the bytes predicted.
    """
    config, ranks = make(hf_config, num_ranks)
    assert isinstance(ranks, ThreadRanks)
    scheduler = Scheduler(config.scheduler)
    for request in items or requests(**params):
        scheduler.add_request(request)
    ranks.submit(msgspec.structs.replace(output := scheduler.schedule(), times_ops=True))
    names = Counter(op.name for op in ranks.collect().op_times if op.name.startswith("All"))
    assert output.num_tokens == sum(LENGTHS)
    step = StepShape(tuple((0, count) for count in LENGTHS), len(LENGTHS), KvFormat.f32)
    rank = trace_rank(make_config(hf_config), random_checkpoint(hf_config), num_ranks)
    device = Device(config.hardware, MachineLimits(0.0, {}), "")
    predicted = Phase("", step, config, rank, device, SamplingParams(**params))
    return names, [each.exchange.bytes_sent for each in ranks.links if each.exchange], predicted.bytes_sent


def test_lost_steps_are_computed_again(alone: dict[str, list[int]]) -> None:
    """The first stage has computed steps that rank 0 has not begun."""
    config, ranks = make(full_config("llama", WIDE), 1, 2, max_num_batched_tokens=16)
    scheduler = Scheduler(replace(config.scheduler, max_in_flight=ranks.max_in_flight))
    for request in requests():
        scheduler.add_request(request)
    outputs = [scheduler.schedule(), scheduler.schedule()]
    for output in outputs:
        ranks.submit(output)
    scheduler.update(outputs[0], StepResult(outputs[0].step_id, (), is_lost=True))
    assert tokens(run_to_end(scheduler, ranks, [])[0]) == alone


class Raising:
    """A grammar of which the library fails while it follows the first token."""

    def compile(self, spec: StructuredOutputsParams) -> "Raising":
        return self

    def start(self, request_id: str, spec: StructuredOutputsParams) -> TokenMatcher:
        return TokenMatcher(self, 53, (52,))  # type: ignore[arg-type]

    def compute_bitmask(self) -> bytes:
        return bytes([255] * 7)

    def is_error(self) -> bool:
        return False

    def consume_token(self, token_id: int) -> bool:
        raise RuntimeError("no such luck")


CAUSES = {
    "NaN logits": ({}, "logits hold NaN", 0),
    "sampling": ({}, "could not be sampled (RuntimeError)", 3),
    "sampling from merged logits": ({"top_k": 5}, "could not be sampled (RuntimeError)", 3),
    "a grammar": ({"structured_outputs": StructuredOutputsParams(regex="a")}, "no such luck", 1),
    "prompt logprobs": ({"prompt_logprobs": 1}, "could not be sampled (RuntimeError)", 1),
}
"""Parameters of the request that fails, its error, and its tokens before."""


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 2), (2, 2)])
def test_failing_request_ends_alone(cause: str, size: int, num_stages: int) -> None:
    hf_config = full_config("llama", WIDE)
    params, message, num_tokens = CAUSES[cause]
    others = {name: value for name, value in params.items() if name == "top_k"}
    expected = tokens(generate(*make(hf_config, 1), half_greedy(**others)))
    sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages, "max_num_batched_tokens": 16}
    config, checkpoint = make_config(hf_config, **sizes), random_checkpoint(hf_config)
    bad = requests(temperature=1.0, **params)[2]
    bad.request_id = "bad"
    if cause == "NaN logits":
        used = {
            token_id
            for item in half_greedy(**others)
            for token_id in (*item.prompt_token_ids, *expected[item.request_id])
        }
        bad.prompt_token_ids[5] = min(set(range(53)) - used)
        checkpoint.tensors["embed_tokens.weight"].stored[bad.prompt_token_ids[5]] = 0xFF
    ranks = ThreadRanks(config, checkpoint, cast(Any, Raising()))
    rows = ranks.workers[0].sampler.rows
    raising = {"sampling": ("sample",), "prompt logprobs": ("logprobs",)}
    for name in raising.get(cause, ("sample", "sample_best") if "top_k" in params else ()):
        raise_for(rows, name)
    first, *rest = half_greedy(**others)
    found = generate(config, ranks, [first, bad, *rest])
    results = found.pop("bad")
    assert message in (results[-1].error or "")
    assert len(tokens_of(results)) == num_tokens
    assert tokens(found) == expected
    assert not any("bad" in worker.runner.states.by_id for worker in ranks.workers)


def half_greedy(**params: Any) -> list[Request]:
    return [*requests()[:2], *requests(temperature=1.0, **params)[2:]]


def raise_for(rows: Any, name: str) -> None:
    """Make the row sampler raise for the request "bad" once it has three tokens, and for all prompt logprobs."""
    original = getattr(rows, name)

    def raising(*arguments: Any) -> Any:
        states = arguments[-1]
        if name == "logprobs" or any(state.request_id == "bad" and state.num_tokens > 42 for state in states):
            raise RuntimeError("no such luck")
        return original(*arguments)

    setattr(rows, name, raising)


@pytest.mark.parametrize("eager", [False, True])
def test_rank_0_decides_when_a_step_ends(eager: bool) -> None:
    """Each rank would end by its own clock after another number of iterations."""
    hf_config = full_config("llama", WIDE)
    config, ranks = make(hf_config, 2, 1, eager)
    assert isinstance(ranks, ThreadRanks)
    expected = tokens(generate(*make(hf_config, 1), requests()[:1]))
    ranks.workers[0].runner.limit_s = math.inf  # on a busy machine an iteration op by op may take longer than a step
    ranks.workers[1].runner.limit_s = 0.0
    ranks.workers[1].runner.end_early()
    found, outputs = run_to_end(Scheduler(config.scheduler), ranks, requests()[:1])
    assert tokens(found) == expected
    assert len(outputs) < NUM_TOKENS
    assert {result.num_iterations for result in ranks.results} == {ranks.results[0].num_iterations}
