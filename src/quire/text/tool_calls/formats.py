"""How models write calls of tools, as data: one `ToolCallFormat` per way.

Must not know how a text is read. Next to read: `parser.py`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol
from uuid import uuid4


class _Tokenizer(Protocol):
    """What is asked of a tokenizer here."""

    special_token_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


def long_id() -> str:
    """An id as OpenAI's: `call_` and 24 characters."""
    return f"call_{uuid4().hex[:24]}"


def short_id() -> str:
    """Nine letters and digits: Mistral's templates accept no other."""
    return uuid4().hex[:9]


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """A call is a JSON object with a name and arguments, or a list of these; this says what stands around it.

    Fields:
        name: of the format.
        opening: what stands before a call.
        needs_opening: calls are found behind `opening` anywhere in a text. False: a text may also begin with the call
            itself, and one that does not begin with a call has none.
        closing: what may stand behind a call.
        separators: characters that may stand between calls, besides blanks.
        argument_keys: names of the arguments.
        make_id: ids of new calls.
        has_special_marker: the markers are special tokens, so that text made with `skip_special_tokens` lacks them.
    """

    name: str
    opening: str
    needs_opening: bool
    closing: str = ""
    separators: str = ""
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    make_id: Callable[[], str] = long_id
    has_special_marker: bool = False


HERMES = ToolCallFormat("hermes", "<tool_call>", True, closing="</tool_call>")
"""Hermes 2 and 3, Qwen 2.5 and 3."""
LLAMA = ToolCallFormat("llama", "<|python_tag|>", False, separators=";")
"""Llama 3.1 and later, but for the calls of built-in tools, which are Python."""
MISTRAL = ToolCallFormat("mistral", "[TOOL_CALLS]", True, make_id=short_id)
"""Mistral, with a list of objects."""
GENERIC = ToolCallFormat("generic", "```json", False, closing="```", separators=",;")
"""The format of `tools_system_prompt` and `tool_choice_schema`: nothing but JSON, fenced or not."""
FORMATS = {item.name: item for item in (HERMES, LLAMA, MISTRAL, GENERIC)}


def uses_tools(chat_template: str | None) -> bool:
    """Whether a template tells the model of tools by itself; if not, `tools_system_prompt` can."""
    return chat_template is not None and re.search(r"\btools\b", chat_template) is not None


def choose_format(chat_template: str | None, tokenizer: _Tokenizer | None = None) -> ToolCallFormat:
    """The format that a template teaches; `GENERIC` where it knows no tools or none of the others.

    `tokenizer` tells whether the markers are special tokens.
    """
    chosen = GENERIC
    if uses_tools(chat_template):
        text = chat_template or ""
        chosen = next((item for item in (HERMES, MISTRAL, LLAMA) if item.opening in text), GENERIC)
        if chosen is GENERIC and "ipython" in text and '"parameters"' in text:
            chosen = LLAMA  # 3.2 asks for the object alone
    if tokenizer is None or chosen is GENERIC:
        return chosen
    ids = tokenizer.encode(chosen.opening, add_special_tokens=False)
    return replace(chosen, has_special_marker=not tokenizer.special_token_ids.isdisjoint(ids))
