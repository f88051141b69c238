"""Every architecture on tiny random weights: Transformers' logits, however tokens are cut into steps and blocks."""

from typing import Any

import pytest
import torch
import transformers

from quire.models.registry import ModelRegistry, model_types
from tests.models.harness import Runner, Stream, build_model, random_tokens
from tests.models.tiny_configs import TINY_CONFIGS, full_config

TOLERANCE = 1e-4
"""Largest difference from Transformers' logits, relative to the largest logit, in fp32."""
OWN_TOLERANCE = 1e-5
"""The same between two ways of ours to compute one thing."""
PROMPT_LEN = 67

CASES = [
    pytest.param((model_type, name), id=f"{model_type}: {name}")
    for model_type in model_types()
    for name in TINY_CONFIGS.get(model_type, {})
]


def all_layers_have_windows(model_type: str, name: str) -> bool:
    hf_config = full_config(model_type, TINY_CONFIGS[model_type][name])
    specs = ModelRegistry.make_model_config(hf_config).cache_specs
    return all(spec.window is not None and spec.window < PROMPT_LEN for spec in specs)


WINDOW_CASES = [case for case in CASES if all_layers_have_windows(*case.values[0])]


@pytest.fixture(scope="module")
def models() -> dict[Any, Any]:
    return {}


@pytest.fixture
def pair(request: pytest.FixtureRequest, models: dict[Any, Any]) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Transformers' model and ours, with the same weights."""
    if request.param not in models:
        model_type, name = request.param
        fields = TINY_CONFIGS[model_type][name]
        config = transformers.CONFIG_MAPPING[model_type](**fields)
        oracle = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        generator = torch.Generator().manual_seed(11)
        for parameter in oracle.parameters():
            scale = 1.5 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.data.normal_(float(parameter.ndim == 1), scale, generator=generator)
        models[request.param] = oracle, build_model(full_config(model_type, fields), oracle.state_dict())
    return models[request.param]


def oracle_logits(oracle: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return oracle(torch.tensor([token_ids]), use_cache=False).logits[0]


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = OWN_TOLERANCE) -> None:
    assert found.shape == expected.shape
    assert not found.isnan().any()
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def whole(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    runner = Runner(model)
    return runner.run(runner.add(token_ids))


@pytest.mark.parametrize("model_type", model_types())
def test_every_model_file_has_tiny_configs(model_type: str) -> None:
    assert TINY_CONFIGS.get(model_type), f"add configs for {model_type} to tests/models/tiny_configs.py"


@pytest.mark.parametrize("pair", CASES, indirect=True)
@pytest.mark.parametrize("length", [1, 2, 7, 33, PROMPT_LEN])
def test_logits_are_those_of_transformers(pair: Any, length: int) -> None:
    oracle, model = pair
    token_ids = random_tokens(length, 53)
    assert_close(whole(model, token_ids), oracle_logits(oracle, token_ids), TOLERANCE)


@pytest.mark.parametrize("pair", CASES, indirect=True)
def test_chunked_prompt_gives_the_logits_of_the_whole(pair: Any) -> None:
    _, model = pair
    token_ids = random_tokens(PROMPT_LEN, 53)
    expected = whole(model, token_ids)
    for chunk in (1, 3, 4, 5, 8, 31, 64):
        runner = Runner(model)
        assert_close(runner.run(runner.add(token_ids), chunk), expected)


@pytest.mark.parametrize("pair", CASES, indirect=True)
def test_prefill_then_decode_gives_the_logits_of_the_whole(pair: Any) -> None:
    _, model = pair
    token_ids = random_tokens(31, 53)
    expected = whole(model, token_ids)
    for prompt_len in (1, 2, 4, 5, 29):
        runner = Runner(model)
        stream = runner.add(token_ids)
        logits = [*runner.step([(stream, prompt_len)]), runner.run(stream, 1)]
        assert_close(torch.cat(logits), expected)


@pytest.mark.parametrize("pair", CASES, indirect=True)
def test_a_batch_gives_each_request_the_logits_it_has_alone(pair: Any) -> None:
    """Decodes, fresh prompts and later chunks in one step, of different lengths."""
    _, model = pair
    runner = Runner(model)
    streams = [runner.add(random_tokens(length, 53, seed)) for seed, length in enumerate((21, 9, 14, 30, 2))]
    before = runner.step([(streams[0], 20), (streams[1], 8), (streams[3], 17)])
    mixed = runner.step([(streams[2], 14), (streams[0], 1), (streams[3], 13), (streams[1], 1), (streams[4], 1)])
    after = runner.step([(streams[4], 1)])
    found = {
        0: [before[0], mixed[1]],
        1: [before[1], mixed[3]],
        2: [mixed[0]],
        3: [before[2], mixed[2]],
        4: [mixed[4], after[0]],
    }
    for index, parts in found.items():
        assert_close(torch.cat(parts), whole(model, streams[index].token_ids))


@pytest.mark.parametrize("pair", CASES, indirect=True)
def test_reused_prefix_blocks_give_the_logits_of_a_fresh_request(pair: Any) -> None:
    _, model = pair
    runner = Runner(model)
    prefix = random_tokens(12, 53)
    first = runner.add(prefix + random_tokens(7, 53, seed=1))
    runner.run(first)
    second = runner.add(prefix + random_tokens(9, 53, seed=2), shares=first, num_shared_blocks=3)
    assert_close(runner.run(second), whole(model, second.token_ids)[12:])


@pytest.mark.parametrize("pair", CASES, indirect=True)
def test_logits_do_not_depend_on_block_ids(pair: Any) -> None:
    _, model = pair
    token_ids = random_tokens(29, 53)
    expected = whole(model, token_ids)
    for scatter in (1, 2):
        runner = Runner(model, num_blocks=200, scatter=scatter)
        assert torch.equal(runner.run(runner.add(token_ids)), expected)


@pytest.mark.parametrize("pair", CASES, indirect=True)
def test_logits_do_not_depend_on_block_size(pair: Any) -> None:
    _, model = pair
    token_ids = random_tokens(29, 53)
    expected = whole(model, token_ids)
    for block_size in (1, 16, 32):
        runner = Runner(model, block_size=block_size)
        assert_close(runner.run(runner.add(token_ids), 6), expected)


@pytest.mark.parametrize("pair", WINDOW_CASES, indirect=True)
def test_blocks_left_behind_by_the_window_are_not_read(pair: Any) -> None:
    """They may belong to another request: here they become the null block, which holds NaN."""
    _, model = pair
    token_ids = random_tokens(40, 53)
    runner = Runner(model)
    stream = runner.add(token_ids)
    logits = runner.step([(stream, 30)])
    for group, ids in zip(runner.groups, stream.block_ids, strict=True):
        num_left = (30 - group.spec.window + 1) // runner.block_size
        ids[:num_left] = [0] * num_left
    logits += [*runner.step([(stream, 6)]), runner.run(stream, 1)]
    assert_close(torch.cat(logits), whole(model, token_ids))


def test_a_runner_notices_reads_of_memory_never_written() -> None:
    """The harness itself: its pool is NaN, so that the tests above would fail."""
    fields = TINY_CONFIGS["llama"]["groups of 2"]
    oracle = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**fields))
    runner = Runner(build_model(full_config("llama", fields), oracle.state_dict()))
    stream = Stream(random_tokens(9, 53), [[] for _ in runner.groups], num_computed=4)
    assert runner.run(stream).isnan().any()
