"""`StepMemory`: what a step is made of, on the device. Its addresses never change, so that a captured graph reads it.

The host sends one packed copy per step, and the block table entries that changed. Tokens that were sampled on the
device stay there: the next step finds each request's last one in `last_tokens`.
Next to read: `ops.py`, whose operations read it, then `plan.py`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from quire.config import SchedulerConfig
from quire.errors import EngineError
from quire.runtime.batch import RequestStates, StepLayout

NUM_COPIES = 3
"""Host buffers of a step: two steps are in flight while a third is laid out."""
UNKNOWN = -1
"""In place of a token that is known on the device only."""


class StepMemory:
    """The tensors of a step. Dtypes: int32.

    Attributes:
        starts, counts, first_rows, rows: [R] per request of the step: first new position, number of new tokens, first
            row of the step, row of `tables` and `last_tokens`. Requests that the step lacks have no tokens.
        logit_rows: [S] rows of the step whose logits are wanted.
        given: [T] token ids that the host knows, else `UNKNOWN`.
        tables: [groups, rows, M] block tables of all requests. last_tokens: [rows] the token sampled last.
        token_ids, positions, request_of: [T]; slots: [groups, T]; num_tokens: [1]: gathered from these at the start of
            a step. Rows beyond `num_tokens` have token 0, position 0 and slot -1.
        max_queries: most new tokens of a request that counts as a decode. has_decodes, has_prompts: of the step.
    """

    def __init__(self, config: SchedulerConfig, max_tokens: int, max_logit_rows: int, device: torch.device) -> None:
        num_requests = self.max_requests = config.max_num_seqs
        self.block_size, self.device = config.block_size, device
        max_blocks = -(-config.max_model_len // config.block_size) + 1
        self.longest = max_blocks * config.block_size
        """Positions that a block table holds."""
        sizes = [num_requests] * 4 + [max_logit_rows, max_tokens]
        self._packed = self._make(sum(sizes))
        parts = self._packed.split(sizes)
        self.starts, self.counts, self.first_rows, self.rows, self.logit_rows, self.given = parts
        self.tables = self._make(len(config.kv_cache_groups), num_requests, max_blocks)
        self.last_tokens = self._make(num_requests)
        self.token_ids, self.positions, self.request_of = (self._make(max_tokens) for _ in range(3))
        self.slots = self._make(len(config.kv_cache_groups), max_tokens)
        self.num_tokens = self._make(1)
        self.max_queries, self.has_decodes, self.has_prompts = 1, True, True
        self._hosts = [self._make_host(sum(sizes)) for _ in range(NUM_COPIES)]
        self._num_described = 0

    def _make(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def _make_host(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=self.device.type == "cuda")

    def describe(self, layout: StepLayout, states: RequestStates, known: Sequence[int] | None = None) -> None:
        """Send the layout of a step. `known`: per computed request its number of tokens that the host knows; None: all.

        Mutates: states, whose changed table entries have been sent then.
        """
        if len(states.tokens) > self.max_requests:
            raise EngineError(f"a step has more than max_num_seqs={self.max_requests} requests")
        self._send_tables(states)
        host = self._hosts[self._num_described % NUM_COPIES]
        self._num_described += 1
        num_requests, num_logit_rows = len(layout.rows), len(layout.logit_rows)
        are_decodes = layout.counts <= self.max_queries
        self.has_decodes, self.has_prompts = bool(are_decodes.any()), not are_decodes.all()
        values, most, top = host.numpy(), self.max_requests, 4 * self.max_requests
        values[:top] = 0
        for index, part in enumerate((layout.starts, layout.counts, layout.first_rows, layout.rows)):
            values[index * most : index * most + num_requests] = part
        values[top : top + num_logit_rows] = layout.logit_rows
        top += len(self.logit_rows)
        given = given_tokens(layout, states, known)
        end = top + len(given)
        values[top:end] = given
        self._packed[:end].copy_(host[:end], non_blocking=True)

    def _send_tables(self, states: RequestStates) -> None:
        places, block_ids = states.take_table_changes()
        if not len(places):
            return
        both = self._make_host(2 * len(places))
        both.numpy()[:] = np.concatenate((places, block_ids))
        at, ids = both.to(self.device, non_blocking=True).split(len(places))
        self.tables.view(-1).index_copy_(0, at.long(), ids)

    def gather(self, num_rows: int) -> None:
        """Make token ids, positions and slots of a step of `num_rows` rows, padding included, without a host read."""
        ends = self.counts.cumsum(0, dtype=torch.int32)
        self.num_tokens.copy_(ends[-1:])
        row = torch.arange(num_rows, dtype=torch.int32, device=self.device)
        request = torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)
        real = row < ends[-1]
        position = torch.where(real, self.starts[request] + row - self.first_rows[request], 0)
        table_row = self.rows[request]
        self.request_of[:num_rows] = request.to(torch.int32)
        self.positions[:num_rows] = position
        given = self.given[:num_rows]
        token = torch.where(given >= 0, given, self.last_tokens[table_row])
        # A request whose last row of logits left no choice has no token: any id will do, its result is dropped.
        self.token_ids[:num_rows] = torch.where(real, token.clamp(min=0), 0)
        for table, slots in zip(self.tables, self.slots, strict=True):
            slot = table[table_row, position // self.block_size] * self.block_size + position % self.block_size
            slots[:num_rows] = torch.where(real, slot, -1)


def given_tokens(layout: StepLayout, states: RequestStates, known: Sequence[int] | None) -> NDArray[np.int32]:
    """Return the token of each row of a step, `UNKNOWN` where the device alone knows it. Shapes: -> [T]."""
    token_rows = np.repeat(layout.rows, layout.counts)
    ends = np.cumsum(layout.counts)
    positions = np.arange(len(token_rows)) + np.repeat(layout.starts + layout.counts - ends, layout.counts)
    given: NDArray[np.int32] = states.tokens[token_rows, positions]
    if known is not None:
        given[positions >= np.repeat(np.asarray(known, np.int64), layout.counts)] = UNKNOWN
    return given
