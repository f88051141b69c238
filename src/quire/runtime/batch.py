"""From a `SchedulerOutput` to the layout of a step, and from that to the `ForwardBatch` of the eager model.

All per-token work is numpy indexing; Python loops only over requests. It must not know models or sampling.
Next to read: `forward.py`.
"""

import dataclasses
import itertools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quire.layers.forward_batch import ForwardBatch
from quire.runtime.cache_engine import CacheEngine
from quire.runtime.request_states import RequestStates
from quire.types import ScheduledRequest, SchedulerOutput


@dataclass(frozen=True, slots=True)
class StepLayout:
    """One step as a flat ragged batch without padding, decodes first, and which of its rows belong to whom.

    Fields:
        computed: the scheduled requests that have tokens, in the batch's order: decodes first.
        num_decodes: how many of these have one token.
        starts, counts: per entry of `computed` its first position and its number of tokens.
        first_rows: per entry of `computed` its first row in the batch.
        sampled_ids: the requests that sample, in the schedule's order.
        logit_rows: rows of the batch whose logits they need, each once.
        logit_index: per entry of `sampled_ids` the index into `logit_rows`; None when it is 0 … S-1.
    Dtypes: int32.
    """

    computed: list[ScheduledRequest]
    num_decodes: int
    starts: NDArray[np.int32]
    counts: NDArray[np.int32]
    first_rows: list[int]
    sampled_ids: list[str]
    logit_rows: NDArray[np.int32]
    logit_index: list[int] | None

    def of_next_round(self) -> "StepLayout":
        """The same requests, one token further."""
        return dataclasses.replace(self, starts=self.starts + np.int32(1))


def lay_out(output: SchedulerOutput) -> StepLayout:
    """Order one step. At least one scheduled request must have tokens."""
    decodes = [item for item in output.scheduled if item.num_tokens == 1]
    computed = decodes
    if len(decodes) != len(output.scheduled):
        computed = decodes + [item for item in output.scheduled if item.num_tokens > 1]
    counts = [item.num_tokens for item in computed]
    ends = list(itertools.accumulate(counts))
    sampled_ids, logit_rows, logit_index = _rows_that_sample(output, computed, ends)
    return StepLayout(
        computed,
        len(decodes),
        np.array([item.num_computed_tokens for item in computed], np.int32),
        np.array(counts, np.int32),
        [0, *ends[:-1]],
        sampled_ids,
        np.array(logit_rows, np.int32),
        logit_index,
    )


def build_batch(
    layout: StepLayout, states: RequestStates, cache: CacheEngine, block_size: int, device: torch.device
) -> ForwardBatch:
    """The tensors that a model reads op by op. `states` must have seen the step."""
    computed = layout.computed
    starts, query_lens = layout.starts.astype(np.int64), layout.counts.astype(np.int64)
    rows = np.array([states[item.request_id].row for item in computed], np.int64)
    query_start_loc = np.zeros(len(computed) + 1, np.int64)
    np.cumsum(query_lens, out=query_start_loc[1:])
    seq_lens = starts + query_lens

    token_rows = np.repeat(rows, query_lens)
    positions = np.arange(query_start_loc[-1]) - np.repeat(query_start_loc[:-1] - starts, query_lens)
    block_columns, offsets = np.divmod(positions, block_size)
    longest_table = -(-int(seq_lens.max()) // block_size)

    def place(array: NDArray[np.integer]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

    return ForwardBatch(
        token_ids=place(states.tokens[token_rows, positions].astype(np.int64)),
        positions=place(positions),
        query_start_loc=place(query_start_loc.astype(np.int32)),
        seq_lens=place(seq_lens.astype(np.int32)),
        block_tables=tuple(place(table[rows, :longest_table]) for table in states.block_tables),
        slot_mapping=tuple(
            place(table[token_rows, block_columns] * np.int64(block_size) + offsets) for table in states.block_tables
        ),
        logit_rows=place(layout.logit_rows.astype(np.int64)),
        kv_caches=cache.kv_caches,
        layer_groups=cache.layer_groups,
        query_lens_list=tuple(query_lens.tolist()),
        seq_lens_list=tuple(seq_lens.tolist()),
        block_size=block_size,
    )


def _rows_that_sample(
    output: SchedulerOutput, computed: list[ScheduledRequest], ends: list[int]
) -> tuple[list[str], list[int], list[int] | None]:
    """Requests that sample, the rows whose logits they need (each once), and which of these each one uses."""
    last_rows = {item.request_id: end - 1 for item, end in zip(computed, ends, strict=True)}
    index_of: dict[str, int] = {}
    logit_index = []
    sampled_ids = []
    for item in output.scheduled:
        if item.samples:
            # A sibling has no row of its own in the step that forks it.
            owner = item.logits_from or item.request_id
            logit_index.append(index_of.setdefault(owner, len(index_of)))
            sampled_ids.append(item.request_id)
    logit_rows = [last_rows[owner] for owner in index_of]
    return sampled_ids, logit_rows, None if len(index_of) == len(sampled_ids) else logit_index
