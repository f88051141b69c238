"""The worker sets torch's number of threads."""

import torch

from quire.runtime.worker import Worker
from tests.runtime.tiny_llama import tiny_llama


def test_threads_follow_the_hardware() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        config, checkpoint = tiny_llama()
        Worker(config, checkpoint)
        assert torch.get_num_threads() == config.hardware.num_threads
    finally:
        torch.set_num_threads(before)
