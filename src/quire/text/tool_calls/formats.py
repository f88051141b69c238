"""Formats in which models write tool calls.

Must not know: the parser. Next to read: `parser.py`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import uuid4

from quire.text.tool_calls.tagged_object import GLM_TAGS, QWEN_TAGS, Tags

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

BARE_CALL = "call:"
"""Marker before the name of a call with a bare object."""


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
        around: markers before the first and behind the last of several calls; a model may leave them out.
        kind: text that may stand between `opening` and the name.
        separators: characters that may separate calls, besides blanks.
        argument_keys: keys that hold the arguments.
        make_id: makes the ids of calls.
        has_special_marker: the markers are special tokens, which `skip_special_tokens` removes from the text.
        quote: marker on both sides of a string. A call is then `call:name{key:value}`, see `bare_object.py`. Empty:
            calls are JSON.
        names_first: a call is a name, text, and the arguments as a JSON object, whose brace must be the first character
            of the text that this pattern finds. Empty: calls are otherwise.
        is_python: calls are Python's, one or a list of them up to the closing marker, see `python_calls.py`.
        tags: a call is a name with tagged parameters, see `tagged_object.py`.
        example: a call as a system message shows it, for templates that write calls but do not read `tools`.
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
    names_first: str = ""
    tags: Tags | None = None
    is_python: bool = False
    around: tuple[str, str] = ("", "")
    kind: str = ""
    example: str = ""


HERMES = ToolCallFormat("hermes", "<tool_call>", True, closing="</tool_call>")
"""Hermes 2 and 3, Qwen 2.5 and 3, SmolLM3, Granite 4."""
QWEN = ToolCallFormat("qwen", "<tool_call>", True, closing="</tool_call>", tags=QWEN_TAGS)
"""Qwen3.5 and Qwen3-Coder."""
SEED = ToolCallFormat("seed", "<seed:tool_call>", True, closing="</seed:tool_call>", tags=QWEN_TAGS)
"""Seed-OSS."""
GLM_TAGGED = ToolCallFormat("glm-tagged", "<tool_call>", True, tags=GLM_TAGS)
"""GLM-4.5 and later."""
GLM = ToolCallFormat("glm", "<|assistant|>", False, closing="<|assistant|>", names_first=r"\S")
"""GLM-4 (0414): a name, a line break and the object are a turn; the next call is another turn."""
LLAMA = ToolCallFormat("llama", "<|python_tag|>", False, separators=";")
"""Llama 3.1 and later, except calls of built-in tools, which are Python."""
MISTRAL = ToolCallFormat("mistral", "[TOOL_CALLS]", True, make_id=short_id)
"""Mistral, with a list of objects."""
MISTRAL_ARGS = ToolCallFormat("mistral-args", "[TOOL_CALLS]", True, make_id=short_id, names_first=r"[{\n]")
"""Ministral 3, Mistral Small 3.2 and later: `[TOOL_CALLS]name[ARGS]{…}`."""
HARMONY = ToolCallFormat("harmony", "<|channel|>commentary to=functions.", True, names_first=r"[{\n]")
"""gpt-oss: `… to=functions.name <|constrain|>json<|message|>{…}`."""
GEMMA = ToolCallFormat("gemma", "<|tool_call>", True, closing="<tool_call|>", quote='<|"|>')
"""Gemma 4."""
PHI = ToolCallFormat("phi", "<|tool_call|>", True, closing="<|/tool_call|>")
"""Phi-4-mini, with a list of objects."""
LFM = ToolCallFormat("lfm", "<|tool_call_start|>", True, closing="<|tool_call_end|>", is_python=True)
"""LFM2."""
OLMO = ToolCallFormat("olmo", "<function_calls>", True, closing="</function_calls>", is_python=True)
"""OLMo 3."""
DEEPSEEK = ToolCallFormat(
    "deepseek", "<｜tool▁call▁begin｜>", True, closing="<｜tool▁call▁end｜>", separators="`", names_first="{",
    around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), kind="function<｜tool▁sep｜>",
    example="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜><name>\n```json\n"
    '{"<argument>": "<value>"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
)  # fmt: skip
"""DeepSeek-V3 and R1, with the object in a fence."""
DEEPSEEK_V31 = replace(
    DEEPSEEK, name="deepseek-v3.1", kind="", separators="",
    example='<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><name><｜tool▁sep｜>{"<argument>": "<value>"}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
)  # fmt: skip
"""DeepSeek-V3.1."""
GENERIC = ToolCallFormat("generic", "```json", False, closing="```", separators=",;")
"""The format of `tools_system_prompt` and `tool_choice_schema`: nothing but JSON, fenced or not."""
_BY_MARKER = (HERMES, MISTRAL, LLAMA, GEMMA, PHI, LFM, OLMO, SEED, DEEPSEEK)
"""Chosen by their opening markers."""
FORMATS = {
    item.name: item
    for item in (*_BY_MARKER, QWEN, GLM_TAGGED, GLM, MISTRAL_ARGS, HARMONY, DEEPSEEK_V31, GENERIC)
}  # fmt: skip


def uses_tools(chat_template: str | None) -> bool:
    """Return True if a template describes the tools itself; otherwise `tools_system_prompt` can."""
    return chat_template is not None and re.search(r"\btools\b", chat_template) is not None


def choose_format(chat_template: str | None, tokenizer: "Tokenizer | None" = None) -> ToolCallFormat:
    """Return the format that a template describes or writes; `GENERIC` for a template without tools or with another.

    `tokenizer` shows if the markers are special tokens.
    """
    text = chat_template or ""
    chosen = next((item for item in _BY_MARKER if item.opening in text), GENERIC)
    if not uses_tools(text):
        chosen = chosen if chosen.example else GENERIC
    elif chosen is HERMES:
        chosen = QWEN if QWEN_TAGS.call in text else GLM_TAGGED if GLM_TAGS.key in text else HERMES
    elif chosen is MISTRAL and "[ARGS]" in text:
        chosen = MISTRAL_ARGS
    elif chosen is GENERIC and "<|channel|>commentary" in text:
        chosen = HARMONY
    elif chosen is GENERIC and "ipython" in text and '"parameters"' in text:
        chosen = LLAMA  # 3.2 asks for the object alone
    elif chosen is GENERIC and "<|observation|>" in text:
        chosen = GLM
    if chosen is DEEPSEEK and "```json" not in text:
        chosen = DEEPSEEK_V31
    if tokenizer is None or chosen is GENERIC:
        return chosen
    ids = tokenizer.encode(chosen.opening, add_special_tokens=False)
    return replace(chosen, has_special_marker=not tokenizer.special_token_ids.isdisjoint(ids))
