"""From a `SchedulerOutput` and the requests' tokens and block tables to one `ForwardBatch`.

All per-token work is numpy indexing; Python loops only over requests. It must not know models or sampling.
Next to read: `model_runner.py`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quire.layers.forward_batch import ForwardBatch
from quire.runtime.cache_engine import CacheEngine
from quire.runtime.request_states import RequestStates
from quire.types import ScheduledRequest, SchedulerOutput


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's `ForwardBatch`, and which of its rows belong to whom.

    Fields:
        computed: the scheduled requests that have tokens, in the batch's order: decodes first.
        first_rows: per entry of `computed` its first row in the batch.
        sampled_ids: the requests that sample, in the schedule's order.
        logit_index: per entry of `sampled_ids` the index into `forward.logit_rows`; None when it is 0 … S-1.
    """

    forward: ForwardBatch
    computed: list[ScheduledRequest]
    first_rows: list[int]
    sampled_ids: list[str]
    logit_index: list[int] | None


def build_batch(
    output: SchedulerOutput, states: RequestStates, cache: CacheEngine, block_size: int, device: torch.device
) -> StepBatch:
    """Lay out one step: flat, ragged, no padding, decodes first.

    At least one scheduled request must have tokens. `states` must have seen `output`.
    """
    decodes = [item for item in output.scheduled if item.num_tokens == 1]
    computed = decodes + [item for item in output.scheduled if item.num_tokens > 1]
    query_lens_list = [item.num_tokens for item in computed]
    starts = np.array([item.num_computed_tokens for item in computed], np.int64)
    query_lens = np.array(query_lens_list, np.int64)
    rows = np.array([states[item.request_id].row for item in computed], np.int64)
    query_start_loc = np.zeros(len(computed) + 1, np.int64)
    np.cumsum(query_lens, out=query_start_loc[1:])
    seq_lens = starts + query_lens

    token_rows = np.repeat(rows, query_lens)
    positions = np.arange(query_start_loc[-1]) - np.repeat(query_start_loc[:-1] - starts, query_lens)
    block_columns, offsets = np.divmod(positions, block_size)
    longest_table = -(-int(seq_lens.max()) // block_size)
    first_rows = query_start_loc[:-1].tolist()
    sampled_ids, logit_rows, logit_index = _rows_that_sample(output, computed, query_start_loc)

    def place(array: NDArray[np.integer]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

    forward = ForwardBatch(
        token_ids=place(states.tokens[token_rows, positions].astype(np.int64)),
        positions=place(positions),
        query_start_loc=place(query_start_loc.astype(np.int32)),
        seq_lens=place(seq_lens.astype(np.int32)),
        block_tables=tuple(place(table[rows, :longest_table]) for table in states.block_tables),
        slot_mapping=tuple(
            place(table[token_rows, block_columns] * np.int64(block_size) + offsets) for table in states.block_tables
        ),
        logit_rows=place(logit_rows),
        kv_caches=cache.kv_caches,
        layer_groups=cache.layer_groups,
        query_lens_list=tuple(query_lens_list),
        seq_lens_list=tuple(seq_lens.tolist()),
        num_decodes=len(decodes),
        block_size=block_size,
    )
    return StepBatch(forward, computed, first_rows, sampled_ids, logit_index)


def _rows_that_sample(
    output: SchedulerOutput, computed: list[ScheduledRequest], query_start_loc: NDArray[np.int64]
) -> tuple[list[str], NDArray[np.int64], list[int] | None]:
    """Requests that sample, the rows whose logits they need (each once), and which of these each one uses."""
    last_rows = dict(zip([item.request_id for item in computed], (query_start_loc[1:] - 1).tolist(), strict=True))
    index_of: dict[str, int] = {}
    logit_index = []
    sampled_ids = []
    for item in output.scheduled:
        if item.samples:
            # A sibling has no row of its own in the step that forks it.
            owner = item.logits_from or item.request_id
            logit_index.append(index_of.setdefault(owner, len(index_of)))
            sampled_ids.append(item.request_id)
    logit_rows = np.array([last_rows[owner] for owner in index_of], np.int64)
    return sampled_ids, logit_rows, None if len(index_of) == len(sampled_ids) else logit_index
