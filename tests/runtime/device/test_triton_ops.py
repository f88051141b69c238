"""Whole models by Triton's kernels, beside native plans in fp32; launches of a step; fused calls of one row."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
import torch

from quire import SamplingParams
from tests.models.tiny_configs import TINY_CONFIGS, full_config
from tests.runtime.device.test_device_plan import answers, forward_of, make_llm

WITHOUT_CARD = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off beside a card")
MODELS = [
    ("llama", "groups of 3, odd sizes"),
    ("qwen3", "biases, untied"),
    ("gemma2", "window in the lower layer"),
    ("gpt_oss", "two of four, yarn"),
]


def plan_of(llm: Any) -> Any:
    return forward_of(llm).plan


@WITHOUT_CARD
@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "name"), MODELS)
def test_answers_equal_those_of_the_native_plan(model_type: str, name: str, tmp_path: Path) -> None:
    config = full_config(model_type, TINY_CONFIGS[model_type][name])
    expected, expected_values = answers(make_llm(tmp_path, config))
    llm = make_llm(tmp_path, config, gpu_kernels="triton")
    found, values = answers(llm)
    assert found == expected
    assert values == pytest.approx(expected_values, abs=1e-4)


@WITHOUT_CARD
@pytest.mark.parametrize(("model_type", "most"), [("llama", 7), ("qwen3", 7), ("gemma2", 9)])
def test_launches_of_a_layer(model_type: str, most: int, tmp_path: Path) -> None:
    """A step's launches do not depend on the number of requests; one row takes fewer."""
    name = {"llama": "groups of 2", "qwen3": "head size of its own", "gemma2": "window in the lower layer"}[model_type]
    launches = []
    for num_layers in (2, 4):
        fields = {**TINY_CONFIGS[model_type][name], "num_hidden_layers": num_layers}
        llm = make_llm(tmp_path, full_config(model_type, fields), gpu_kernels="triton")
        plan, counted = plan_of(llm), []
        plan.step.has_decodes, plan.step.has_prompts = True, False
        for num_rows in (1, 2, 4):
            before = plan.kernels.num_launches
            plan.run_body(num_rows)
            counted.append(plan.kernels.num_launches - before)
        launches.append(counted)
    per_layer = [(b - a) / 2 for a, b in zip(*launches, strict=True)]
    assert per_layer[0] <= most
    assert per_layer[1] == per_layer[2] == most + 3


@WITHOUT_CARD
def test_one_row_computes_what_several_do(tmp_path: Path) -> None:
    prompt, params = {"prompt_token_ids": [5, 9, 3]}, SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    llm = make_llm(tmp_path, full_config("qwen3", TINY_CONFIGS["qwen3"]["head size of its own"]), gpu_kernels="triton")
    [alone] = llm.generate([prompt], params, use_tqdm=False)
    together = llm.generate([prompt] * 3, params, use_tqdm=False)
    assert {key[0] for key in plan_of(llm)._bodies._by_size} >= {1, 4}
    assert [one.outputs[0].token_ids for one in together] == [alone.outputs[0].token_ids] * 3
