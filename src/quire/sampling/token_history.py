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


class Repeats:
    """Repetitions in a request's tokens, as the DRY sampler penalises them.

    `lengths[j]` is the number of last tokens that also end at position j, counted back to the last breaker: the token
    at j + 1 would continue a repetition of that length.
    """

    def __init__(
        self, token_ids: Sequence[int], last_n: int, breakers: Sequence[bytes], token_bytes: Sequence[bytes]
    ) -> None:
        """`last_n`: tokens in which repetitions are sought, -1 for all. `token_bytes`: text of each token id."""
        self._last_n = last_n
        self._breakers = [breaker for breaker in breakers if breaker]
        self._token_bytes = token_bytes
        self._tail = b""
        self._tail_len = max(map(len, self._breakers), default=1) - 1
        since = 0
        for token_id in token_ids:
            since = 0 if self._breaks(token_id) else since + 1
        self._num_tokens = len(token_ids)
        capacity = max(_INITIAL_CAPACITY, 2 * len(token_ids))
        self._tokens = np.zeros(capacity, np.int64)
        self._tokens[: len(token_ids)] = token_ids
        self._lengths = np.zeros(capacity, np.int64)
        self._lengths[: len(token_ids)] = np.minimum(_suffix_matches(token_ids), since)

    def add(self, token_id: int) -> None:
        """Append a token."""
        num = self._num_tokens
        if num == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
        if self._breaks(token_id):
            self._lengths[:num] = 0
        else:
            self._lengths[1 : num + 1] = self._lengths[:num] + 1
            self._lengths[0] = 1
            self._lengths[:num] *= self._tokens[:num] == token_id
        self._tokens[num] = token_id
        self._lengths[num] = 0
        self._num_tokens = num + 1

    def continuations(self, allowed_length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the tokens that would continue a repetition of at least `allowed_length` tokens, and its length.

        Of several repetitions the longest counts. Tokens that hold a breaker are left out.
        Shapes: distinct token ids [U], lengths [U].
        """
        num = self._num_tokens
        first = 0 if self._last_n < 0 else max(0, num - self._last_n)
        lengths = np.minimum(self._lengths[first : max(num - 1, first)], np.arange(1, max(num - first, 1)))
        places = np.flatnonzero(lengths >= allowed_length)
        token_ids, inverse = np.unique(self._tokens[first + 1 + places], return_inverse=True)
        longest = np.zeros(len(token_ids), np.int64)
        np.maximum.at(longest, inverse, lengths[places])
        kept = [not self._holds_breaker(token_id) for token_id in token_ids.tolist()]
        return token_ids[kept], longest[kept]

    def _holds_breaker(self, token_id: int) -> bool:
        return bool(self._breakers) and any(breaker in self._token_bytes[token_id] for breaker in self._breakers)

    def _breaks(self, token_id: int) -> bool:
        """Return whether a breaker ends in this token of the text. Mutates: the end of the text before it."""
        if not self._breakers:
            return False
        raw = self._token_bytes[token_id]
        text = self._tail + raw
        self._tail = text[-self._tail_len :] if self._tail_len else b""
        # A breaker that ended in an earlier token is shorter than what is left of that text.
        return any(
            text.find(breaker, max(0, len(text) - len(raw) - len(breaker) + 1)) >= 0 for breaker in self._breakers
        )


def _suffix_matches(token_ids: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return for each position the number of last tokens that also end there; 0 for the last position.

    By the Z-function of the reversed tokens (Gusfield, "Algorithms on Strings, Trees, and Sequences", 1997), which
    compares each token once. Shapes: [T] -> [T].
    """
    reverse, num = list(reversed(token_ids)), len(token_ids)
    found = [0] * num
    left = right = 0
    for at in range(1, num):
        length = min(right - at, found[at - left]) if at < right else 0
        while at + length < num and reverse[length] == reverse[at + length]:
            length += 1
        if at + length > right:
            left, right = at, at + length
        found[at] = length
    return np.array(found[::-1], np.int64)


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
