"""`TokenMatcher`: position of one text in its grammar, and the tokens that may follow.

Must not know logits. Next to read: `sampling/state.py`, which keeps one per request.
"""

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
