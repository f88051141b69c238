"""`RenderedChat`: a prompt in which the text of a message never becomes a special token.

A message may contain "<|im_end|>". Encoded as the end of a turn, it would let a user write the turns of other roles.
In a rendered prompt the special tokens of messages and of the template look the same. Therefore each special token in a
message is marked before the template runs, and the rendered text is cut inside it: the pieces are encoded one by one,
and no piece contains it whole. Must not know: tokenizers, templates. Next to read: `tokenizer.py`.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import ChatTemplateError


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """`pieces`: the prompt, cut inside each special token that comes from a message."""

    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        """Return the prompt."""
        return "".join(self.pieces)


class SpecialTokenMarks:
    """Finds special tokens in messages. `tokens`: their texts. Tokens of one character cannot be cut."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = frozenset(token for token in tokens if len(token) > 1)
        self._lengths = sorted(set(map(len, self._tokens)))
        # To compile an alternative for each of Gemma's 6,414 tokens took 0.24 s.
        firsts = "".join(re.escape(character) for character in sorted({token[0] for token in self._tokens}))
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def render(self, render: Callable[[Callable[[Any], Any]], str]) -> RenderedChat:
        """Call `render` and cut its text. It must pass every value of the client through the function that it gets.

        Raises: ChatTemplateError for values that are nested too deep.
        """
        mark = f"x{secrets.token_hex(16)}x"
        try:
            text = render(lambda value: self._marked(value, mark))
        except RecursionError:
            raise ChatTemplateError("a message, tool or variable is nested too deep for the chat template") from None
        return RenderedChat(tuple(text.split(mark)))

    def _marked(self, value: Any, mark: str) -> Any:
        if self._first is None:
            return value
        if isinstance(value, str):
            starts = (match.start() for match in self._first.finditer(value))
            places = [start + 1 for start in starts if self._is_token_at(value, start)]
            if not places:
                return value
            return mark.join(value[start:end] for start, end in zip([0, *places], [*places, None], strict=True))
        if isinstance(value, Mapping):
            return {self._marked(name, mark): self._marked(item, mark) for name, item in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
            return [self._marked(item, mark) for item in value]
        return value

    def _is_token_at(self, text: str, start: int) -> bool:
        return any(text[start : start + length] in self._tokens for length in self._lengths)
