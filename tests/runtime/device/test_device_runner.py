"""Steps of a device plan that fail: at their launch, on the device, in one row of logits."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from quire import LLM, SamplingParams
from quire.errors import EngineDeadError
from quire.runtime.device.forward import DeviceForward
from quire.runtime.device.runner import DeviceRunner, Pending
from tests.models.tiny_configs import LLAMA, full_config

PROMPTS = [{"prompt_token_ids": [3 + i, 5, 7 * i]} for i in range(4)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.8, seed=1, ignore_eos=True)


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    (tmp_path / "config.json").write_text(json.dumps(full_config("llama", LLAMA)))
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "speculative": "off"}
    return LLM(
        str(tmp_path), **options, max_model_len=96, max_num_seqs=4, num_blocks_override=40, gpu_kernels="reference"
    )


def answers(llm: LLM) -> list[tuple[list[int], str | None]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].finish_reason) for output in outputs]


def failing(times: Iterator[bool], original: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """Return `original`, which raises where `times` says so."""

    def call(*args: Any) -> Any:
        if next(times, False):
            raise error
        return original(*args)

    return call


def test_step_that_cannot_be_launched_is_computed_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(llm)
    times = iter([False, False, False, True])
    monkeypatch.setattr(DeviceForward, "launch", failing(times, DeviceForward.launch, ValueError("no")))
    assert answers(llm) == expected
    assert next(times, None) is None


@pytest.mark.parametrize("place", [(DeviceForward, "launch"), (Pending, "wait")])
def test_device_that_fails_ends_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch, place: tuple[type, str]) -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    times = iter([False, False, False, True])
    monkeypatch.setattr(*place, failing(times, getattr(*place), error))
    with pytest.raises(EngineDeadError, match="the device failed, and needs a new process: CUDA error"):
        answers(llm)
    assert llm.llm_engine.errored


def test_row_without_a_choice_ends_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(llm)
    launch, num_steps = DeviceForward.launch, 0

    def damaged(forward: DeviceForward, layout: Any, states: Any) -> None:
        nonlocal num_steps
        launch(forward, layout, states)
        num_steps += 1
        if num_steps == 4:
            forward.plan.logits[1] = torch.nan

    monkeypatch.setattr(DeviceForward, "launch", damaged)
    found = answers(llm)
    assert [reason for _, reason in found] == ["length", "error", "length", "length"]
    assert found[1][0] == expected[1][0][:3]
    assert [found[i] for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]


def test_two_steps_are_in_flight_before_any_token_is_known(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    launch, finish = DeviceRunner.launch, DeviceRunner.finish
    monkeypatch.setattr(DeviceRunner, "launch", lambda *args: (calls.append("launch"), launch(*args))[1])
    monkeypatch.setattr(DeviceRunner, "finish", lambda *args: (calls.append("finish"), finish(*args))[1])
    llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)
    assert calls == ["launch", *["launch", "finish"] * 7, "finish"]
