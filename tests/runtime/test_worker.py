"""The parts tied together over a real architecture: what the model computes is what a request gets."""

from typing import Any

import pytest
import torch

from quire.runtime.worker import Worker
from quire.sampling_params import PoolingParams, SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.types import BlockTableUpdate, NewRequest, Request, ScheduledRequest, SchedulerOutput
from tests.runtime.tiny_llama import tiny_llama
from tests.runtime.tiny_model import Submitting, run_to_end

TOKENS = [(5 * i * i + 3 * i + 7) % 97 for i in range(37)]


def hidden_of(worker: Worker, token_ids: list[int]) -> torch.Tensor:
    """Hidden states of one prompt computed in one step, behind the runner's back. Shapes: [T, E]."""
    seen: list[torch.Tensor] = []
    hook = worker.forward.model.register_forward_hook(lambda module, args, output: seen.append(output))
    block_ids = tuple(range(1, 1 + -(-len(token_ids) // worker.config.scheduler.block_size)))
    new = NewRequest("whole", tuple(token_ids), len(token_ids), SamplingParams(), None, (), 0)
    updates = tuple(BlockTableUpdate(0, block_ids) for _ in worker.config.scheduler.kv_cache_groups)
    item = ScheduledRequest("whole", 0, len(token_ids), 0, (), updates)
    worker.runner.run(SchedulerOutput(0, (new,), (item,), (), (), ()))
    hook.remove()
    return seen[0]


def run(worker: Worker, *requests: Request) -> dict[str, list[Any]]:
    results, _ = run_to_end(Scheduler(worker.config.scheduler), Submitting(worker.runner), list(requests))
    return results


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_pooling_equals_the_models_hidden_states(chunk: int, pooling: str) -> None:
    worker = Worker(*tiny_llama(max_num_batched_tokens=chunk))
    params = PoolingParams(pooling=pooling, normalize=False)
    (result,) = run(worker, Request("a", TOKENS, None, params, reads_prefix_cache=False))["a"]
    hidden = hidden_of(Worker(*tiny_llama()), TOKENS)
    expected = hidden[-1] if pooling == "last" else hidden.mean(0)
    assert result.embedding == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_prompt_logprobs_equal_the_models_logits(chunk: int) -> None:
    worker = Worker(*tiny_llama(max_num_batched_tokens=chunk))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    results = run(worker, Request("a", TOKENS, params, max_tokens=1, reads_prefix_cache=False))["a"]
    found = [logprobs.logprobs[0] for item in results for logprobs in item.prompt_logprobs]
    other = Worker(*tiny_llama())
    with torch.inference_mode():
        expected = other.forward.model.compute_logits(hidden_of(other, TOKENS)).log_softmax(-1)
    assert found == pytest.approx([float(expected[i, TOKENS[i + 1]]) for i in range(len(TOKENS) - 1)], abs=1e-4)


def test_threads_follow_the_hardware() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        config, checkpoint = tiny_llama()
        Worker(config, checkpoint)
        assert torch.get_num_threads() == config.hardware.num_threads
    finally:
        torch.set_num_threads(before)
