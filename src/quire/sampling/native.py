"""Tokens from rows of logits on a CPU, by the native sampler: one call per step for all rows.

Each request's options are kept as native options; a step changes only positions and lists that grew. It agrees with
`reference.py`: same order of options, same random numbers; tokens differ only where the last bits of weights decide.
At the edge of top_k or top_p it compares logits and the reference compares probabilities, where unequal logits may
round to the same. Must not know how tokens are chosen. Next to read: `native/sampling/row.cpp`.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from quire import _native
from quire.sampling.state import Sampled, SamplingState, position_logprobs
from quire.sampling.token_history import MAX_REPETITION, MIN_REPETITION
from quire.sampling_params import ALL_LOGPROBS
from quire.types import TokenLogprobs

_ALL = np.empty(0, np.int64)
"""An empty list allows everything."""
_NO_TOKEN = np.array([-1], np.int64)
_MAX_REPORTED = 4 * 1024 * 1024
"""Most log-probabilities of one native call: bounds its memory when the whole vocabulary is asked for."""


class NativeRowSampler:
    """Chooses tokens on the threads of a pool; without one, on the caller's. Attributes: `native`: what computes."""

    def __init__(self, vocab_size: int, pool: _native.ThreadPool | None = None) -> None:
        self._vocab_size = vocab_size
        self.native = _native.Sampler(vocab_size, pool)
        self._make_room(32)

    def add(self, state: SamplingState) -> None:
        """Prepare a request: keep its options in the state."""
        state.options = _Row(state, self._vocab_size)

    def sample(self, logits: Any, states: Sequence[SamplingState]) -> list[Sampled]:
        """See `Sampler.sample`. Mutates: logits, but they are as before when it returns."""
        values = self._checked(logits, len(states))
        address, stride = values.ctypes.data, values.strides[0] // values.itemsize
        if not states:
            return []
        rows, options, num_top = [], [], -1
        for state in states:
            row: _Row = state.options
            row.options.position = state.num_tokens
            if row.changes:
                row.update(state)
            rows.append(row)
            options.append(row.options)
            num_top = max(num_top, row.num_top)
        if len(states) > len(self._token_ids):
            self._make_room(len(states))
        if num_top < 0:
            self.native.sample(address, stride, options, self._token_ids_address)
            return list(zip(self._chosen(len(states)), repeat(None)))
        out = _Reported(len(states), num_top)
        self.native.sample(address, stride, options, self._token_ids_address, *out.addresses, num_top)
        return [
            (token_id, None if token_id is None or row.num_top < 0 else out.logprobs(index, token_id, row.num_top))
            for index, (token_id, row) in enumerate(zip(self._chosen(len(states)), rows, strict=True))
        ]

    def sample_at(
        self, logits: npt.NDArray[np.float32], states: Sequence[SamplingState], positions: Sequence[int]
    ) -> npt.NDArray[np.int32]:
        """Return the next token of each row; -1 for a row without one. No request wants its log-probability.

        `positions`: of the draws, which may be ahead of the states'. Mutates: logits, but they are as before.
        """
        values = self._checked(logits, len(states))
        found: npt.NDArray[np.int32] = np.empty(len(states), np.int32)
        options = []
        for state, position in zip(states, positions, strict=True):
            row: _Row = state.options
            if row.changes:
                row.update(state)
            row.options.position = position
            options.append(row.options)
        self.native.sample(values.ctypes.data, values.strides[0] // values.itemsize, options, found.ctypes.data)
        return found

    def sample_best(
        self, keys: npt.NDArray[np.uint64], num_keys: npt.NDArray[np.int64], states: Sequence[SamplingState]
    ) -> list[int | None]:
        """Choose the next token of each row from keys of its largest logits, in any order; see `table.h`.

        Each request must want no other tokens, and unchanged logits. Shapes: keys: `num_keys` [S] of each row, one row
        after another. Mutates: keys.
        """
        if len(states) > len(self._token_ids):
            self._make_room(len(states))
        options = []
        for state in states:
            row: _Row = state.options
            row.options.position = state.num_tokens
            options.append(row.options)
        self.native.sample_best(keys.ctypes.data, num_keys.ctypes.data, options, self._token_ids_address)
        return self._chosen(len(states))

    def logprobs(self, logits: Any, token_ids: Sequence[int], num: int) -> list[TokenLogprobs]:
        """See `ReferenceRowSampler.logprobs`."""
        num_top = _num_top(num, self._vocab_size)
        values = self._checked(logits, len(token_ids))
        ids = np.array(token_ids, np.int32)
        found: list[TokenLogprobs] = []
        num_rows = max(1, _MAX_REPORTED // max(num_top, 1))
        for start in range(0, len(ids), num_rows):
            some, some_ids = values[start : start + num_rows], ids[start : start + num_rows]
            out = _Reported(len(some_ids), num_top)
            self.native.logprobs(
                some.ctypes.data,
                some.strides[0] // some.itemsize,
                len(some_ids),
                some_ids.ctypes.data,
                *out.addresses,
                num_top,
            )
            found += [out.logprobs(index, token_id, num_top) for index, token_id in enumerate(some_ids.tolist())]
        return found

    def _make_room(self, num_rows: int) -> None:
        self._token_ids: npt.NDArray[np.int32] = np.empty(num_rows, np.int32)
        self._token_ids_address = self._token_ids.ctypes.data

    def _chosen(self, num_rows: int) -> list[int | None]:
        """Return the tokens of all rows; None for a row without one."""
        found = self._token_ids[:num_rows].tolist()
        return [None if token_id < 0 else token_id for token_id in found] if min(found) < 0 else found

    def _checked(self, logits: Any, num_rows: int) -> npt.NDArray[np.float32]:
        """Return `logits`, an array or a tensor, with consecutive values in each row; asserts shape and dtype."""
        values = np.asarray(logits)
        assert values.shape == (num_rows, self._vocab_size)
        assert values.dtype == np.float32
        return values if values.strides[1] == values.itemsize else np.ascontiguousarray(values)


class _Row:
    """Options of a request, and the arrays whose addresses they hold."""

    def __init__(self, state: SamplingState, vocab_size: int) -> None:
        params = state.params
        self.num_top = -1 if params.logprobs is None else _num_top(params.logprobs, vocab_size)
        """Likeliest tokens to report; -1: no log-probabilities at all."""
        self._counts = state.counts
        self._may_ban = state.varies_bans or state.bans_end
        self.changes = self._counts is not None or self._may_ban or state.has_grammar
        """True if `update` must be called before each step."""
        self.options = options = _native.RowOptions()
        options.temperature = 0.0 if params.is_greedy else params.temperature
        options.min_p, options.top_p = params.min_p, params.top_p
        options.top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        options.seed = state.seed & (2**64 - 1)
        options.wants_logprobs = self.num_top >= 0
        options.num_top = max(self.num_top, 0)
        options.repetition_penalty = min(max(params.repetition_penalty, MIN_REPETITION), MAX_REPETITION)
        options.frequency_penalty, options.presence_penalty = params.frequency_penalty, params.presence_penalty
        if not state.has_grammar and state.allowed is not None:
            self._allow(state.allowed)
        if params.logit_bias:
            self._biased = _ids(list(params.logit_bias))
            self._biases: npt.NDArray[np.float32] = np.array(list(params.logit_bias.values()), np.float32)
            options.bias(self._biased.ctypes.data, self._biases.ctypes.data, len(self._biased))
        if not state.has_grammar:
            self._ban(state)

    def update(self, state: SamplingState) -> None:
        """Follow the tokens that were appended."""
        if self._counts is not None:
            self.options.penalise(*self._counts.addresses, len(self._counts))
        if state.has_grammar:
            self._allow(state.allowed)
        if self._may_ban and (state.varies_bans or state.has_grammar or not state.bans_end):
            self._ban(state)
            self._may_ban = state.varies_bans or (state.has_grammar and state.bans_end)
            self.changes = self._counts is not None or self._may_ban or state.has_grammar

    def _allow(self, token_ids: npt.NDArray[np.int64] | None) -> None:
        self._allowed = _ALL if token_ids is None else token_ids if len(token_ids) else _NO_TOKEN
        self.options.allow(self._allowed.ctypes.data, len(self._allowed))

    def _ban(self, state: SamplingState) -> None:
        self._banned = _ids(list(state.banned_next()))
        self.options.ban(self._banned.ctypes.data, len(self._banned))


class _Reported:
    """Memory for log-probabilities of a call: of each row's token and of its likeliest ones."""

    def __init__(self, num_rows: int, num_top: int) -> None:
        self._values = np.empty(num_rows, np.float32)
        self._ranks = np.empty(num_rows, np.int64)
        self._top_ids = np.empty((num_rows, num_top), np.int32)
        self._top_values = np.empty((num_rows, num_top), np.float32)
        arrays = (self._values, self._ranks, self._top_ids, self._top_values)
        values, ranks, top_ids, top_values = (array.ctypes.data for array in arrays)
        self.addresses = (values, ranks, top_ids, top_values)

    def logprobs(self, row: int, token_id: int, num_top: int) -> TokenLogprobs:
        """Return the log-probabilities of one row."""
        top_ids, top_values = self._top_ids[row, :num_top].tolist(), self._top_values[row, :num_top].tolist()
        return position_logprobs(token_id, float(self._values[row]), int(self._ranks[row]), top_ids, top_values)


def _num_top(num: int, vocab_size: int) -> int:
    return vocab_size if num == ALL_LOGPROBS else min(num, vocab_size)


def _ids(token_ids: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(token_ids, np.int64)
