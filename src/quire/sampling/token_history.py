"""Lists that sampling options keep of a request's tokens: counts for penalties, sequences of `bad_words`.

They grow by one token per step and are never rebuilt. Next to read: `state.py`, which owns them.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

MIN_REPETITION, MAX_REPETITION = 1e-30, 1e30
"""Repetition penalties are clipped to these: beyond, fp32 logits would become infinite, or NaN at 0."""
_INITIAL_CAPACITY = 64


class TokenCounts:
    """Distinct tokens of one request and the times each was generated, as growing arrays.

    `ids`: int64 [U] and `counts`: fp32 [U], in order of first appearance; a prompt token that was not generated yet
    counts 0. `addresses`: of both arrays, valid until the next `add`.
    """

    def __init__(self, prompt_ids: Iterable[int] = ()) -> None:
        distinct = list(dict.fromkeys(prompt_ids))
        self._slots = {token_id: slot for slot, token_id in enumerate(distinct)}
        capacity = max(_INITIAL_CAPACITY, 2 * len(distinct))
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._ids[: len(distinct)] = distinct
        self._counts = np.zeros(capacity, dtype=np.float32)
        self._find_addresses()

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, token_id: int) -> None:
        """Count one generated token."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._find_addresses()
        self._ids[slot] = token_id
        self._counts[slot] += 1

    def _find_addresses(self) -> None:
        # Asking numpy for an address takes longer than the rest of a step's bookkeeping.
        self.addresses = (self._ids.ctypes.data, self._counts.ctypes.data)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct token ids [U]."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Times each was generated [U]."""
        return self._counts[: len(self._slots)]


class BadWords:
    """Token sequences that must not be completed in the generated text; the prompt does not count."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._sequences = [(list(before), last) for *before, last in sequences]

    def banned_next(self, output_ids: list[int]) -> set[int]:
        """Return the tokens that would complete a sequence after `output_ids`."""
        # Sequences of one token are banned everywhere; a slice from -0 on would be the whole output.
        return {last for before, last in self._sequences if not before or output_ids[-len(before) :] == before}


def leaves_a_token(banned: set[int], allowed: Sequence[int] | npt.NDArray[np.int64] | None, vocab_size: int) -> bool:
    """Return True if some allowed token (None: the whole vocabulary) is not banned."""
    if allowed is None:
        return len(banned) < vocab_size
    # Looking at one token more than are banned is enough.
    return any(token_id not in banned for token_id in allowed[: len(banned) + 1])
