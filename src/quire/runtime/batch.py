"""The worker's record of each request, the layout of a step, from a `SchedulerOutput` to rows and positions, and the
tokens that a request gets in it.

Tokens and block tables are rows of persistent arrays, so that a batch is gathered by a few indexing operations; Python
loops only over requests. It must not know models. Next to read: `forward.py`.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.adapter import Adapter
from quire.config import SchedulerConfig
from quire.errors import EngineError, QuireError
from quire.sampling.state import SamplingState
from quire.types import (
    Draft,
    NewRequest,
    RequestResult,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
    find_stop,
)

if TYPE_CHECKING:
    import torch

    from quire.layers.forward_batch import ForwardBatch
    from quire.runtime.cache_engine import CacheEngine

MAX_AHEAD = 8
"""Columns behind the longest sequence, where layers that predict further tokens look for what is not known yet."""


@dataclass(slots=True)
class RequestState:
    """The worker's record of one request: as it was announced, its row in the arrays, and its number of tokens."""

    new: NewRequest
    row: int
    num_tokens: int
    sampling: SamplingState | None = None
    """None for a pooling request."""
    hidden_sum: NDArray[np.float64] | None = None
    """Mean pooling: the fp64 sum [E] over the chunks so far."""
    num_drafted: int = 0
    """Tokens whose keys and values the draft model has."""
    drafted_ids: tuple[int, ...] = ()
    """Guesses behind them whose keys and values it has too."""
    waiting: Any = None
    """The record of a `HeadDrafter`."""
    adapter: Adapter | None = None
    """In memory for this request."""
    adapter_error: QuireError | None = None
    """Why its adapter could not be read: the request ends with it."""


class RequestStates:
    """The requests that the worker knows.

    Attributes:
        tokens: [rows, max_model_len + 1 + MAX_AHEAD] int32; row r holds the known tokens of the request with that row.
        block_tables: [groups, rows, max_blocks] int32; entries after a table's end are stale but valid block ids.
        by_id: the record of each request.
        table_changes: entries of `block_tables` that changed, for a device that has a copy of it; else None.

    The arrays are zero pages until used, so rows that no request needs cost nothing.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int, has_copy: bool = False
    ) -> None:
        """`has_copy`: a device has a copy of the block tables."""
        max_blocks = -(-max_model_len // block_size) + 1
        num_columns = max_model_len + 1 + MAX_AHEAD
        self.tokens: NDArray[np.int32] = np.zeros((max_num_seqs, num_columns), np.int32)
        self.block_tables: NDArray[np.int32] = np.zeros((num_groups, max_num_seqs, max_blocks), np.int32)
        self.by_id: dict[str, RequestState] = {}
        self.table_changes: list[tuple[int, tuple[int, ...]]] | None = [] if has_copy else None
        self._free_rows = list(range(max_num_seqs))[::-1]

    @classmethod
    def of(cls, config: SchedulerConfig, *, has_copy: bool = False) -> "RequestStates":
        """Return room for the requests of a configuration."""
        return cls(
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            num_groups=len(config.kv_cache_groups),
            has_copy=has_copy,
        )

    def __getitem__(self, request_id: str) -> RequestState:
        state = self.by_id.get(request_id)
        if state is None:
            raise EngineError(f"request {request_id!r} was scheduled, but the runner was never told of it")
        return state

    def apply(self, output: SchedulerOutput) -> list[RequestState]:
        """Forget and add requests, append tokens, change block tables. Returns the records of the scheduled requests.

        The first update of a new request's block table is the whole table, also when the request is a fork.
        """
        forgotten = tuple(self.by_id) if output.forgets_all else (*output.preempted_ids, *output.finished_ids)
        for request_id in forgotten:
            # An unknown id is fine: a request may end before it was ever scheduled.
            if (state := self.by_id.pop(request_id, None)) is not None:
                self._free_rows.append(state.row)
        for new in output.new_requests:
            self._add(new)
        return [self._advance(item) for item in output.scheduled]

    def append(self, state: RequestState, token_id: int) -> None:
        """Append a token that was sampled or, for beam search, sent by the scheduler."""
        self.tokens[state.row, state.num_tokens] = token_id
        state.num_tokens += 1
        sampling = state.sampling
        if sampling is None:
            return
        if sampling.follows_tokens:
            sampling.append(token_id)
        else:
            sampling.num_tokens += 1

    def take_table_changes(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the places in the flattened `block_tables` that changed since the last call, each once, and their
        values."""
        changes, self.table_changes = self.table_changes or [], []
        by_place = {place + index: value for place, ids in changes for index, value in enumerate(ids)}
        return np.array(list(by_place), np.int32), np.array(list(by_place.values()), np.int32)

    def _add(self, new: NewRequest) -> None:
        if new.request_id in self.by_id:
            raise EngineError(f"request {new.request_id!r} was announced twice")
        if not self._free_rows:
            self._grow()
        row = self._free_rows[-1]
        self.tokens[row, : len(new.token_ids)] = new.token_ids
        self._free_rows.pop()
        self.by_id[new.request_id] = RequestState(new, row, len(new.token_ids))

    def _advance(self, item: ScheduledRequest) -> RequestState:
        state = self[item.request_id]
        for token_id in item.new_token_ids:
            self.append(state, token_id)
        if item.draft_token_ids:
            stop = state.num_tokens + len(item.draft_token_ids)
            self.tokens[state.row, state.num_tokens : stop] = item.draft_token_ids
        for group_index, update in enumerate(item.block_table_updates):
            if update.block_ids:
                stop = update.start + len(update.block_ids)
                self.block_tables[group_index, state.row, update.start : stop] = update.block_ids
                if self.table_changes is not None:
                    place = (group_index * self.block_tables.shape[1] + state.row) * self.block_tables.shape[2]
                    self.table_changes.append((place + update.start, update.block_ids))
        return state

    def _grow(self) -> None:
        """Double the rows. Happens only if a scheduler runs more than max_num_seqs requests."""
        rows = self.tokens.shape[0]
        self.tokens = np.concatenate([self.tokens, np.zeros_like(self.tokens)])
        self.block_tables = np.concatenate([self.block_tables, np.zeros_like(self.block_tables)], axis=1)
        self._free_rows.extend(range(2 * rows - 1, rows - 1, -1))


@dataclass(frozen=True, slots=True)
class StepLayout:
    """A step as a flat ragged batch without padding, decodes first.

    Fields:
        computed: the scheduled requests that have tokens, in the batch's order: decodes first.
        rows, starts, counts: per entry of `computed` its row of `RequestStates`, first position, number of tokens.
        first_rows: per entry of `computed` its first row in the batch.
        sampled: the requests that sample, in the schedule's order.
        logit_rows: rows of the batch that need logits, each once; 1 + drafts for a request with drafts.
        logit_index: per entry of `sampled` its first index into `logit_rows`; None when it is 0 … S-1.
    Dtypes: int32.
    """

    computed: list[tuple[ScheduledRequest, RequestState]]
    rows: NDArray[np.int32]
    starts: NDArray[np.int32]
    counts: NDArray[np.int32]
    first_rows: list[int]
    sampled: list[tuple[ScheduledRequest, RequestState, SamplingState]]
    logit_rows: NDArray[np.int32]
    logit_index: list[int] | None

    def of_next_iteration(self) -> "StepLayout":
        """Return the layout of the same decodes, one token further."""
        return dataclasses.replace(self, starts=self.starts + np.int32(1))


def lay_out(output: SchedulerOutput, states: list[RequestState]) -> StepLayout:
    """Order one step. At least one scheduled request must have tokens. `states`: those of `output.scheduled`."""
    scheduled = list(zip(output.scheduled, states, strict=True))
    computed = [pair for pair in scheduled if pair[0].num_tokens == 1]
    if len(computed) != len(scheduled):
        computed += [pair for pair in scheduled if pair[0].num_tokens > 1]
    counts = [item.num_tokens for item, _ in computed]
    ends = list(itertools.accumulate(counts))
    sampled = [(item, state, state.sampling) for item, state in scheduled if item.max_new_tokens and state.sampling]
    logit_rows, logit_index = _rows_that_sample(sampled, computed, ends)
    return StepLayout(
        computed,
        np.array([state.row for _, state in computed], np.int32),
        np.array([item.num_computed_tokens for item, _ in computed], np.int32),
        np.array(counts, np.int32),
        [0, *ends[:-1]],
        sampled,
        np.array(logit_rows, np.int32),
        logit_index,
    )


def _rows_that_sample(
    sampled: list[tuple[ScheduledRequest, RequestState, SamplingState]],
    computed: list[tuple[ScheduledRequest, RequestState]],
    ends: list[int],
) -> tuple[list[int], list[int] | None]:
    """Return `logit_rows` and `logit_index` of the layout."""
    last_rows = {item.request_id: end - 1 for (item, _), end in zip(computed, ends, strict=True)}
    index_of: dict[str, int] = {}
    logit_rows: list[int] = []
    logit_index: list[int] = []
    for item, _, _ in sampled:
        # A sibling has no row of its own in the step that forks it.
        owner = item.logits_from or item.request_id
        if owner not in index_of:
            index_of[owner] = len(logit_rows)
            last = last_rows[owner]
            logit_rows.extend(range(last - len(item.draft_token_ids), last + 1))
        logit_index.append(index_of[owner])
    return logit_rows, None if len(index_of) == len(sampled) == len(logit_rows) else logit_index


@dataclass(slots=True)
class Yield:
    """The tokens of one request in this step. `has_failed`: its last row of logits left no choice."""

    state: RequestState
    sampling: SamplingState
    first_row: int
    draft_token_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    has_failed: bool = False

    @property
    def ends(self) -> bool:
        """True if the sequence ends with the last token, or has none."""
        new = self.state.new
        assert new.sampling is not None
        num_output = self.state.num_tokens - new.num_prompt_tokens - 1
        last = self.token_ids[-1:]
        return (
            self.has_failed or find_stop(new.sampling, new.eos_token_ids, new.max_tokens, num_output, last) is not None
        )

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens that a grammar forces next."""
        return self.sampling.forced if self.sampling.follows_tokens else ()

    def split_forced(self) -> tuple[int, ...]:
        """Take the drafts that the grammar forces out of the drafts, with their rows, and return them.

        Logits decide nothing where one token is allowed; they are needed if the request wants its log-probability, and
        by Mirostat, which takes note of each token's surprise.
        """
        drafts = self.draft_token_ids
        if not drafts or self.sampling.params.logprobs is not None or self.sampling.mirostat_mu is not None:
            return ()
        num_forced = 0
        for draft, forced in zip(drafts, self.forced, strict=False):
            if draft != forced:
                break
            num_forced += 1
        self.first_row, self.draft_token_ids = self.first_row + num_forced, drafts[num_forced:]
        return drafts[:num_forced]

    def forced_draft(self) -> Draft | None:
        """Return the tokens that the grammar forces next as a draft; None if it leaves a choice."""
        return Draft(self.forced, (1.0,) * len(self.forced)) if self.forced else None

    def result(self, prompt_logprobs: tuple[TokenLogprobs, ...], draft: Draft | None) -> RequestResult:
        """Return the request's result; `draft`: a guess of what follows."""
        request_id = self.state.new.request_id
        tokens, logprobs = tuple(self.token_ids), tuple(self.logprobs)
        if not self.has_failed and self.sampling.failure is None:
            mu = self.sampling.mirostat_mu
            return RequestResult(request_id, tokens, logprobs, prompt_logprobs, mirostat_mu=mu, draft=draft)
        error, code = self.sampling.explain_failure()
        return RequestResult(request_id, tokens, logprobs, error=error, error_code=code)


def drop_rows(yields: Sequence[Yield], logit_rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the rows of logits that requests still want, and point `first_row` into these. Mutates: yields."""
    needed = np.zeros(len(logit_rows), np.int32)
    for taken in yields:
        needed[taken.first_row : taken.first_row + 1 + len(taken.draft_token_ids)] = 1
    new_rows = np.cumsum(needed) - 1
    for taken in yields:
        taken.first_row = int(new_rows[taken.first_row])
    return logit_rows[needed > 0]


def build_batch(
    layout: StepLayout, states: RequestStates, cache: "CacheEngine", block_size: int, device: "torch.device"
) -> "ForwardBatch":
    """Return the tensors that a model reads op by op."""
    import torch

    from quire.layers.forward_batch import ForwardBatch

    rows = layout.rows.astype(np.int64)
    starts, query_lens = layout.starts.astype(np.int64), layout.counts.astype(np.int64)
    seq_lens = starts + query_lens

    token_rows = np.repeat(rows, query_lens)
    positions = np.arange(len(token_rows)) + np.repeat(seq_lens - np.cumsum(query_lens), query_lens)
    block_columns, offsets = np.divmod(positions, block_size)
    longest_table = -(-int(seq_lens.max()) // block_size)

    def place(array: NDArray[np.integer]) -> "torch.Tensor":
        tensor = torch.from_numpy(array)
        return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

    return ForwardBatch(
        token_ids=place(states.tokens[token_rows, positions].astype(np.int64)),
        positions=place(positions),
        block_tables=tuple(place(table[rows, :longest_table]) for table in states.block_tables),
        slot_mapping=tuple(
            place(table[token_rows, block_columns] * np.int64(block_size) + offsets) for table in states.block_tables
        ),
        kv_caches=cache.kv_caches,
        layer_groups=cache.layer_groups,
        query_lens_list=tuple(query_lens.tolist()),
        seq_lens_list=tuple(seq_lens.tolist()),
    )
