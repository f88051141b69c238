"""A tiny Llama through scheduler and executor: greedy tokens do not depend on how the work was cut."""

import pytest
import torch

from quire.errors import EngineDeadError
from quire.parallel.executor import Executor, InProcessExecutor
from quire.sampling_params import SamplingParams
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.types import RequestSpec, SchedulerOutput
from tests.runtime.tiny_llama import tiny_llama
from tests.runtime.tiny_model import run_to_end, tokens_of

LENGTHS = (3, 17, 40, 1)
NUM_TOKENS = 12


def prompt(number: int) -> list[int]:
    return [(11 * number + 5 * i * i + 3 * i) % 97 for i in range(LENGTHS[number])]


def make_request(name: str, token_ids: list[int], *, seed: int = 0, temperature: float = 0.0, n: int = 1) -> Request:
    params = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, n=n)
    return Request(RequestSpec(name, token_ids, params, max_tokens=NUM_TOKENS, seed=seed))


def generate(*requests: Request, **options: object) -> tuple[dict[str, list[int]], list[SchedulerOutput]]:
    config, checkpoint = tiny_llama(**options)
    executor: Executor = InProcessExecutor.create(config, checkpoint)
    results, outputs = run_to_end(Scheduler(config.scheduler), executor, list(requests))
    executor.shutdown()
    return {name: tokens_of(items) for name, items in results.items()}, outputs


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number in range(len(LENGTHS)):
        found |= generate(make_request(f"r{number}", prompt(number)))[0]
    return found


def test_after_shutdown_steps_are_an_error() -> None:
    config, checkpoint = tiny_llama()
    executor = InProcessExecutor.create(config, checkpoint)
    executor.shutdown()
    executor.shutdown()
    executor.submit(SchedulerOutput(0, (), (), (), (), ()))
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.collect()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_equals_cpu(alone: dict[str, list[int]]) -> None:
    assert generate(*(make_request(f"r{i}", prompt(i)) for i in range(4)), device="cuda:0")[0] == alone
