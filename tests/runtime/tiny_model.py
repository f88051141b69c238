"""A stand-in model: real paged attention, written token by token, so that its bits cannot depend on the batch."""

import itertools
from collections import deque
from typing import Any

import torch
from torch import nn

from quire.cache_spec import CacheGroup, PagedKV
from quire.layers.forward_batch import ForwardBatch
from quire.runtime.model_runner import ModelRunner
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.types import RequestResult, SchedulerOutput, StepResult
from tests.scheduler.integrity import check_integrity

VOCAB_SIZE, WIDTH, NUM_LAYERS = 50, 8, 2
SPEC = PagedKV(num_kv_heads=1, head_size=WIDTH, dtype_bytes=4)
ONE_GROUP = (CacheGroup((0, 1), SPEC),)
TWO_GROUPS = (CacheGroup((0,), SPEC), CacheGroup((1,), SPEC))


class TinyModel(nn.Module):
    """Two attention layers over learned positions; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embedding = torch.randn(VOCAB_SIZE, WIDTH, generator=generator)
        self.positions = torch.randn(256, WIDTH, generator=generator)
        self.weights = torch.randn(NUM_LAYERS, 3, WIDTH, WIDTH, generator=generator) / WIDTH**0.5

    def forward(self, token_ids: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        x = self.embedding[token_ids] + self.positions[batch.positions]
        starts = [0, *itertools.accumulate(batch.query_lens_list)]
        for layer, cache in enumerate(batch.kv_caches):
            group = batch.layer_groups[layer]
            q, k, v = (torch.stack([row @ weight for row in x]) for weight in self.weights[layer])
            slots, block_size = batch.slot_mapping[group], cache.shape[2]
            cache[slots // block_size, 0, slots % block_size, 0] = k
            cache[slots // block_size, 1, slots % block_size, 0] = v
            attended = []
            for request in range(len(starts) - 1):
                table = batch.block_tables[group][request].long()
                for row in range(starts[request], starts[request + 1]):
                    seen = torch.arange(int(batch.positions[row]) + 1)
                    kv = cache[table[seen // block_size], :, seen % block_size, 0]
                    attended.append((kv[:, 0] @ q[row]).softmax(0) @ kv[:, 1])
            x = x + torch.stack(attended)
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.embedding @ row for row in hidden])

    def hidden_of(self, token_ids: list[int]) -> torch.Tensor:
        """Compute the hidden states without pages, chunks or batches. Shapes: [T, E]."""
        x = self.embedding[token_ids] + self.positions[: len(token_ids)]
        for weights in self.weights:
            q, k, v = (torch.stack([row @ weight for row in x]) for weight in weights)
            attended = [(k[: i + 1] @ q[i]).softmax(0) @ v[: i + 1] for i in range(len(token_ids))]
            x = x + torch.stack(attended)
        return x


def tokens_of(results: list[RequestResult]) -> list[int]:
    """Return all tokens of a request's results."""
    return [token_id for item in results for token_id in item.token_ids]


class Submitting:
    """Submits and collects one step of a runner, as an executor does."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.outputs: list[SchedulerOutput] = []

    def submit(self, output: SchedulerOutput) -> None:
        self.outputs.append(output)

    def collect(self) -> StepResult:
        return self.runner.run(self.outputs[-1])


def run_to_end(
    scheduler: Scheduler, executor: Any, requests: list[Request], *, one_per_step: bool = False
) -> tuple[dict[str, list[RequestResult]], list[SchedulerOutput]]:
    """Drive requests until all have finished, with steps in flight: results per request, and the steps."""
    waiting = list(requests)
    results: dict[str, list[RequestResult]] = {}
    outputs, in_flight = [], deque[SchedulerOutput]()
    while waiting or scheduler.has_unfinished:
        while waiting:
            scheduler.add_request(waiting.pop(0))
            if one_per_step:
                break
        while len(in_flight) < scheduler.config.max_in_flight and (output := scheduler.schedule()).scheduled:
            executor.submit(output)
            in_flight.append(output)
        assert in_flight, "the scheduler is stuck"
        result, output = executor.collect(), in_flight.popleft()
        scheduler.update(output, result)
        check_integrity(scheduler)
        outputs.append(output)
        for item in result.results:
            results.setdefault(item.request_id, []).append(item)
        assert len(outputs) < 2000, "the engine makes no progress"
    return results, outputs
