"""Run a plan by hand: a checkpoint in memory, a KV pool of NaN, block tables, one native call per step."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from quire import _native
from quire._native import RowType, WeightFormat
from quire.config import EngineConfig, EngineOptions, Hardware
from quire.kernels.instruction import Packing
from quire.models.registry import ModelRegistry
from quire.resolve import resolve
from quire.runtime.cache_engine import CacheEngine
from quire.runtime.plan.emit import BODY, GREEDY, LOGITS, PlanLimits, PlannedModel
from quire.runtime.plan.load import load_plan
from quire.runtime.plan.lower import Program
from quire.runtime.plan.packed_weights import PackedWeights, Placement
from quire.runtime.worker import kv_layers
from quire.weights.checkpoint import Checkpoint
from quire.weights.sources import ModelFiles
from quire.weights.weight_tensor import BLOCK_FORMATS, WeightTensor
from tests.fakes import device_copy
from tests.kernels.native.packed_weights import run
from tests.models.harness import Steps, Stream, stored
from tests.weights.gguf_builder import random_rows

SCALE_OFFSETS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Offsets of a block's fp16 factors."""
NO_ROWS = np.zeros(0, np.int32)


def k_quants(name: str, num_rows: int, num_inputs: int, stored_format: str) -> WeightTensor:
    """Random bytes with ordinary scales: the gguf package cannot quantise to these formats."""
    block = BLOCK_FORMATS[stored_format]
    raw = random_rows(stored_format, num_rows, num_inputs // block.block_len)
    blocks = raw.reshape(-1, block.block_bytes)
    for index, offset in enumerate(SCALE_OFFSETS[stored_format]):
        scales = np.random.default_rng(index).uniform(0.001, 0.1, len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return WeightTensor(name, (num_rows, num_inputs), stored_format, raw)


def decoded(weights: PackedWeights, parameter: nn.Parameter) -> torch.Tensor:
    """Rows as the embedding op reads them back."""
    num_rows, width = parameter.shape
    values = torch.full((num_rows, width), torch.nan)
    plan = _native.Plan(1, num_rows, 1)
    plan.embed(weights.weight(parameter), _native.Rows(values.data_ptr(), 4 * width, RowType.f32))
    run(plan, np.arange(num_rows))
    return values


def packed(format_name: str, *tensors: WeightTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts stacked into one parameter, in one format or one each ("q4+q8"): what was packed, and what it should be."""
    expected = torch.cat([tensor.to_torch(torch.float32) for tensor in tensors])
    parameter = nn.Parameter(expected, requires_grad=False)
    names, counts = format_name.split("+"), [tensor.shape[0] for tensor in tensors]
    counts = [sum(counts)] if len(names) == 1 else counts
    parts = tuple((count, WeightFormat[name]) for count, name in zip(counts, names, strict=True))
    weights = PackedWeights({"w": parameter}, {"w": Packing(parts)})
    firsts = itertools.accumulate((tensor.shape[0] for tensor in tensors), initial=0)
    weights.fill([Placement(tensor, "w", first) for tensor, first in zip(tensors, firsts, strict=False)])
    return decoded(weights, parameter), expected


def make_checkpoint(
    hf_config: Mapping[str, Any], state: Mapping[str, torch.Tensor], formats: Mapping[str, str] | None = None
) -> Checkpoint:
    """A checkpoint of these tensors; `formats`: the format of all whose names contain the key, "" being all others."""
    chosen = formats or {}
    tensors = {}
    for name, values in state.items():
        keys = [key for key in chosen if key in name]
        tensors[name] = stored(name, values, chosen[max(keys, key=len)] if keys else "F32")
    files = ModelFiles(name="tiny", path=Path("tiny"), kind="hf", origin="test")
    return Checkpoint(files, dict(hf_config), tensors=tensors)


def make_config(hf_config: Mapping[str, Any], *, num_threads: int = 1, **options: Any) -> EngineConfig:
    chosen = {"dtype": "float32", "block_size": 16, "num_blocks_override": 64, "max_num_seqs": 8, **options}
    hardware = Hardware("cpu", 2**33, 2**33, has_fast_bfloat16=False, num_threads=num_threads)
    return resolve(EngineOptions(**chosen), hardware, ModelRegistry.make_model_config(hf_config))


class PlanRunner(Steps):
    """A plan with a KV pool of NaN. `scatter` seeds the order in which blocks are given out.

    `loaded`: that of another runner of the same config and checkpoint.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        *,
        scatter: int = 0,
        loaded: tuple[Program, PackedWeights] | None = None,
        max_requests: int = 8,
        max_logit_rows: int = 7,
    ) -> None:
        scheduler = config.scheduler
        self.config, self.block_size, self.groups = config, scheduler.block_size, scheduler.kv_cache_groups
        self.cache = CacheEngine(config)
        # Bytes of 255 are NaN in every type, and a scale of NaN for int8. The null block too: nothing may read it.
        self.cache.pool.view(torch.uint8).fill_(255)
        self.loaded = loaded or load_plan(config, checkpoint, self.cache.layer_groups)
        program, weights = self.loaded
        limits = PlanLimits(scheduler.max_num_batched_tokens, max_requests, max_logit_rows)
        layers = kv_layers(config, self.cache)
        self.planned = PlannedModel(program, weights, layers, limits, config.hardware.num_threads)
        num_groups, max_len = len(scheduler.kv_cache_groups), scheduler.max_model_len
        self.tokens = np.full((max_requests, max_len + 1), -1, np.int32)
        self.tables = np.zeros((num_groups, max_requests, -(-max_len // self.block_size) + 1), np.int32)
        generator = torch.Generator().manual_seed(scatter)
        self.free = (torch.randperm(scheduler.num_blocks - 1, generator=generator) + 1).tolist()
        self.streams: list[Stream] = []

    def add(self, token_ids: Sequence[int], shares: Stream | None = None, num_shared_blocks: int = 0) -> Stream:
        self.tokens[len(self.streams), : len(token_ids)] = token_ids
        return super().add(token_ids, shares, num_shared_blocks)

    def copy_state(self, group_index: int, source_id: int, target_id: int) -> None:
        self.cache.transfer([device_copy(group_index, source_id, target_id)])

    def step(self, work: Sequence[tuple[Stream, int]]) -> list[torch.Tensor]:
        counts = [count for _, count in work]
        for stream, count in work:
            row = self._row(stream)
            for index, (group, ids) in enumerate(zip(self.groups, stream.block_ids, strict=True)):
                while len(ids) < group.spec.table_len(stream.num_computed + count, self.block_size):
                    ids.append(self.free.pop())
                self.tables[index, row, : len(ids)] = ids
        rows = np.array([self._row(stream) for stream, _ in work], np.int32)
        starts = np.array([stream.num_computed for stream, _ in work], np.int32)
        self.planned.run(BODY, rows, starts, np.array(counts, np.int32), NO_ROWS, self.tokens, self.tables)
        for stream, count in work:
            stream.num_computed += count
        return list(self.logits(sum(counts)).split(counts))

    def logits(self, num_rows: int) -> torch.Tensor:
        """Return the logits of the last step; checks the likeliest tokens against them. Shapes: [num_rows, V]."""
        parts = []
        for first in range(0, num_rows, self.planned.limits.max_logit_rows):
            last = min(first + self.planned.limits.max_logit_rows, num_rows)
            rows = np.arange(first, last, dtype=np.int32)
            for part in (GREEDY, LOGITS):
                self.planned.run(part, NO_ROWS, NO_ROWS, NO_ROWS, rows, self.tokens, self.tables)
            found = torch.tensor(self.planned.logits[: len(rows)])
            if found.isfinite().all():
                assert self.planned.best_ids[: len(rows)].tolist() == found.argmax(-1).tolist()
            parts.append(found)
        return torch.cat(parts)

    def _row(self, stream: Stream) -> int:
        return next(row for row, other in enumerate(self.streams) if other is stream)
