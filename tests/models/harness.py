"""Run a model by hand: a KV pool, block tables, one `ForwardBatch` per step, and weights copied from Transformers.

It stands in for the scheduler and the runtime, so that a model's test fails only for the model's own faults.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import torch
from gguf.quants import quantize

from quire.cache_spec import CacheGroup, make_groups
from quire.layers.forward_batch import ForwardBatch
from quire.nn import named_parameters
from quire.runtime.eager import give_memory
from quire.runtime.loader import make_model, plan_share
from quire.weights.weight_tensor import WeightTensor

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def stored(name: str, values: torch.Tensor, format_name: str = "F32") -> WeightTensor:
    """Return a tensor as a file has it; vectors are always fp32."""
    if format_name in DTYPES or values.ndim == 1:
        plain = values.to(DTYPES.get(format_name, torch.float32)).contiguous()
        raw = plain.view(torch.uint8).numpy().reshape(math.prod(values.shape[:-1]), -1)
        return WeightTensor(name, tuple(values.shape), format_name if format_name in DTYPES else "F32", raw)
    raw = quantize(values.float().numpy(), gguf.GGMLQuantizationType[format_name])
    return WeightTensor(name, tuple(values.shape), format_name, raw)


def build_model(
    hf_config: Mapping[str, Any],
    state: Mapping[str, torch.Tensor],
    max_model_len: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Our model for a config, with a checkpoint's tensors loaded."""
    made = make_model(hf_config, max_model_len=max_model_len)
    model = give_memory(made, dtype, torch.device("cpu"), torch.empty)
    tensors = {name: stored(name, values.detach()) for name, values in state.items()}
    parameters = dict(named_parameters(model))
    for placement in plan_share(model, tensors).placements:
        rows = slice(placement.first_row, placement.first_row + placement.tensor.shape[0])
        parameters[placement.parameter_name].data[rows] = placement.tensor.to_torch(torch.float32)
    return model


@dataclass
class Stream:
    """A request: its tokens, how many of them are in the cache, and its blocks per KV cache group.

    A state group has one, whose content a request that shares a prefix copies.
    """

    token_ids: list[int]
    block_ids: list[list[int]]
    num_computed: int = 0


class Steps:
    """Requests of a model that is run by hand, and the blocks that they own."""

    block_size: int
    groups: Sequence[CacheGroup]
    free: list[int]
    streams: list[Stream]

    def step(self, work: Sequence[tuple[Stream, int]]) -> list[torch.Tensor]:
        """Compute the next tokens of each request: (request, how many). Returns logits [tokens, V] per request."""
        raise NotImplementedError

    def copy_state(self, group_index: int, source_id: int, target_id: int) -> None:
        """Copy the page of a state group."""
        raise NotImplementedError

    def add(self, token_ids: Sequence[int], shares: Stream | None = None, num_shared_blocks: int = 0) -> Stream:
        """Add a request, which may start with the computed blocks of another."""
        blocks = [[] for _ in self.groups] if shares is None else [ids[:num_shared_blocks] for ids in shares.block_ids]
        for index, (group, ids) in enumerate(zip(self.groups, blocks, strict=True)):
            if group.spec.is_state and ids:
                assert shares is not None
                assert shares.num_computed == num_shared_blocks * self.block_size
                source, ids[0] = ids[0], self.free.pop()
                self.copy_state(index, source, ids[0])
        self.streams.append(Stream(list(token_ids), blocks, num_shared_blocks * self.block_size))
        return self.streams[-1]

    def run(self, stream: Stream, chunk: int | None = None, until: int | None = None) -> torch.Tensor:
        """Compute a request's remaining tokens, or those up to a number, in chunks. Returns logits [tokens, V]."""
        logits, end = [], until or len(stream.token_ids)
        while stream.num_computed < end:
            left = end - stream.num_computed
            logits += self.step([(stream, min(chunk or left, left))])
        return torch.cat(logits)


@dataclass
class Runner(Steps):
    """A model with a KV pool of NaN. `scatter` seeds the order in which blocks are given out.

    `num_ranks`: the size of the group that the model is one rank of.
    """

    model: Any
    block_size: int = 4
    num_blocks: int = 128
    scatter: int = 0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        config, self.streams = self.model.config, []
        dtype = next(self.model.parameters()).dtype
        specs = [spec.on_rank(self.num_ranks) for spec in config.kv_specs()]
        self.kv_caches = tuple(
            torch.full((self.num_blocks, *spec.view_shape(self.block_size)), 255, dtype=torch.uint8)
            if spec.is_state
            else torch.full((self.num_blocks, *spec.view_shape(self.block_size)), torch.nan, dtype=dtype)
            for spec in specs
        )
        self.groups = make_groups(specs, self.block_size) if specs else ()
        self.free = (
            torch.randperm(self.num_blocks - 1, generator=torch.Generator().manual_seed(self.scatter)) + 1
        ).tolist()

    def copy_state(self, group_index: int, source_id: int, target_id: int) -> None:
        for layer in self.groups[group_index].layer_indices:
            self.kv_caches[layer][target_id] = self.kv_caches[layer][source_id]

    def step(self, work: Sequence[tuple[Stream, int]]) -> list[torch.Tensor]:
        order = sorted(range(len(work)), key=lambda index: work[index][1] > 1)
        scheduled = [work[index] for index in order]
        batch = self.make_batch(scheduled)
        with torch.inference_mode():
            logits = self.model.compute_logits(self.model(batch.token_ids, batch))
        for sequence, count in scheduled:
            sequence.num_computed += count
        parts = dict(zip(order, logits.split([count for _, count in scheduled]), strict=True))
        return [parts[index] for index in range(len(work))]

    def make_batch(self, scheduled: Sequence[tuple[Stream, int]]) -> ForwardBatch:
        """Give out blocks and lay out one step; requests with one token must come first."""
        counts = [count for _, count in scheduled]
        seq_lens = [sequence.num_computed + count for sequence, count in scheduled]
        spans = [range(sequence.num_computed, end) for (sequence, _), end in zip(scheduled, seq_lens, strict=True)]
        for (sequence, _), seq_len in zip(scheduled, seq_lens, strict=True):
            for group, ids in zip(self.groups, sequence.block_ids, strict=True):
                while len(ids) < group.spec.table_len(seq_len, self.block_size):
                    ids.append(self.free.pop())
        tables, slots = [], []
        for index, group in enumerate(self.groups):
            ids = [sequence.block_ids[index] for sequence, _ in scheduled]
            longest = max(map(len, ids))
            tables.append(torch.tensor([row + [0] * (longest - len(row)) for row in ids], dtype=torch.int32))
            slots.append(
                torch.tensor(
                    [
                        row[0 if group.spec.is_state else position // self.block_size] * self.block_size
                        + position % self.block_size
                        for row, span in zip(ids, spans, strict=True)
                        for position in span
                    ]
                )
            )
        layer_groups = {layer: index for index, group in enumerate(self.groups) for layer in group.layer_indices}
        tokens = [s.token_ids[position] for (s, _), span in zip(scheduled, spans, strict=True) for position in span]
        return ForwardBatch(
            token_ids=torch.tensor(tokens),
            positions=torch.tensor([position for span in spans for position in span]),
            block_tables=tuple(tables),
            slot_mapping=tuple(slots),
            kv_caches=self.kv_caches,
            layer_groups=tuple(layer_groups[layer] for layer in range(len(self.kv_caches))),
            query_lens_list=tuple(counts),
            seq_lens_list=tuple(seq_lens),
        )


def random_tokens(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1009 + length)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()
