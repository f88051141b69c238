"""Ranks on GPUs: NCCL's collectives, and the tokens of one worker."""

import pytest
import torch
from torch.distributed import HashStore

from quire.parallel.tensor_parallel import create_executor
from quire.runtime.torch_group import TorchGroup
from quire.scheduler.scheduler import Scheduler
from tests.parallel.test_executor import generate, make_request, prompt
from tests.parallel.thread_ranks import ThreadRanks
from tests.runtime.tiny_llama import tiny_llama
from tests.runtime.tiny_model import run_to_end, tokens_of

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device")]


def test_nccl_with_one_rank_returns_what_it_gets() -> None:
    group = TorchGroup(HashStore(), 0, 1, torch.device("cuda:0"), vocab_size=7)
    x = torch.randn(3, 7, device="cuda:0")
    assert torch.equal(group.all_reduce(x.clone()), x)
    assert torch.equal(group.all_gather(x), x)
    assert group.likeliest(x.clone) == x.argmax(-1).tolist()
    group.give_up()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "has_processes",
    [False, pytest.param(True, marks=pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices"))],
)
def test_two_ranks_give_the_tokens_of_one_worker(has_processes: bool, temperature: float) -> None:
    """Processes with a GPU each and NCCL; or threads that share a GPU, and gloo."""
    options = {"device": "cuda:0", "block_size": 16}
    config, checkpoint = tiny_llama(tensor_parallel_size=2, **options)
    executor = create_executor(config, checkpoint) if has_processes else ThreadRanks(config, checkpoint)
    found, expected = (
        [make_request(f"r{i}", prompt(i), seed=i, temperature=temperature) for i in range(4)] for _ in range(2)
    )
    try:
        results, _ = run_to_end(Scheduler(config.scheduler), executor, found)
    finally:
        executor.shutdown()
    assert {name: tokens_of(items) for name, items in results.items()} == generate(*expected, **options)[0]
