"""`TokenMatcher`: how far one text has come in its grammar, and which tokens may follow.

Must not know logits. Next to read: `sampling/state.py`, which keeps one per request.
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.grammar.escapes import EscapeRule
from quire.grammar.failures import Failure, failure_of

if TYPE_CHECKING:
    import llguidance

_NONE: npt.NDArray[np.int64] = np.empty(0, np.int64)


class TokenMatcher:
    """The state of one text. Where a step breaks the library's limits, or the library breaks, `failure` says so, and
    nothing may follow.

    After the end token the text is complete: then only end tokens may follow, and they change nothing.
    """

    def __init__(
        self,
        matcher: "llguidance.LLMatcher",
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        escape_rule: EscapeRule | None = None,
    ) -> None:
        """escape_rule: for a text that follows a JSON Schema."""
        self.failure: Failure | None = None
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._has_ended = False
        self._escape_rule = escape_rule
        self._escape = b""

    def append(self, token_id: int) -> None:
        """Take note of one token."""
        if self._has_ended or self.failure is not None:
            return
        if token_id in self._eos_token_ids and self._matcher.is_accepting():
            self._has_ended = True
        elif not self._matcher.consume_token(token_id):
            self._fail()
        elif self._escape_rule is not None:
            self._escape = self._escape_rule.after(self._escape, token_id)

    def allowed(self) -> npt.NDArray[np.int64]:
        """Tokens that may follow, ascending; none after a failure. Shapes: [number of these]."""
        if self._has_ended:
            return np.array(sorted(self._eos_token_ids), np.int64)
        if self.failure is not None:
            return _NONE
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            self._fail()
            return _NONE
        bits = np.unpackbits(mask, count=self._vocab_size, bitorder="little")
        found = bits.view(np.bool_)
        if self._escape_rule is not None:
            kept = found & self._escape_rule.allowed(self._escape)
            # A pattern may leave no choice: what it makes is no name that the schema declares.
            found = kept if kept.any() else found
        return np.flatnonzero(found)

    def _fail(self) -> None:
        self.failure = failure_of(self._matcher.get_error())
