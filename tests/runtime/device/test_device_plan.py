"""Device plans on the CPU: the CUDA device's own code with PyTorch's functions, beside native plans in fp32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.runtime.batch import RequestStates, StepLayout
from quire.runtime.device.forward import DeviceForward
from quire.runtime.device.memory import UNKNOWN, given_tokens
from quire.runtime.device.plan import HostReadGuard, step_size
from quire.runtime.forward import EagerForward
from tests.models.tiny_configs import LLAMA, TINY_CONFIGS, full_config

NUMBERS = np.random.default_rng(0)
PROMPTS = [{"prompt_token_ids": NUMBERS.integers(3, 50, n).tolist()} for n in (5, 17, 40, 3)]
PARAMS = [
    SamplingParams(max_tokens=6, temperature=temperature, seed=seed, ignore_eos=True, logprobs=2)
    for seed, temperature in enumerate((0.0, 0.8, 0.0, 1.0))
]


def make_llm(folder: Path, config: dict[str, Any], **options: Any) -> LLM:
    (folder / "config.json").write_text(json.dumps(config))
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 96,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "kv_cache_memory_bytes": 8 << 20,
        "speculative": "off",
    }
    return LLM(str(folder), **settings | options)


def answers(llm: LLM, prompts: Any = PROMPTS, params: Any = PARAMS) -> tuple[list[Any], list[float]]:
    outputs = [one for output in llm.generate(prompts, params, use_tqdm=False) for one in output.outputs]
    values = [entry.logprob for output in outputs for place in output.logprobs or () for entry in place.values()]
    return [output.token_ids for output in outputs], values


def forward_of(llm: LLM) -> Any:
    return llm.llm_engine._executor._worker.forward  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("model_type", "name"), [(kind, name) for kind, configs in sorted(TINY_CONFIGS.items()) for name in configs]
)
def test_answers_equal_those_of_the_native_plan(model_type: str, name: str, tmp_path: Path) -> None:
    config = full_config(model_type, TINY_CONFIGS[model_type][name])
    expected, expected_values = answers(make_llm(tmp_path, config))
    llm = make_llm(tmp_path, config, gpu_kernels="reference")
    found, values = answers(llm)
    assert found == expected
    assert values == pytest.approx(expected_values, abs=1e-4)
    has_states = any(spec.is_state for spec in llm.llm_engine.config.model.cache_specs)
    assert isinstance(forward_of(llm), EagerForward if has_states else DeviceForward)


def test_forks_prefixes_and_full_memory_change_no_answer(tmp_path: Path) -> None:
    prompts = [{"prompt_token_ids": [*range(3, 43), last]} for last in (5, 6, 7, 5, 8, 9)]
    params = [SamplingParams(max_tokens=20, n=n, temperature=0.7, seed=n, ignore_eos=True) for n in (1, 2, 1, 3, 1, 1)]
    config, found = full_config("llama", LLAMA), []
    for kernels in ("auto", "reference"):
        # Eight blocks for six requests of two blocks each: some are preempted.
        llm = make_llm(tmp_path, config, gpu_kernels=kernels, num_blocks_override=8, kv_cache_memory_bytes=None)
        found.append([*answers(llm, prompts, params), *answers(llm, prompts[:2], params[:2])])
    assert found[0] == found[1]


def test_prompt_logprobs_and_embeddings_read_the_same_values(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    found = []
    for kernels in ("auto", "reference"):
        llm = make_llm(tmp_path, full_config("llama", LLAMA), gpu_kernels=kernels)
        [output] = llm.generate(PROMPTS[2], params, use_tqdm=False)
        of_prompt = [entry.logprob for place in output.prompt_logprobs[1:] for entry in place.values()]
        [embedded] = llm.embed(PROMPTS[2], use_tqdm=False)
        found.append(of_prompt + list(embedded.outputs.embedding))
    assert found[1] == pytest.approx(found[0], abs=1e-5)


def test_kernels_of_a_gpu_are_shown_among_the_decisions(tmp_path: Path) -> None:
    llm = make_llm(tmp_path, full_config("llama", LLAMA), gpu_kernels="reference")
    [decision] = [one for one in llm.llm_engine.config.decisions if one.name == "execution"]
    assert (decision.value, decision.reason) == (
        "device plan",
        "PyTorch on static memory, captured as graphs on a GPU",
    )


def test_what_only_a_native_plan_can_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype='int8' needs a native plan, .* reference kernels were chosen"
    ):
        make_llm(tmp_path, full_config("llama", LLAMA), gpu_kernels="reference", kv_cache_dtype="int8")


def test_reading_a_value_in_a_step_fails() -> None:
    values = torch.arange(4)
    for read in (lambda: values.max().item(), lambda: values.nonzero(), lambda: values[values > 1]):
        with HostReadGuard(), pytest.raises(AssertionError, match="in a step that a graph must be able to capture"):
            read()


def test_sizes_of_steps_hold_their_rows_with_little_padding() -> None:
    sizes = {step_size(number) for number in range(1, 8193)}
    assert len(sizes) < 180
    for number in range(1, 8193):
        size = step_size(number)
        assert number <= size == step_size(size)
        assert size - number < max(8, number / 15)
    assert [step_size(number) for number in (0, 1, 2, 3, 5, 9)] == [1, 1, 2, 4, 8, 16]


def test_tokens_that_only_the_device_knows_are_marked() -> None:
    states = RequestStates(max_num_seqs=2, max_model_len=20, block_size=4, num_groups=1)
    states.tokens[:] = np.arange(states.tokens.size).reshape(states.tokens.shape)
    rows, starts, counts = (np.array(values, np.int32) for values in ((1, 0), (7, 0), (1, 3)))
    layout = StepLayout([], rows, starts, counts, [0, 1], [], np.zeros(0, np.int32), None)
    decoded = states.tokens[1, 7]
    assert given_tokens(layout, states, None).tolist() == [decoded, 0, 1, 2]
    assert given_tokens(layout, states, [8, 3]).tolist() == [decoded, 0, 1, 2]
    assert given_tokens(layout, states, [7, 3]).tolist() == [UNKNOWN, 0, 1, 2]
