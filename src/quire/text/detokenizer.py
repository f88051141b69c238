"""Incremental detokenizer: text from tokens, one token at a time; and the search for stop strings in its pieces.

The joined pieces equal the text of all tokens decoded at once, after the prompt. A character of several tokens appears
with the last one, and U+FFFD only for bytes that can never become a character. The cost of a token does not depend on
the length of the text. Must not know: requests, sampling. Next to read: `tokenizer.py` (tokenizers that work byte by
byte).
"""

import codecs
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.text.tokenizer import ByteDecoding, Tokenizer

_MAX_INCOMPLETE_BYTES = 3
"""A UTF-8 character has at most four bytes, so at most three are waiting."""
_WINDOW_CONTEXT_LEN = 8
_WINDOW_MAX_WAITING = 16


class IncrementalDetokenizer:
    """Turns the generated tokens of one sequence into text.

    The prompt is context: a space at the start of the first generated word is kept, which decoding the generated
    tokens alone would drop for SentencePiece; a character that the prompt leaves incomplete is completed.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        """`skip_special_tokens` leaves out tokens that mark structure, such as the end of a turn."""
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        # From the end of the prompt: only its last few tokens are read.
        visible = (token_id for token_id in reversed(prompt_token_ids) if token_id not in self._skipped)
        decoding = tokenizer.byte_decoding
        self._stream: _ByteStream | _WindowStream
        if decoding is not None:
            self._stream = _ByteStream(tokenizer, decoding, visible)
        else:
            self._stream = _WindowStream(tokenizer, visible)

    def append(self, token_id: int) -> str:
        """Return the text that the next token completes; "" while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        return self._stream.append(token_id)

    def finish(self) -> str:
        """End the sequence and return the rest of the text, with U+FFFD for an incomplete character."""
        return self._stream.finish()


class _ByteStream:
    """For tokenizers that work byte by byte: exact, and constant work for each token."""

    def __init__(self, tokenizer: Tokenizer, decoding: ByteDecoding, reversed_prompt: Iterable[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for token_id in reversed_prompt:
            tail = self._token_bytes(token_id) + tail
            if len(tail) >= _MAX_INCOMPLETE_BYTES:
                break
        self._decoder.decode(tail)
        self._drops_space = decoding.strips_leading_space and not tail

    def append(self, token_id: int) -> str:
        return self._without_first_space(self._decoder.decode(self._token_bytes(token_id)))

    def finish(self) -> str:
        return self._without_first_space(self._decoder.decode(b"", final=True))

    def _without_first_space(self, text: str) -> str:
        if self._drops_space and text:
            self._drops_space = False
            return text.removeprefix(" ")
        return text


class _WindowStream:
    """For any other decoder: decode the last few tokens with and without the new ones, and return the difference."""

    def __init__(self, tokenizer: Tokenizer, reversed_prompt: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(itertools.islice(reversed_prompt, _WINDOW_CONTEXT_LEN))[::-1]
        self._context_len = len(self._window)
        self._context_text = self._decode()

    def append(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode()
        num_waiting = len(self._window) - self._context_len
        if text.endswith("\ufffd") and num_waiting < _WINDOW_MAX_WAITING:
            return ""
        return self._release(text)

    def finish(self) -> str:
        return self._release(self._decode())

    def _release(self, text: str) -> str:
        delta = text[len(self._context_text) :]
        self._window = self._window[-_WINDOW_CONTEXT_LEN:]
        self._context_len = len(self._window)
        self._context_text = self._decode()
        return delta

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


# --- Stop strings ---------------------------------------------------------------------------------
# Released text never contains the beginning of a stop string that may still be completed, so that a match can always be
# cut off whole, wherever the pieces were cut.


@dataclass(frozen=True, slots=True)
class Released:
    """Text that may be shown now, and the stop string that ended it, if one did."""

    text: str
    matched: str | None = None


class StopStringMatcher:
    """Releases text up to the first stop string.

    The match that ends earliest wins; of several that end at the same character, the first in `stop`. The result does
    not depend on how the text was cut.
    """

    def __init__(self, stop: tuple[str, ...], include_in_output: bool) -> None:
        """`stop` holds non-empty strings; `include_in_output` keeps the stop string at the end of the text."""
        self._stop = stop
        self._include_in_output = include_in_output
        self._first_characters = frozenset(pattern[0] for pattern in stop)
        self._held = ""
        self._done = False

    def append(self, delta: str) -> Released:
        """Take the next piece of text. After a match every piece is dropped."""
        if self._done:
            return Released("")
        if not self._held and self._first_characters.isdisjoint(delta):
            return Released(delta)
        text = self._held + delta
        ends = [
            (start + len(pattern), index)
            for index, pattern in enumerate(self._stop)
            if (start := text.find(pattern)) >= 0
        ]
        if ends:
            self.finish()
            end, index = min(ends)
            pattern = self._stop[index]
            return Released(text[: end if self._include_in_output else end - len(pattern)], pattern)
        released_len = len(text) - max(begun_len(text, pattern) for pattern in self._stop)
        self._held = text[released_len:]
        return Released(text[:released_len])

    def finish(self) -> str:
        """End the text and return what was held back because it might have begun a stop string."""
        held, self._held = self._held, ""
        self._done = True
        return held


def begun_len(text: str, pattern: str, start: int = 0) -> int:
    """Return how many characters at the end of `text[start:]` are a beginning of `pattern`, but not all of it."""
    longest = min(len(pattern) - 1, len(text) - start)
    return next((size for size in range(longest, 0, -1) if text.endswith(pattern[:size])), 0)
