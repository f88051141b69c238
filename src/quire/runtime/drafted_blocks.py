"""`DraftedBlocks`: which full blocks hold the draft model's keys and values, so that it knows what to compute of a hit.

Next to read: `drafter.py`.
"""

from collections.abc import Sequence

import numpy as np

from quire.config import SchedulerConfig
from quire.runtime.batch import RequestState, RequestStates
from quire.transfers import Tier
from quire.types import NULL_BLOCK_ID, SchedulerOutput


class DraftedBlocks:
    """Per block of the device and of the host whether the draft model has computed all of it.

    Blocks from the disk count as computed: most prefixes are kept there after requests that were given guesses.
    """

    def __init__(self, config: SchedulerConfig, group_index: int) -> None:
        """`group_index`: a cache group with layers of the draft model."""
        self._block_size, self._group = config.block_size, group_index
        self._is_whole = {
            Tier.DEVICE: np.zeros(config.num_blocks, np.bool_),
            Tier.HOST: np.zeros(config.num_host_blocks, np.bool_),
        }
        self._is_whole[Tier.DEVICE][NULL_BLOCK_ID] = True

    def begin_step(self, output: SchedulerOutput, states: RequestStates) -> None:
        """Note the blocks that a step fills anew or copies, and what new requests find. Mutates: states."""
        size, tables, on_device = self._block_size, states.block_tables[self._group], self._is_whole[Tier.DEVICE]
        for move in output.transfers:
            if move.group_index == self._group and move.target_tier is not Tier.DISK:
                known = move.source_tier is not Tier.DISK
                values = self._is_whole[move.source_tier][list(move.source_ids)] if known else True
                self._is_whole[move.target_tier][list(move.target_ids)] = values
        new_ids = {new.request_id for new in output.new_requests}
        for item in output.scheduled:
            state, start = states[item.request_id], item.num_computed_tokens
            first, end = -(-start // size), -(-(start + item.num_tokens + item.max_new_tokens) // size)
            on_device[tables[state.row, first:end]] = False
            on_device[NULL_BLOCK_ID] = True
            if item.request_id not in new_ids:
                continue
            if item.logits_from is not None:
                state.num_drafted = states[item.logits_from].num_drafted
                continue
            missing = np.flatnonzero(~on_device[tables[state.row, : start // size]])
            state.num_drafted = start if not len(missing) else int(missing[0]) * size

    def note(self, state: RequestState, start: int, states: RequestStates) -> None:
        """Note that the draft model has computed a request's tokens from `start` to its `num_drafted`."""
        first, end = start // self._block_size, state.num_drafted // self._block_size
        if end > first:
            self._is_whole[Tier.DEVICE][states.block_tables[self._group, state.row, first:end]] = True


def draft_group(config: SchedulerConfig, layer_indices: Sequence[int]) -> int:
    """Return the index of a cache group with one of these layers, without a window if there is one."""
    groups = [
        (group.spec.window is not None, index)
        for index, group in enumerate(config.kv_cache_groups)
        if set(group.layer_indices) & set(layer_indices)
    ]
    return min(groups)[1]
