"""`TokenIndex`: token sequences, searched for the places where the last tokens of a text occurred before.

A hash table leads from each `KEY_TOKENS` tokens to the last place that follows them, and each place to the one before
with the same hash, as in LZ77 compressors. 12 to 16 bytes a token. Knows no requests.
Next to read: `suffix.py`.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

KEY_TOKENS = 3
"""Shortest match that is found."""
LONGEST_MATCH = 32
MAX_PLACES = 8
"""Places that one search compares, the newest first."""
END = -1
"""Follows each finished sequence; equals no token."""
_FEW_TOKENS = 32
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_SHIFT = 13


class Match(NamedTuple):
    """A place in an index: `position` of the next token, behind `match_len` tokens that were equal."""

    position: int
    match_len: int


class TokenIndex:
    """Tokens in the order of `extend`, and the places of each key."""

    def __init__(self) -> None:
        self.tokens = array("i")
        self._before = array("i")
        """Per token the place before it with the same hash; -1: none."""
        self._newest = array("i", [-1]) * 1024

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens. About 1 µs each, 0.1 µs in long sequences."""
        start = len(self.tokens)
        self.tokens.extend(token_ids)
        if len(self.tokens) > len(self._newest):
            self._newest = array("i", [-1]) * (1 << len(self.tokens).bit_length())
            self._before = array("i")
            start = 0
        if len(self.tokens) - start > _FEW_TOKENS:
            self._link_many(start)
            return
        tokens, mask = self.tokens, len(self._newest) - 1
        for position in range(start, len(tokens)):
            if position < KEY_TOKENS:
                self._before.append(-1)
                continue
            slot = _slot(tokens, position, mask)
            self._before.append(self._newest[slot])
            self._newest[slot] = position

    def _link_many(self, start: int) -> None:
        first = max(start, KEY_TOKENS)
        tokens = np.frombuffer(self.tokens, np.int32).astype(np.int64)[first - KEY_TOKENS :]
        count = len(self.tokens) - first
        keys = np.zeros(count, np.int64)
        for offset, factor in enumerate(_FACTORS):
            keys += tokens[offset : offset + count] * factor
        slots = (keys >> _SHIFT) & (len(self._newest) - 1)
        positions = np.arange(first, first + count, dtype=np.int32)
        order = np.argsort(slots, kind="stable")
        newest = np.frombuffer(self._newest, np.int32)
        before = newest[slots]
        is_repeated = np.flatnonzero(slots[order][1:] == slots[order][:-1])
        before[order[is_repeated + 1]] = positions[order[is_repeated]]
        newest[slots[order]] = positions[order]  # of equal slots the last one stays
        self._before.extend([-1] * (first - start))
        self._before.frombytes(before.tobytes())

    def find(self, context: Sequence[int]) -> Match | None:
        """Return the place behind the longest match of the context's end, the newest of equal ones."""
        if len(context) < KEY_TOKENS:
            return None
        tokens, num_context = self.tokens, len(context)
        position = self._newest[_slot(context, num_context, len(self._newest) - 1)]
        best: Match | None = None
        for _ in range(MAX_PLACES):
            if position < 0:
                break
            most = min(LONGEST_MATCH, num_context, position)
            match_len = 0
            while match_len < most and tokens[position - 1 - match_len] == context[num_context - 1 - match_len]:
                match_len += 1
            if match_len >= KEY_TOKENS and (best is None or match_len > best.match_len):
                best = Match(position, match_len)
                if match_len == LONGEST_MATCH:
                    break
            position = self._before[position]
        return best

    def following(self, position: int, num_tokens: int) -> tuple[int, ...]:
        """Return at most `num_tokens` tokens from a place on, up to the end of its sequence."""
        token_ids = self.tokens[position : position + num_tokens]
        return tuple(token_ids[: token_ids.index(END)] if END in token_ids else token_ids)


def _slot(tokens: Sequence[int], position: int, mask: int) -> int:
    first, second, third = _FACTORS
    key = tokens[position - 3] * first + tokens[position - 2] * second + tokens[position - 1] * third
    return (key >> _SHIFT) & mask
