"""`RequestStates`: what the runner remembers of each request between steps: its tokens and block tables.

Both are rows of persistent arrays, so that a batch is gathered by a few indexing operations and not by a loop over
tokens. It must not know models or sampling.
Next to read: `batch.py`, which gathers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.errors import EngineError
from quire.types import NewRequest, ScheduledRequest, SchedulerOutput


@dataclass(slots=True)
class RequestState:
    """One request: how it was announced, its row in the arrays, and the number of tokens known."""

    new: NewRequest
    row: int
    num_tokens: int


class RequestStates:
    """Tokens and block tables of all requests the runner knows.

    Attributes:
        tokens: [rows, max_model_len + 1] int32; row r holds the known tokens of the request with that row.
        block_tables: [groups, rows, max_blocks] int32; entries after a table's end are stale but valid block ids.
        highest_block: the highest block id of any table so far.

    The arrays are zero pages until used, so that rows which no request needs cost nothing.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int) -> None:
        max_blocks = -(-max_model_len // block_size) + 1
        self.tokens: NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.block_tables: NDArray[np.int32] = np.zeros((num_groups, max_num_seqs, max_blocks), np.int32)
        self.highest_block = 0
        self._states: dict[str, RequestState] = {}
        self._free_rows = list(range(max_num_seqs))[::-1]

    def __getitem__(self, request_id: str) -> RequestState:
        state = self._states.get(request_id)
        if state is None:
            raise EngineError(f"request {request_id!r} was scheduled, but the runner was never told of it")
        return state

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def __len__(self) -> int:
        return len(self._states)

    def forgotten_by(self, output: SchedulerOutput) -> tuple[str, ...]:
        """The requests of which nothing must be remembered from this step on."""
        return tuple(self._states) if output.forgets_all else (*output.preempted_ids, *output.finished_ids)

    def apply(self, output: SchedulerOutput) -> None:
        """Forget, add, append tokens, change block tables: all that a step says of requests.

        The first update of a new request's block table is the whole table, also when the request is a fork.
        """
        for request_id in self.forgotten_by(output):
            # An unknown id is fine: a request may end before it was ever scheduled.
            if (state := self._states.pop(request_id, None)) is not None:
                self._free_rows.append(state.row)
        for new in output.new_requests:
            self._add(new)
        for item in output.scheduled:
            self._advance(item)

    def append(self, request_id: str, token_id: int) -> None:
        """Note a token that was sampled here and is computed next, before the scheduler hears of it."""
        state = self[request_id]
        self.tokens[state.row, state.num_tokens] = token_id
        state.num_tokens += 1

    def token_slice(self, request_id: str, start: int, stop: int) -> NDArray[np.int32]:
        """A view of the known tokens at positions start … stop - 1."""
        return self.tokens[self[request_id].row, start:stop]

    def _add(self, new: NewRequest) -> None:
        if new.request_id in self._states:
            raise EngineError(f"request {new.request_id!r} was announced twice")
        if not self._free_rows:
            self._grow()
        row = self._free_rows[-1]
        self.tokens[row, : len(new.token_ids)] = new.token_ids
        self._free_rows.pop()
        self._states[new.request_id] = RequestState(new, row, len(new.token_ids))

    def _advance(self, item: ScheduledRequest) -> None:
        state = self[item.request_id]
        row = state.row
        new_token_ids = item.new_token_ids
        if new_token_ids:
            # One token is the case of every decode; a scalar store is several times faster than a slice.
            if len(new_token_ids) == 1:
                self.tokens[row, state.num_tokens] = new_token_ids[0]
            else:
                self.tokens[row, state.num_tokens : state.num_tokens + len(new_token_ids)] = new_token_ids
            state.num_tokens += len(new_token_ids)
        for group_index, update in enumerate(item.block_table_updates):
            if update.block_ids:
                stop = update.start + len(update.block_ids)
                self.block_tables[group_index, row, update.start : stop] = update.block_ids
                self.highest_block = max(self.highest_block, *update.block_ids)

    def _grow(self) -> None:
        """Double the rows. Happens only if a scheduler runs more than max_num_seqs requests."""
        rows = self.tokens.shape[0]
        self.tokens = np.concatenate([self.tokens, np.zeros_like(self.tokens)])
        self.block_tables = np.concatenate([self.block_tables, np.zeros_like(self.block_tables)], axis=1)
        self._free_rows.extend(range(2 * rows - 1, rows - 1, -1))
