"""Formats in which models write tool calls: one row per family of models, and the choice of a row for a template.

A row says which markers stand around calls and which reader reads what is between them. To add a family, add a row to
`FORMATS` and its outputs to the tests. Must not know templates. Next to read: `readers.py`, `parser.py`.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from quire.text.chat_template import without_comments
from quire.text.reply import HarmonyReader
from quire.text.tool_calls.parser import (
    CallReading,
    Lead,
    ToolArgumentsDelta,
    ToolCallFormat,
    ToolCallParser,
    literally,
    short_id,
)
from quire.text.tool_calls.readers import NAME, Tags, WrittenCall, either, gemma, keyed, named, objects, python
from quire.text.tool_calls.schemas import ToolSchemas

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

_PYTHON = (NAME, r"\s*", r"\(")
_LIST_LEAD = Lead((r"\[", r"\s*", *_PYTHON))
"""Python's `[name(`."""


def _tag_lead(before: str, after: str) -> Lead:
    return Lead((*literally(before), NAME, *literally(after)))


def _name_lead(*after: str) -> Lead:
    """Return the lead that is a tool's name and a text, at the beginning of a line."""
    return Lead((NAME, *after), begins_line=True)


_QWEN = Tags(r"<function=\s*(?P<name>[^<>\n]+?)\s*>", r"<parameter=(?P<key>[^<>\n]+)>", "</parameter>", "\n")
_MINIMAX = Tags(r'<invoke name="(?P<name>[^"]*)">', r'<parameter name="(?P<key>[^"]*)">', "</parameter>")
_GLM = Tags(rf"{NAME}", r"<arg_key>(?P<key>[^<>\n]+)</arg_key>\s*<arg_value>", "</arg_value>")
_DSML = Tags(
    r'<｜DSML｜invoke name="(?P<name>[^"]*)">',
    r'<｜DSML｜parameter name="(?P<key>[^"]*)"(?: string="(?P<type>\w*)")?>',
    "</｜DSML｜parameter>",
)
_HUNYUAN_3 = Tags(
    rf"{NAME}<tool_sep:opensource>",
    r"<arg_key:opensource>(?P<key>[^<>\n]+)</arg_key:opensource>\s*<arg_value:opensource>",
    "</arg_value:opensource>",
)
_KIMI_3 = Tags(
    r'<\|open\|>call tool="(?P<name>[^"]*)"[^<>]*<\|sep\|>',
    r'<\|open\|>argument key="(?P<key>[^"]*)"(?: type="(?P<type>\w*)")?<\|sep\|>',
    "<|close|>argument<|sep|>",
)
_MINICPM = Tags(r'<function name="(?P<name>[^"]*)">', r'<param name="(?P<key>[^"]*)">', "</param>")
_MISTRAL = rf"{NAME}\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?"
_DEEPSEEK = rf"(?:function\s*<｜tool▁sep｜>\s*(?=[\w.-]+\s*[`{{]))?{NAME}\s*(?:<｜tool▁sep｜>)?"
_KIMI = rf"(?:(?=(?P<id>[\w.-]+:\d+)))?{NAME}(?::\d+)?\s*<\|tool_call_argument_begin\|>"
_SOLAR = rf"(?P<id>\w*)<\|tool_call:name\|>\s*{NAME}\s*<\|tool_call:args\|>"
_GEMMA_LEAD = Lead((*literally("call:"), NAME, r"\s*", r"\{"))
_FENCE = ("`", "`", "`", r"\w*", r"[\s\[]*")

Row = ToolCallFormat
GENERIC = Row("generic", "demanded calls, and tools described by `tools_system_prompt`")
HARMONY = Row(
    "harmony",
    "gpt-oss",
    is_harmony=True,
    reads_json=False,
    openings=("<|channel|>",),
    signs=(("<|channel|>commentary",), ("<|channel|>", "<|message|>")),
)
GLM = Row(
    "glm-4",
    "GLM-4 (0414)",
    named(rf"{NAME}[ \t]*\n"),
    ("<|assistant|>",),
    leads=(_name_lead(r"[ \t]*", r"\n", r"\s*", r"\{"), _name_lead(r"[ \t]*", r"\n", r"\s*", "`", "`", "`")),
    signs=(("<|observation|>",),),
)
"""A call is a turn: a name, a line break and the arguments."""
_ROWS = (
    Row(
        "hermes",
        "Hermes, Qwen2.5, Qwen3, QwQ, Granite 4, ERNIE, MiMo, Reka",
        objects,
        ("<tool_call>",),
        ("</tool_call>",),
    ),
    Row(
        "smollm3",
        "SmolLM3",
        either(objects, python),
        ("<tool_call>", "<code>"),
        ("</tool_call>", "</code>"),
        signs=(("<tool_call>", "<code>"),),
    ),
    Row(
        "qwen3-coder",
        "Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5",
        _QWEN,
        ("<tool_call>",),
        ("</function>", "</tool_call>"),
        (_tag_lead("<function=", ">"),),
        signs=(("<tool_call>", "<function="),),
    ),
    Row(
        "seed",
        "Seed-OSS",
        _QWEN,
        ("<seed:tool_call>",),
        ("</function>", "</seed:tool_call>"),
        (_tag_lead("<function=", ">"),),
    ),
    Row(
        "glm-4.5",
        "GLM-4.5, 4.6, 4.7, 5, Ling",
        _GLM,
        ("<tool_call>",),
        ("</tool_call>",),
        (_name_lead(r"\s*", *literally("<arg_key>")),),
        signs=(("<tool_call>", "<arg_key>"),),
    ),
    GLM,
    Row(
        "llama",
        "Llama 3.1, 3.2, 3.3 and 4, Functionary 3.1",
        either(objects, python, _QWEN),
        ("<|python_tag|>", "<|python_start|>"),
        ("<|python_end|>", "</function>"),
        (_LIST_LEAD, _tag_lead("<function=", ">")),
        signs=(("<|python_tag|>",), ("ipython", '"parameters"')),
    ),
    Row(
        "lfm",
        "LFM2, LFM2.5",
        either(python, objects),
        ("<|tool_call_start|>",),
        ("<|tool_call_end|>",),
        (_LIST_LEAD,),
        signs=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    ),
    Row("olmo", "OLMo 3", python, ("<function_calls>",), ("</function_calls>",), (_LIST_LEAD,)),
    Row(
        "mistral",
        "Mistral, Ministral, Magistral, Devstral",
        either(named(_MISTRAL), objects),
        ("[TOOL_CALLS]",),
        leads=(_name_lead(*literally("[ARGS]")), _name_lead(*literally("[CALL_ID]"))),
        make_id=short_id,
    ),
    Row(
        "deepseek",
        "DeepSeek-V3, R1, V3.1",
        named(_DEEPSEEK),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        (Lead((*literally("function<｜tool▁sep｜>"), NAME, r"\s")), _name_lead(*literally("<｜tool▁sep｜>"))),
    ),
    Row(
        "deepseek-v3.2",
        "DeepSeek-V3.2, V4",
        _DSML,
        ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        ("</｜DSML｜invoke>", "</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
        (_tag_lead('<｜DSML｜invoke name="', '"'),),
        signs=(("｜DSML｜",),),
    ),
    Row(
        "kimi-k2",
        "Kimi-K2",
        named(_KIMI),
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        (_name_lead(r"[:\d]*", *literally("<|tool_call_argument_begin|>")),),
    ),
    Row(
        "kimi-k3",
        "Kimi-K3",
        _KIMI_3,
        ("<|open|>tools<|sep|>",),
        ("<|close|>call<|sep|>", "<|close|>tools<|sep|>", "<|close|>message<|sep|>"),
        (_tag_lead('<|open|>call tool="', '"'),),
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    ),
    Row(
        "minimax-m2",
        "MiniMax-M2",
        _MINIMAX,
        ("<minimax:tool_call>",),
        ("</invoke>", "</minimax:tool_call>"),
        (_tag_lead('<invoke name="', '"'),),
    ),
    Row("gemma-4", "Gemma 4", gemma('<|"|>'), ("<|tool_call>",), ("<tool_call|>", "<|tool_response>"), (_GEMMA_LEAD,)),
    Row(
        "functiongemma",
        "FunctionGemma",
        gemma("<escape>"),
        ("<start_function_call>",),
        ("<end_function_call>", "<start_function_response>"),
        (_GEMMA_LEAD,),
    ),
    Row(
        "gemma-3",
        "Gemma 3",
        either(objects, python),
        leads=(_LIST_LEAD, Lead((*_FENCE, *_PYTHON)), Lead((*_FENCE, *literally("print("), *_PYTHON))),
        signs=(("<start_of_turn>",),),
    ),
    Row("granite-3", "Granite 3", objects, ("<|tool_call|>",)),
    Row(
        "phi-4",
        "Phi-4-mini",
        objects,
        ("<|tool_call|>", "functools["),
        ("<|/tool_call|>",),
        signs=(("<|tool_call|>", "<|/tool_call|>"), ("functools[",)),
    ),
    Row(
        "command",
        "Command R7B, Command A",
        objects,
        ("<|START_ACTION|>",),
        ("<|END_ACTION|>",),
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    Row("nemotron", "Nemotron Nano 2", objects, ("<TOOLCALL>",), ("</TOOLCALL>",)),
    Row("jamba", "Jamba, Hunyuan-A13B, Apriel, MiniMax-M1", objects, ("<tool_calls>",), ("</tool_calls>",)),
    Row(
        "hunyuan",
        "Hunyuan",
        either(named(rf"{NAME}\s*"), objects),
        ("<tool_calls>", "<tool_call>"),
        ("</tool_call>", "</tool_calls>"),
        dropped=("<answer>", "</answer>"),
        signs=(("<tool_calls>", "<tool_call>"),),
    ),
    Row(
        "hunyuan-3",
        "Hunyuan 3",
        _HUNYUAN_3,
        ("<tool_calls:opensource>", "<tool_call:opensource>"),
        ("</tool_call:opensource>", "</tool_calls:opensource>"),
        (_name_lead(*literally("<tool_sep:opensource>")),),
    ),
    Row("apertus", "Apertus", keyed, ("<|tools_prefix|>",), ("<|tools_suffix|>",)),
    Row("internlm", "InternLM 2, 3", objects, ("<|action_start|>", "<|plugin|>"), ("<|action_end|>",)),
    Row(
        "minicpm",
        "MiniCPM5",
        _MINICPM,
        closings=("</function>",),
        leads=(_tag_lead('<function name="', '"'),),
        signs=(('<function name="',),),
    ),
    Row(
        "gigachat",
        "GigaChat 3",
        objects,
        ("<|function_call|>", "function call<|role_sep|>"),
        dropped=("<|message_sep|>",),
        signs=(("<|function_call|>",), ("function call<|role_sep|>",)),
    ),
    Row("solar", "Solar Open", named(_SOLAR), ("<|tool_calls|>", "<|tool_call:begin|>"), ("<|tool_call:end|>",)),
    Row("xlam", "xLAM", signs=(('[{"name"',),)),
)
FORMATS = {row.name: row for row in (*_ROWS, HARMONY, GENERIC)}


def write_calls(row: ToolCallFormat, calls: Sequence[Mapping[str, Any]]) -> str:
    """Return calls as text that the row reads, for a template that writes none. `calls`: names and arguments."""
    opening, closing = row.openings[0] if row.openings else "", row.closings[0] if row.closings else ""
    if row.read is not python and _LIST_LEAD not in row.leads:
        written = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
        text = json.dumps(written[0] if len(written) == 1 else written, ensure_ascii=False)
        return f"{opening}{text}{closing}" if row.read is objects else text
    return f"{opening}[{', '.join(map(_python_call, calls))}]{closing}"


def _python_call(call: Mapping[str, Any]) -> str:
    arguments = call["arguments"]
    arguments = arguments if isinstance(arguments, Mapping) else {"arguments": arguments}
    written = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return f"{call['name']}({', '.join(written)})"


def has_special_marker(row: ToolCallFormat, tokenizer: "Tokenizer") -> bool:
    """Return True if markers are special tokens, which `skip_special_tokens` removes from the text."""
    special = tokenizer.special_token_ids
    return any(not special.isdisjoint(tokenizer.encode(marker, add_special_tokens=False)) for marker in row.markers)


def hinted(source: str, special_tokens: Collection[str] = ()) -> ToolCallFormat | None:
    """Return the row whose markers a template's source has, or else the tokenizer among its special tokens.

    Of several rows, the row with the largest group of signs is chosen, then the first in the table.
    """
    text = without_comments(source)
    sizes = {row.name: _num_signs(row, text.__contains__) for row in FORMATS.values()}
    if not any(sizes.values()):
        sizes = {row.name: any(marker in special_tokens for marker in row.openings) for row in FORMATS.values()}
    best = max(FORMATS.values(), key=lambda row: sizes[row.name])
    return best if sizes[best.name] else None


def _num_signs(row: ToolCallFormat, has: Callable[[str], bool]) -> int:
    """Return the number of texts in the largest group of signs that is there."""
    groups = row.signs or ((row.openings[0],) if row.openings else (),)
    return max(len(group) if all(map(has, group)) else 0 for group in groups)


def recognise(written: str, name: str, arguments: Mapping[str, Any]) -> ToolCallFormat | None:
    """Return the most specific row that reads exactly this call from a turn that a template wrote; None without any.

    The most specific row has the most markers and signs in the text; of several, it is the first in the table.
    """
    rows = [row for row in FORMATS.values() if any(marker in written for marker in row.openings)]
    fitting = [row for row in rows if _reads(_without_json(row), written, name, arguments)]
    if not fitting and _reads(GENERIC, written, name, arguments):
        # A bare object or list, which every row reads: only a sign tells the family.
        return next((row for row in FORMATS.values() if row.signs and any(map(written.count, _signs(row)))), None)
    if not fitting:
        rows = [row for row in FORMATS.values() if row.leads and row not in rows]
        fitting = [row for row in rows if _reads(_without_json(row), written, name, arguments)]
    return max(fitting, key=lambda row: _num_marks(row, written), default=None)


def _num_marks(row: ToolCallFormat, written: str) -> int:
    return sum(text in written for text in {*row.markers, *_signs(row)})


def _signs(row: ToolCallFormat) -> list[str]:
    return [text for group in row.signs for text in group]


def _reads(row: ToolCallFormat, written: str, name: str, arguments: Mapping[str, Any]) -> bool:
    schemas = ToolSchemas([{"type": "function", "function": {"name": name}}])
    if row.is_harmony:
        pieces = HarmonyReader(schemas).feed(written, ends=True)
        return [piece.arguments for piece in pieces if isinstance(piece, WrittenCall)] == [arguments]
    parser = ToolCallParser(CallReading(format=row, schemas=schemas))
    events = parser.feed(written) + parser.finish()
    return [json.loads(event.text) for event in events if isinstance(event, ToolArgumentsDelta)] == [arguments]


@cache
def _without_json(row: ToolCallFormat) -> ToolCallFormat:
    """Return a row that does not read the JSON of other families."""
    return replace(row, reads_json=False)


def choose_format(
    source: str | None,
    *,
    written: str = "",
    name: str = "",
    arguments: Mapping[str, Any] | None = None,
    special_tokens: Collection[str] = (),
) -> ToolCallFormat:
    """Return the row of a chat template: one that reads what it writes, else one whose markers it has, else `GENERIC`.

    `written`: a turn with a call of `name` with `arguments`, by the template. `special_tokens`: those of the tokenizer.
    """
    chosen = recognise(written, name, arguments or {}) if written else None
    if chosen is None or not any(marker in written for marker in chosen.markers):
        # A bare object or list is read in every format.
        chosen = hinted(source or "", special_tokens) or chosen
    return chosen or GENERIC
