"""`TokenMatcher`: position of one text in its grammar, and the tokens that may follow; `Vocabulary`: tokens as bytes.

Must not know logits, nor where tokens come from. Next to read: `compiler.py`; `../sampling/state.py`, which keeps a
matcher per request.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.errors import printable

if TYPE_CHECKING:
    import llguidance

_NONE: npt.NDArray[np.int64] = np.empty(0, np.int64)
_NO_EXTENSION = "NoExtension"
"""First word of llguidance's error when no token may come next."""
_CLIENT_ERRORS = (_NO_EXTENSION, "too many states", "too many expressions", "Too many items", "max is")
"""Parts of llguidance's errors where a grammar breaks a limit or leads to nothing (1.9.1, each limit tried). Its
`stop_reason` is "InternalError" for all errors, so that only the text tells them apart."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why no token may follow. `is_client_error`: the grammar of the request caused it, not the library."""

    reason: str
    is_client_error: bool = True


def failure_of(message: str) -> Failure:
    """Return the failure that an error of llguidance in the middle of a text means.

    An unknown error, a panic above all, is the library's: it is logged and not reported as the client's.
    """
    lines = message.splitlines()
    line = printable(lines[0]) if lines else ""
    shown = line[:200] or "no reason given"
    if not any(words in line for words in _CLIENT_ERRORS):
        return Failure(f"the library for structured outputs failed: {shown}", is_client_error=False)
    if line.startswith(_NO_EXTENSION):
        return Failure(
            "the grammar of structured_outputs cannot be followed any further: no token may come next, but the "
            "text is not complete; remove rules that contain only themselves"
        )
    return Failure(
        f"the grammar of structured_outputs cannot be followed any further ({shown}): make it simpler, "
        "with fewer alternatives that begin alike and smaller repetitions"
    )


class TokenMatcher:
    """State of one text. `failure` is set when a step breaks a limit or the library fails; then no token may follow.

    After a stop token the text is complete: only stop tokens may follow, and they change nothing.
    """

    banned: frozenset[int] = frozenset()
    """Tokens that may not follow where all others may: never any here. See `ReasoningMatcher`."""
    may_ban = False

    def __init__(self, matcher: "llguidance.LLMatcher", vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.failure: Failure | None = None
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._has_ended = False

    def accepts(self, token_id: int) -> bool:
        """Return True if the token may follow."""
        if self._has_ended or self.failure is not None:
            return self._has_ended and token_id in self._eos_token_ids
        try:
            is_end = token_id in self._eos_token_ids and self._matcher.is_accepting()
            return is_end or self._matcher.validate_tokens([token_id]) == 1
        except Exception as error:
            self.failure = failure_of(repr(error))
            return False

    def forced(self) -> list[int]:
        """Return the tokens that must follow, in order: before each of them `allowed` is that token alone."""
        if self._has_ended or self.failure is not None:
            return []
        try:
            return self._matcher.compute_ff_tokens()
        except Exception as error:
            self.failure = failure_of(repr(error))
            return []

    def reset(self) -> None:
        """Go back to the beginning of the text."""
        self.failure, self._has_ended = None, False
        try:
            self._matcher.reset()
        except Exception as error:
            self.failure = failure_of(repr(error))

    def append(self, token_id: int) -> None:
        """Follow one token."""
        if self._has_ended or self.failure is not None:
            return
        try:
            if token_id in self._eos_token_ids and self._matcher.is_accepting():
                self._has_ended = True
            elif not self._matcher.consume_token(token_id):
                self.failure = failure_of(self._matcher.get_error())
        except Exception as error:
            self.failure = failure_of(repr(error))

    def allowed(self) -> npt.NDArray[np.int64]:
        """Return the tokens that may follow, ascending; none after a failure. Shapes: [number of these]."""
        if self._has_ended:
            return np.array(sorted(self._eos_token_ids), np.int64)
        if self.failure is not None:
            return _NONE
        try:
            mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            if self._matcher.is_error():
                self.failure = failure_of(self._matcher.get_error())
                return _NONE
        except Exception as error:
            self.failure = failure_of(repr(error))
            return _NONE
        return np.flatnonzero(np.unpackbits(mask, count=self._vocab_size, bitorder="little"))


# --- The vocabulary -------------------------------------------------------------------------------

_SPECIAL = b"\xff"
"""First byte of a special token: no UTF-8 text has it."""
_BORDER = b"\xff"
_MAX_SEARCHES = 64


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Tokens by id.

    Fields:
        tokens: the bytes of each token; b"" for an unused id. As many as the model has logits.
        special_token_ids: tokens without text. Grammars allow none of them except stop tokens.
        eos_token_ids: tokens that end a text; at least one.
        encode: the model's tokenizer, for parts of a text that the grammar determines.
    """

    tokens: Sequence[bytes]
    special_token_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]
    encode: Callable[[str], Sequence[int]]

    @functools.cached_property
    def library_tokenizer(self) -> "llguidance.LLTokenizer":
        """Return the vocabulary for llguidance: takes 0.1 s and 20 MB for 49,152 tokens."""
        import llguidance

        eos_token_ids = list(self.eos_token_ids)
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_LibraryVocabulary(self)), n_vocab=len(self.tokens), eos_token=eos_token_ids
        )

    def containing(self, part: bytes) -> list[int]:
        """Return the tokens that contain these bytes, ascending."""
        return self._find(re.escape(part))

    def equal_to(self, raw: bytes) -> list[int]:
        """Return the tokens with exactly these bytes, ascending."""
        return self._find(_BORDER + re.escape(raw) + b"(?=%b)" % _BORDER)

    def continuing(self, text: bytes) -> list[int]:
        """Return the tokens that begin with this text or are beginnings of it, ascending."""
        beginnings = b"|".join(re.escape(text[:size]) for size in range(len(text) - 1, 0, -1))
        rest = b"|(?:%b)(?=%b)" % (beginnings, _BORDER) if beginnings else b""
        return self._find(_BORDER + b"(?:%b%b)" % (re.escape(text), rest))

    def spell(self, raw: bytes) -> list[int]:
        """Return tokens with exactly these bytes, special tokens among them, as the tokenizer would.

        Fewer, if the vocabulary lacks a byte.
        """
        ids = _encoded(self.encode, raw)
        if b"".join([self.tokens[token_id] for token_id in ids]) == raw:
            return ids
        known = {token: index for index, token in enumerate(self.tokens) if token and token in raw}
        return _longest_first(raw, known, len(raw))

    def _find(self, pattern: bytes) -> list[int]:
        """Return the tokens with a match of `pattern`; a token stands between two borders."""
        found = self._found.get(pattern)
        if found is None:
            joined, starts = self._joined
            ends = [match.end() - 1 for match in re.finditer(pattern, joined, re.DOTALL)]
            found = np.unique(np.searchsorted(starts, ends, side="right") - 1).tolist()
            if len(self._found) == _MAX_SEARCHES:
                self._found.clear()
            self._found[pattern] = found
        return found

    @functools.cached_property
    def _found(self) -> dict[bytes, list[int]]:
        """Results of `_find`, since each takes some 3 ms for 150,000 tokens, and a model has few markers."""
        return {}

    @functools.cached_property
    def _joined(self) -> tuple[bytes, npt.NDArray[np.int64]]:
        """All tokens in one text, and the place of each."""
        sizes = np.fromiter(map(len, self.tokens), np.int64, len(self.tokens)) + 1
        return _BORDER + _BORDER.join(self.tokens) + _BORDER, np.cumsum(sizes) - sizes + 1


class _LibraryVocabulary:
    """A tokenizer with the attributes that llguidance reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = vocabulary.special_token_ids | set(vocabulary.eos_token_ids)
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(special)
        self.tokens = [_SPECIAL + raw if index in special else raw for index, raw in enumerate(vocabulary.tokens)]
        self._encode = vocabulary.encode
        self._ids = {raw: index for index, raw in enumerate(self.tokens) if raw}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        """Return tokens with exactly these bytes: those of the tokenizer if they match, else the longest first."""
        raw = text if isinstance(text, bytes) else text.encode()
        ids = _encoded(self._encode, raw)
        # A tokenizer may read a special token out of the text, or put a space before it.
        if b"".join([self.tokens[token_id] for token_id in ids]) == raw:
            return ids
        return _longest_first(raw, self._ids, self._longest)


def _encoded(encode: Callable[[str], Sequence[int]], raw: bytes) -> list[int]:
    """Return the tokenizer's tokens; none for part of a character, or text that the tokenizer refuses."""
    try:
        return list(encode(raw.decode()))
    except Exception:
        return []


def _longest_first(raw: bytes, known: Mapping[bytes, int], longest: int) -> list[int]:
    """Return tokens with these bytes, or with its first ones if no token has a byte."""
    ids, start = [], 0
    while start < len(raw):
        for stop in range(min(len(raw), start + longest), start, -1):
            if (token_id := known.get(raw[start:stop])) is not None:
                ids.append(token_id)
                break
        else:
            break  # llguidance continues with the tokens so far
        start = stop
    return ids
