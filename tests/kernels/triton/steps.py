"""Random steps on a device: requests with their tables and poisoned pools, described as the host does."""

import math
import random
from dataclasses import dataclass
from typing import Any

import torch

from quire.config import SchedulerConfig
from quire.runtime.device.memory import StepMemory
from quire.runtime.device.ops import KvView
from quire.runtime.device.plan import DeviceCall, RowsView
from quire.runtime.device.tiles import AttentionTile, Tiles
from quire.runtime.device.triton_ops import TritonOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TILES = Tiles(AttentionTile(32, 16, 4, 1), AttentionTile(16, 16, 4, 1), split=32, split_few=32, split_alone=32)
MAX_LEN, BLOCK = 1200, 16


@dataclass(frozen=True)
class Case:
    """Attention of one layer. `window` 0: none; `cap` 0: none."""

    kv_heads: int
    group: int
    size: int
    window: int
    cap: float
    has_sinks: bool
    has_drafts: bool

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @classmethod
    def random(cls, rng: random.Random) -> "Case":
        return cls(
            rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 4, 7]), rng.choice([16, 24, 32]), rng.choice([0, 0, 5, 20, 40]),
            rng.choice([0.0, 0.0, 3.0]), rng.random() < 0.3, rng.random() < 0.4,
        )  # fmt: skip


def make_step(num_groups: int = 1, max_requests: int = 8) -> StepMemory:
    groups: Any = (None,) * num_groups
    config = SchedulerConfig(max_requests, 512, MAX_LEN, BLOCK, 64, groups)
    return StepMemory(config, 512, 16, DEVICE)


def describe(step: StepMemory, requests: list[tuple[int, int, int]]) -> None:
    """Set a step's layout. `requests`: row, first new position and number of new tokens of each."""
    for tensor in (step.starts, step.counts, step.first_rows, step.rows):
        tensor.zero_()
    at = 0
    for index, (row, start, count) in enumerate(requests):
        step.rows[index], step.starts[index], step.counts[index], step.first_rows[index] = row, start, count, at
        at += count
    few = [count <= step.max_queries for _, _, count in requests]
    step.has_decodes, step.has_prompts = any(few), not all(few)


class Layer:
    """Keys and values of random requests in shuffled blocks of a pool that holds NaN elsewhere."""

    def __init__(self, case: Case, lengths: dict[int, int], seed: int) -> None:
        torch.manual_seed(seed)
        self.case, self.step = case, make_step()
        self.ops = TritonOps(self.step, has_drafts=case.has_drafts, tiles=TILES)
        blocks = {row: -(-length // BLOCK) for row, length in lengths.items()}
        pool = torch.full((1 + sum(blocks.values()), 2, case.kv_heads, BLOCK, case.size), math.nan)
        ids = random.Random(seed).sample(range(1, len(pool)), len(pool) - 1)
        self.dense = {}
        for row, length in lengths.items():
            own, ids = ids[: blocks[row]], ids[blocks[row] :]
            self.step.tables[0, row, : len(own)] = torch.tensor(own)
            self.dense[row] = kv = torch.randn(2, length, case.kv_heads, case.size)
            for position in range(length):
                pool[own[position // BLOCK], :, :, position % BLOCK] = kv[:, position]
        self.kv = KvView(pool.to(DEVICE).transpose(2, 3), 0)
        self.sinks = torch.randn(case.heads, device=DEVICE) if case.has_sinks else None
        self.scale = case.size**-0.5
        shape = RowsView(torch.zeros(1, case.heads * case.size))
        call = {"out": shape, "window": case.window, "num_heads": case.heads, "kv": self.kv}
        self.ops.prepare([DeviceCall("attend", self.ops.attend, call)])

    def attend(
        self, requests: list[tuple[int, int, int]], queries: dict[int, torch.Tensor], padding: int = 0
    ) -> torch.Tensor:
        """Return the results of a step by the kernels. `queries`: [tokens, H, D] by row."""
        describe(self.step, requests)
        q = torch.cat([queries[row] for row, _, _ in requests]).flatten(1).to(DEVICE)
        num_rows = len(q)
        q = torch.cat((q, torch.full((padding, q.shape[1]), math.nan, device=DEVICE)))
        out = torch.full_like(q, math.nan)
        self.ops.gather(len(q))
        self.ops.attend(
            self.step, q, 0, out, self.case.heads, self.case.window, self.scale, self.kv, self.case.cap, self.sinks
        )
        return out[:num_rows].cpu().view(num_rows, self.case.heads, self.case.size)

    def formula(self, requests: list[tuple[int, int, int]], queries: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return the results in fp64."""
        case, results = self.case, []
        for row, start, count in requests:
            k, v = self.dense[row].double().repeat_interleave(case.group, 2)
            keys, positions = torch.arange(start + count), start + torch.arange(count)[:, None]
            scores = self.scale * torch.einsum("thd,phd->thp", queries[row].double(), k[: start + count])
            if case.cap:
                scores = case.cap * torch.tanh(scores / case.cap)
            seen = keys <= positions
            if case.window:
                seen &= keys > positions - case.window
            scores = scores.masked_fill(~seen[:, None], -math.inf)
            if self.sinks is not None:
                sinks = self.sinks.cpu().double()[None, :, None].expand(count, -1, 1)
                scores = torch.cat((scores, sinks), -1)
            results.append(torch.einsum("thp,phd->thd", scores.softmax(-1)[..., : start + count], v[: start + count]))
        return torch.cat(results)
