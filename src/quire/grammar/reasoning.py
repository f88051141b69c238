"""`ReasoningMatcher`: position of one text that may begin with reasoning, and the tokens that may follow.

Markers are found in the bytes of the tokens: a marker may be one special token, several tokens, or a part of one. The
answer's matcher begins after the reasoning. Must not know logits, requests or templates.
Next to read: `matcher.py`, which follows the answer.
"""

import codecs
from enum import Enum, auto
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from quire.grammar.matcher import Failure, TokenMatcher, Vocabulary
from quire.structured_outputs import ReasoningSpan

MAX_LINE_BREAKS = 2
"""Line breaks that a model may write between the reasoning and a constrained answer."""
MAX_CUT_TOKENS = 4
"""Most tokens beyond the budget that complete a character: it has at most four bytes, and thus tokens."""
_NONE: npt.NDArray[np.int64] = np.empty(0, np.int64)


class _Phase(Enum):
    BEFORE = auto()
    """Reasoning and answer are both possible."""
    INSIDE = auto()
    ANSWER = auto()


class ReasoningMatcher:
    """State of one text.

    Before the reasoning: if the answer is constrained, only its beginnings and the start marker are allowed. Inside:
    everything, but before a constrained answer no stop token. At the budget: the closing words, token by token.

    Attributes: `may_ban` is True if `banned` is ever anything.
    """

    def __init__(self, span: ReasoningSpan, vocabulary: Vocabulary, answer: TokenMatcher | None) -> None:
        """`answer`: matcher of the constraint, at its beginning; None: the answer is free."""
        self._span, self._vocabulary, self._answer = span, vocabulary, answer
        self._start, self._end = span.start.encode(), span.end.encode()
        if answer is None:
            self._start = self._start.lstrip()
        self.may_ban = answer is not None
        self._num_line_breaks = 0
        self._always_banned: frozenset[int] = frozenset()
        if answer is not None:
            self._always_banned = frozenset({*vocabulary.eos_token_ids, *self._running_past(self._end)})
        self._phase = _Phase.BEFORE
        self._begun: list[int] = []
        self._text = b""
        """Tokens and text before it is known whether the text begins with reasoning."""
        self._may_be_answer = True
        self._has_answer_begun = False
        self._tail = b""
        """Last bytes of the reasoning: `end` or a character may have begun in them."""
        self._num_tokens = 0
        self._forced: list[int] = []
        """Tokens that must follow, in reverse."""
        if span.is_open:
            self._enter(b"")

    @property
    def failure(self) -> Failure | None:
        """Reason why no token may follow, once the answer broke a limit or the library failed."""
        return None if self._answer is None else self._answer.failure

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that may not follow where `allowed` is None: stop tokens, and those that end inside the answer."""
        if self._phase is not _Phase.INSIDE or self._answer is None or self._forced:
            return frozenset()
        return self._always_banned.union(*[self._running_past(self._end[size:]) for size in self._sizes_of_end()])

    def append(self, token_id: int) -> None:
        """Follow one token."""
        is_forced = bool(self._forced)
        if is_forced:
            self._forced.pop()
        if self._phase is _Phase.BEFORE:
            self._append_before(token_id)
        elif self._phase is _Phase.INSIDE:
            self._num_tokens += 1
            self._read(self._vocabulary.tokens[token_id])
        elif self._answer is not None:
            self._append_answer(self._answer, token_id, is_forced=is_forced)

    def allowed(self) -> npt.NDArray[np.int64] | None:
        """Return the tokens that may follow, ascending; None: all but `banned`. Shapes: [number of these]."""
        if self._forced:
            return np.array(self._forced[-1:], np.int64)
        if self._answer is None or self._phase is _Phase.INSIDE:
            return None
        found = self._answer.allowed() if self._may_be_answer else _NONE
        if self.failure is not None:
            return _NONE
        if self._phase is _Phase.BEFORE:
            return np.union1d(found, np.array(self._continuing_start(), np.int64))
        if self._has_answer_begun:
            return found
        gaps = [token_id for gap in self._gaps() for token_id in self._vocabulary.equal_to(gap)]
        return np.union1d(found, np.array(gaps, np.int64))

    def forced(self) -> list[int]:
        """Return the tokens that must follow, in order: before each of them `allowed` is that token alone."""
        if self._forced or self._answer is None or not self._has_answer_begun:
            return self._forced[::-1]
        return self._answer.forced()

    def _append_before(self, token_id: int) -> None:
        self._begun.append(token_id)
        self._text += self._vocabulary.tokens[token_id]
        if self._answer is None:
            self._text = self._text.lstrip()  # a free answer may begin with white space, and so may reasoning
        if self._text.startswith(self._start):
            if self._answer is not None and len(self._begun) > 1:
                self._answer.reset()
            self._enter(self._text[len(self._start) :])
            return
        may_be_start = self._start.startswith(self._text)
        if self._answer is not None and self._may_be_answer:
            # A token that only the start marker allows must not become a failure of the answer's matcher.
            self._may_be_answer = not may_be_start or self._answer.accepts(token_id)
            if self._may_be_answer:
                self._answer.append(token_id)
        if not may_be_start:
            self._phase, self._has_answer_begun = _Phase.ANSWER, True

    def _continuing_start(self) -> list[int]:
        """Return the tokens that continue the start marker after the tokens so far.

        A special token is offered as itself, not spelled in letters.
        """
        vocabulary, usual = self._vocabulary, self._vocabulary.spell(self._start)
        num_begun = len(self._begun)
        if not vocabulary.special_token_ids.isdisjoint(usual):
            if self._begun != usual[:num_begun]:
                return []
            if not vocabulary.special_token_ids.isdisjoint(usual[num_begun : num_begun + 1]):
                return usual[num_begun : num_begun + 1]
        return vocabulary.continuing(self._start[len(self._text) :])

    def _enter(self, raw: bytes) -> None:
        """Begin the reasoning with these bytes."""
        self._phase, self._may_be_answer = _Phase.INSIDE, True
        self._read(raw)

    def _read(self, raw: bytes) -> None:
        """Follow bytes inside the reasoning."""
        text = self._tail + raw
        _, is_ended, after = text.partition(self._end)
        if is_ended:
            self._phase = _Phase.ANSWER
            self._num_line_breaks = after.count(b"\n")
            if self._answer is not None and self._span.opening:
                self._forced = self._vocabulary.spell(self._span.opening.encode())[::-1] + self._forced
            return
        self._tail = text[-max(len(self._end) - 1, 3) :]
        budget = self._span.budget
        if budget is None or self._num_tokens < budget or self._forced:
            return
        is_cut = codecs.utf_8_decode(self._tail, "replace", False)[1] < len(self._tail)
        if not is_cut or self._num_tokens >= budget + MAX_CUT_TOKENS:
            self._forced = self._vocabulary.spell(self._closing())[::-1]

    def _closing(self) -> bytes:
        """Return the bytes that end the reasoning here: the rest of the end marker if the model has begun it."""
        closing, vocabulary = self._span.closing_text.encode(), self._vocabulary
        sizes = [len(vocabulary.tokens[token_id]) for token_id in vocabulary.spell(self._end)]
        # Only whole tokens: the first letter of a special token is the reasoning's.
        begun = set(accumulate(sizes)).intersection(self._sizes_of_end())
        return closing[closing.index(self._end) + max(begun) :] if begun else closing

    def _sizes_of_end(self) -> list[int]:
        """Return how many first bytes of the end marker the reasoning ends with."""
        sizes = range(1, min(len(self._end) - 1, len(self._tail)) + 1)
        return [size for size in sizes if self._tail.endswith(self._end[:size])]

    def _running_past(self, rest: bytes) -> list[int]:
        """Return the tokens that end the reasoning, with `rest`, and go on with more than line breaks."""
        tokens, gaps = self._vocabulary.tokens, [b"", *(() if self._span.opening else self._gaps())]
        found = self._vocabulary.containing(rest)
        if rest != self._end:
            found = [token_id for token_id in found if tokens[token_id].startswith(rest)]
        return [token_id for token_id in found if tokens[token_id].partition(rest)[2] not in gaps]

    def _append_answer(self, answer: TokenMatcher, token_id: int, *, is_forced: bool) -> None:
        raw = self._vocabulary.tokens[token_id]
        if not self._has_answer_begun and (is_forced or (raw in self._gaps() and not answer.accepts(token_id))):
            self._num_line_breaks += raw.count(b"\n")
            return
        self._has_answer_begun = True
        answer.append(token_id)

    def _gaps(self) -> list[bytes]:
        """Return the line breaks that may still come before a constrained answer."""
        return [b"\n" * count for count in range(1, MAX_LINE_BREAKS - self._num_line_breaks + 1)]
