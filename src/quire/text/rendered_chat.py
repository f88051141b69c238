"""`RenderedChat`: a prompt in which nothing that a message wrote out becomes a special token.

A message may say "<|im_end|>", and read as the end of a turn it would let whoever wrote it speak for others. Templates
mix what messages say with special tokens of their own, and afterwards nobody can tell them apart. So each special token
in a message is marked before the template runs, and the text is cut there after: pieces are encoded one by one, and no
piece has it whole. Must not know: tokenizers, templates. Next to read: `tokenizer.py`.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_DEPTH = 64
"""Deeper values are left as they are: the template's own check refuses them."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """`pieces`: the prompt, cut within each special token that came out of a message."""

    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        """The prompt."""
        return "".join(self.pieces)


class SpecialTokenMarks:
    """Finds special tokens in messages. `tokens`: their texts. One with a single character cannot be cut, and stays."""

    def __init__(self, tokens: Iterable[str]) -> None:
        found = sorted({token for token in tokens if len(token) > 1}, key=len, reverse=True)
        # Looking ahead finds those too that overlap with another.
        self._pattern = re.compile(f"(?=(?:{'|'.join(map(re.escape, found))}))") if found else None

    def render(self, render: Callable[[Callable[[Any], Any]], str]) -> RenderedChat:
        """`render` makes the prompt, and passes what comes from outside through the function that it is given."""
        mark = f"x{secrets.token_hex(16)}x"
        text = render(lambda value: self._marked(value, mark, 0))
        return RenderedChat(tuple(text.split(mark)))

    def _marked(self, value: Any, mark: str, depth: int) -> Any:
        if self._pattern is None or depth > _MAX_DEPTH:
            return value
        if isinstance(value, str):
            places = [match.start() + 1 for match in self._pattern.finditer(value)]
            if not places:
                return value
            return mark.join(value[start:end] for start, end in zip([0, *places], [*places, None], strict=True))
        if isinstance(value, Mapping):
            return {
                self._marked(name, mark, depth + 1): self._marked(item, mark, depth + 1) for name, item in value.items()
            }
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
            return [self._marked(item, mark, depth + 1) for item in value]
        return value
