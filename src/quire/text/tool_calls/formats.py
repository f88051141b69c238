"""Formats in which models write tool calls.

Must not know: the parser. Next to read: `parser.py`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

BARE_CALL, TAGGED_CALL = "call:", "<function="
"""Markers before the name of a call that is no JSON object."""


def long_id() -> str:
    """Return an id like OpenAI's: `call_` and 24 characters."""
    return f"call_{uuid4().hex[:24]}"


def short_id() -> str:
    """Return nine letters and digits: Mistral's templates accept no other id."""
    return uuid4().hex[:9]


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """Text around a call: a JSON object with a name and arguments, a list of these, or a call that is no JSON.

    Fields:
        name: of the format.
        opening: marker before a call.
        needs_opening: calls are found behind `opening` anywhere in a text. False: a text may also begin with the call
            itself; a text that does not begin with a call has none.
        closing: marker that may follow a call.
        separators: characters that may separate calls, besides blanks.
        argument_keys: keys that hold the arguments.
        make_id: makes the ids of calls.
        has_special_marker: the markers are special tokens, which `skip_special_tokens` removes from the text.
        quote: marker on both sides of a string. A call is then `call:name{key:value}`, see `bare_object.py`. Empty:
            calls are JSON.
        names_first: a call is a name, text without braces, and the arguments as a JSON object.
        is_python: calls are Python's, one or a list of them up to the closing marker, see `python_calls.py`.
        has_tags: a call is `<function=name>` with tagged parameters, see `tagged_object.py`.
    """

    name: str
    opening: str
    needs_opening: bool
    closing: str = ""
    separators: str = ""
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    make_id: Callable[[], str] = long_id
    has_special_marker: bool = False
    quote: str = ""
    names_first: bool = False
    has_tags: bool = False
    is_python: bool = False


HERMES = ToolCallFormat("hermes", "<tool_call>", True, closing="</tool_call>")
"""Hermes 2 and 3, Qwen 2.5 and 3, SmolLM3, Granite 4."""
QWEN = ToolCallFormat("qwen", "<tool_call>", True, closing="</tool_call>", has_tags=True)
"""Qwen3.5 and Qwen3-Coder."""
LLAMA = ToolCallFormat("llama", "<|python_tag|>", False, separators=";")
"""Llama 3.1 and later, except calls of built-in tools, which are Python."""
MISTRAL = ToolCallFormat("mistral", "[TOOL_CALLS]", True, make_id=short_id)
"""Mistral, with a list of objects."""
MISTRAL_ARGS = ToolCallFormat("mistral-args", "[TOOL_CALLS]", True, make_id=short_id, names_first=True)
"""Ministral 3, Mistral Small 3.2 and later: `[TOOL_CALLS]name[ARGS]{…}`."""
HARMONY = ToolCallFormat("harmony", "<|channel|>commentary to=functions.", True, names_first=True)
"""gpt-oss: `… to=functions.name <|constrain|>json<|message|>{…}`."""
GEMMA = ToolCallFormat("gemma", "<|tool_call>", True, closing="<tool_call|>", quote='<|"|>')
"""Gemma 4."""
PHI = ToolCallFormat("phi", "<|tool_call|>", True, closing="<|/tool_call|>")
"""Phi-4-mini, with a list of objects."""
LFM = ToolCallFormat("lfm", "<|tool_call_start|>", True, closing="<|tool_call_end|>", is_python=True)
"""LFM2."""
OLMO = ToolCallFormat("olmo", "<function_calls>", True, closing="</function_calls>", is_python=True)
"""OLMo 3."""
GENERIC = ToolCallFormat("generic", "```json", False, closing="```", separators=",;")
"""The format of `tools_system_prompt` and `tool_choice_schema`: nothing but JSON, fenced or not."""
_BY_MARKER = (HERMES, MISTRAL, LLAMA, GEMMA, PHI, LFM, OLMO)
"""Chosen by their opening markers."""
FORMATS = {item.name: item for item in (*_BY_MARKER, QWEN, MISTRAL_ARGS, HARMONY, GENERIC)}


def uses_tools(chat_template: str | None) -> bool:
    """Return True if a template describes the tools itself; otherwise `tools_system_prompt` can."""
    return chat_template is not None and re.search(r"\btools\b", chat_template) is not None


def choose_format(chat_template: str | None, tokenizer: "Tokenizer | None" = None) -> ToolCallFormat:
    """Return the format that a template describes; `GENERIC` for a template without tools or with another format.

    `tokenizer` shows if the markers are special tokens.
    """
    chosen = GENERIC
    if uses_tools(chat_template):
        text = chat_template or ""
        chosen = next((item for item in _BY_MARKER if item.opening in text), GENERIC)
        if chosen is HERMES and TAGGED_CALL in text:
            chosen = QWEN
        if chosen is MISTRAL and "[ARGS]" in text:
            chosen = MISTRAL_ARGS
        if chosen is GENERIC and "<|channel|>commentary" in text:
            chosen = HARMONY
        if chosen is GENERIC and "ipython" in text and '"parameters"' in text:
            chosen = LLAMA  # 3.2 asks for the object alone
    if tokenizer is None or chosen is GENERIC:
        return chosen
    ids = tokenizer.encode(chosen.opening, add_special_tokens=False)
    return replace(chosen, has_special_marker=not tokenizer.special_token_ids.isdisjoint(ids))
