"""Reasoning that a model writes between two markers before its answer, and the answer behind it.

Must not know: requests. Next to read: `reply.py`, which reads gpt-oss's messages too, and `tool_calls/parser.py`, which
reads the answer.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.text.chat_template import without_comments
from quire.text.detokenizer import begun_len

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Markers around reasoning.

    `is_open`: the prompt ends inside. `has_special_marker`: markers are special tokens, which text must keep.
    `breaks_off`: marker of the answer that ends reasoning, too, since models leave `end` out before it. `openings` and
    `closing`: markers around the answer, which are no part of it. `is_harmony`: see `HarmonyReader`.
    """

    start: str = "<think>"
    end: str = "</think>"
    is_open: bool = False
    has_special_marker: bool = False
    breaks_off: str = ""
    openings: tuple[str, ...] = ()
    closing: str = ""
    is_harmony: bool = False

    def is_taught(self, chat_template: str) -> bool:
        """Return True if a template has the markers. Others also end turns with gpt-oss's `end`."""
        needed = (self.start,) if self.is_harmony else (self.end, *self.openings)
        return all(marker in chat_template for marker in needed)


FORMATS = (
    ReasoningFormat(openings=("<answer>",), closing="</answer>"),  # Hunyuan
    ReasoningFormat(openings=("<response>",), closing="</response>"),  # Granite 3.3
    ReasoningFormat(),  # Qwen3, DeepSeek, GLM, SmolLM3, Nemotron, MiniMax-M2, Phi-4, LFM2.5
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat("[THINK]", "[/THINK]"),  # Magistral
    ReasoningFormat("<|channel>thought", "<channel|>", breaks_off="<|tool_call>"),  # Gemma 4
    ReasoningFormat(
        "<|START_THINKING|>", "<|END_THINKING|>", breaks_off="<|START_ACTION|>", openings=("<|START_RESPONSE|>",),
        closing="<|END_RESPONSE|>",
    ),  # Command R7B and A
    ReasoningFormat(
        "<|START_THINKING|>", "<|END_THINKING|>", breaks_off="<|START_ACTION|>", openings=("<|START_TEXT|>",),
        closing="<|END_TEXT|>",
    ),
    ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>", breaks_off="<|tools_prefix|>"),  # Apertus
    ReasoningFormat("<mm:think>", "</mm:think>"),  # MiniMax-M3
    ReasoningFormat("<think:opensource>", "</think:opensource>"),  # Hunyuan 3
    ReasoningFormat(
        "<|open|>think<|sep|>", "<|close|>think<|sep|>", breaks_off="<|open|>tools<|sep|>",
        openings=("<|open|>response<|sep|>",), closing="<|close|>response<|sep|>",
    ),  # Kimi-K3
    ReasoningFormat(
        "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", closing="[END FINAL RESPONSE]",
    ),  # Apriel
    ReasoningFormat(
        "<|channel|>analysis<|message|>", "<|end|>", openings=("<|start|>assistant", "<|channel|>final<|message|>"),
        is_harmony=True,
    ),  # gpt-oss
)  # fmt: skip


def find_reasoning(chat_template: str | None, prompt: str, tokenizer: "Tokenizer") -> ReasoningFormat | None:
    """Return the format of a template's reasoning; None without any, or if the prompt has closed it already."""
    prompt = prompt.rstrip()
    found = _taught(chat_template or "")
    if found is None and chat_template:
        opened = [item for item in FORMATS if prompt.endswith(item.start)]
        found = min(opened, key=lambda item: len(item.openings), default=None)
    if found is None or (prompt.endswith(found.end) and not found.closing):
        return None
    ids = tokenizer.encode(found.end, add_special_tokens=False)
    is_special = len(ids) == 1 and ids[0] in tokenizer.special_token_ids
    return replace(found, is_open=prompt.endswith(found.start), has_special_marker=is_special)


@functools.lru_cache(maxsize=32)
def _taught(chat_template: str) -> ReasoningFormat | None:
    """Return the format whose markers a template has outside of comments."""
    source = without_comments(chat_template)
    return next((item for item in FORMATS if item.is_taught(source)), None)


@dataclass(frozen=True, slots=True)
class Piece:
    """New text: of the reasoning, or of the answer behind it. `start`: place in the whole text, in characters."""

    text: str
    start: int
    is_reasoning: bool


class ReasoningParser:
    """Splits one text: call `feed` with its pieces, then `finish`.

    Blanks around the reasoning are left out. The result does not depend on how the text was cut. A text that does not
    begin with reasoning is all answer; reasoning without an end goes on to the end of the text. Never raises.
    """

    def __init__(self, format: ReasoningFormat) -> None:
        self._format = format
        self._read = self._inside if format.is_open else self._before
        self._closing = format.closing
        self._held, self._start = "", 0
        self._is_first = True

    def feed(self, text: str) -> list[Piece]:
        """Return what is certain with `text`."""
        self._held += text
        return self._pieces(ends=False)

    def finish(self) -> list[Piece]:
        """Return the rest."""
        return self._pieces(ends=True)

    def _pieces(self, *, ends: bool) -> list[Piece]:
        found: list[Piece] = []
        while True:
            read, held = self._read, len(self._held)
            found += read(ends)
            if (read == self._read and held == len(self._held)) or not self._held:
                return found

    def _take(self, size: int, *, is_reasoning: bool = False, gives: bool = True) -> list[Piece]:
        piece = Piece(self._held[:size], self._start, is_reasoning)
        self._held, self._start = self._held[size:], self._start + size
        return [piece] if gives and piece.text else []

    def _skip_blanks(self) -> bool:
        """Drop blanks; return False if nothing is left."""
        self._take(len(self._held) - len(self._held.lstrip()), gives=False)
        return bool(self._held)

    def _before(self, ends: bool) -> list[Piece]:
        text = self._held.lstrip()
        if text.startswith(self._format.start):
            self._skip_blanks()
            self._take(len(self._format.start), gives=False)
            self._read = self._inside
        elif ends or not self._format.start.startswith(text):
            self._read = self._gap if self._format.openings else self._answer
        return []

    def _inside(self, ends: bool) -> list[Piece]:
        if self._is_first and not self._skip_blanks():
            return []
        markers = [marker for marker in (self._format.end, self._format.breaks_off) if marker]
        end, marker = min(((self._held.find(marker), marker) for marker in markers), key=_place)
        held = 0 if ends else max(begun_len(self._held, marker) for marker in markers)
        size = end if end >= 0 else len(self._held) - held
        text = self._held[:size].rstrip()
        found = self._take(len(text), is_reasoning=True)
        self._is_first = self._is_first and not found
        if end >= 0:
            self._take(end - len(text) + (len(marker) if marker == self._format.end else 0), gives=False)
            self._read = self._gap
        elif ends:
            self._take(len(self._held), gives=False)
        return found

    def _gap(self, ends: bool) -> list[Piece]:
        if not self._skip_blanks():
            return []
        for marker in self._format.openings:
            if self._held.startswith(marker):
                return self._take(len(marker), gives=False)
            if marker.startswith(self._held) and not ends:
                return []
        self._read = self._answer
        return []

    def _answer(self, ends: bool) -> list[Piece]:
        if not self._closing:
            return self._take(len(self._held))
        end = self._held.find(self._closing)
        size = end if end >= 0 else len(self._held) - (0 if ends else begun_len(self._held, self._closing))
        found = self._take(size if ends and end < 0 else len(self._held[:size].rstrip()))
        if end >= 0:
            self._take(self._held.index(self._closing) + len(self._closing), gives=False)
            self._closing, self._read = "", self._behind
        return found

    def _behind(self, ends: bool) -> list[Piece]:
        if not self._held.isspace():
            self._read = self._answer
        return []


def _place(found: tuple[int, str]) -> float:
    """Return where a marker begins in a text; infinity if it is not there."""
    return found[0] if found[0] >= 0 else math.inf
