"""Properties of a chat template, found by rendering small conversations and looking at the text.

A template's source says little: it may name `tools` in a comment, raise for a role, or print a list as Python writes
it. Each property here is what came of a rendering. Must not know: tokenizers, requests. Next to read: `messages.py`,
which brings messages into the form that these properties ask for.
"""

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from quire.errors import ChatTemplateError
from quire.text.chat_template import ChatTemplate, TemplateLimitReachedError, compile_chat_template
from quire.text.reasoning import FORMATS

Messages = Sequence[Mapping[str, Any]]
RESULT_ROLES = ("tool", "observation", "ipython", "function")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates read the reasoning of earlier turns."""
SHORT_ID_LEN = 9
"""Length of the ids that Mistral's templates demand."""
TOOL_NAME, ARGUMENT, VALUE = "qtool0", "qkey0", "qvalue0"
PROBE_ARGUMENTS = {ARGUMENT: VALUE}
"""Name and arguments of the call in `TemplateTraits.written_call`."""
MAX_WORDS_LEN = 4096
"""Most characters around a call or behind reasoning: to read a call in all formats takes 0.1 ms per character."""
_SYSTEM, _USER, _ANSWER, _RESULT, _THOUGHT = "qsystem0", "quser0", "qanswer0", "qresult0", "qthought0"
_OPEN_MARKER = re.compile(r"[<\[][^<>\[\]\s]*$")
_IDS = ("call_q0000001", "call_q0000002")
_TOOL = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "qdescription0",
        "parameters": {
            "type": "object",
            "properties": {ARGUMENT: {"type": "string", "description": "qparam0"}},
            "required": [ARGUMENT],
        },
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """Properties of a template. The defaults are those of a template that reads everything.

    Fields:
        system: it prints a system message; `several_systems`: two of them; `later_system`: one behind other turns;
            `system_alone`: one without other turns.
        developer: it treats the role `developer` in a way of its own.
        text_roles, parts_roles: roles whose content it prints as text, and as a list of parts.
        tools: variable under which it reads tools; None if it describes none. `tools_as`: "objects", "texts" (a list of
            JSON texts) or "text" (JSON of the list). `tools_need_system`: only with a system message. `needs_tools`: it
            fails without tools.
        calls: "tool_calls", "metadata" (GLM-4) or None if it prints no calls.
        arguments_as_text: arguments are JSON text; else objects.
        empty_content: content beside calls: None, "" or "absent".
        short_ids: it accepts only ids of nine letters and digits.
        several_calls: it prints several calls of a turn; `text_beside_calls`: content and calls of one turn;
            `answer_before_call`: an answer in a turn before the call's.
        result_role: role of results; None if it prints none. `several_results`: it prints several in a row;
            `lone_result`: one without a call.
        reasoning: name under which it reads earlier reasoning; None if it leaves that out.
        several_users, several_assistants, assistant_first, user_after_call, user_after_result: it prints such turns.
        opens_reasoning: the prompt for a generation ends with this marker of reasoning; "" if with none.
        closes_reasoning: text between reasoning and answer of an earlier turn; "" if unknown.
        written_call: text of a turn that calls `TOOL_NAME` with `PROBE_ARGUMENTS`; "" if it prints no calls.
    """

    system: bool = True
    several_systems: bool = True
    later_system: bool = True
    system_alone: bool = True
    developer: bool = False
    text_roles: frozenset[str] = frozenset({"system", "user", "assistant", "tool"})
    parts_roles: frozenset[str] = frozenset()
    tools: str | None = "tools"
    tools_as: str = "objects"
    tools_need_system: bool = False
    needs_tools: bool = False
    calls: str | None = "tool_calls"
    arguments_as_text: bool = False
    empty_content: str | None = ""
    short_ids: bool = False
    several_calls: bool = True
    text_beside_calls: bool = True
    answer_before_call: bool = True
    result_role: str | None = "tool"
    several_results: bool = True
    lone_result: bool = True
    reasoning: str | None = "reasoning_content"
    several_users: bool = True
    several_assistants: bool = True
    assistant_first: bool = True
    user_after_call: bool = True
    user_after_result: bool = True
    opens_reasoning: str = ""
    closes_reasoning: str = ""
    written_call: str = ""

    def described(self) -> dict[str, Any]:
        """Return the properties as they appear in JSON."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in values.items()}


def probe(source: str, variables: Mapping[str, Any]) -> TemplateTraits:
    """Return the properties of a template. `variables`: of the tokenizer.

    Takes some 40 renderings. A template that reaches a limit of the sandbox is taken to read everything.
    Raises: ChatTemplateError if it does not parse.
    """
    return _probed(source, json.dumps(dict(variables), sort_keys=True, default=str))


@functools.lru_cache(maxsize=32)
def _probed(source: str, variables: str) -> TemplateTraits:
    try:
        return _Probe(compile_chat_template(source), json.loads(variables)).traits()
    except TemplateLimitReachedError:
        return TemplateTraits()


def message(role: str, content: Any, **others: Any) -> dict[str, Any]:
    """Return a message."""
    return {"role": role, "content": content, **others}


class _Probe:
    """Renders conversations with one template. Each method finds some properties; later ones use earlier ones."""

    def __init__(self, template: ChatTemplate, variables: Mapping[str, Any]) -> None:
        self._template, self._variables = template, variables
        self._user = message("user", _USER)
        self._tools: dict[str, Any] = {}
        self._offered: dict[str, Any] = {}
        self._is_parts_only = False
        self._rendered: dict[str, str | None] = {}

    def traits(self) -> TemplateTraits:
        """Return all properties."""
        self._is_parts_only = not self._shows([self._user], _USER) and self._shows([_in_parts(self._user)], _USER)
        tools = self._find_tools()
        calls, call = self._find_calls(reads_tools=tools["tools"] is not None)
        results, turns = self._find_results(call)
        begun = [message("system", _SYSTEM)] if tools.get("tools_need_system") else []
        if tools["tools"] and not self._shows([*begun, *turns], TOOL_NAME, "qdescription0", **self._offered):
            tools = {"tools": None}  # it leaves them out of later turns
        found = {**tools, **calls, **results, **self._systems(), **self._sequences(call, turns)}
        return TemplateTraits(**found, **self._find_reasoning(call, turns), **self._content_forms(turns))

    # --- Rendering --------------------------------------------------------------------------

    def _render(self, messages: Messages, *, generates: bool = False, **variables: Any) -> str | None:
        """Return the text; None if the template raises. Raises: TemplateLimitReachedError."""
        key = json.dumps([messages, generates, variables])
        if key not in self._rendered:
            if self._is_parts_only:
                messages = [_in_parts(item) if isinstance(item.get("content"), str) else item for item in messages]
            values = {**self._variables, **self._tools, **variables}
            try:
                self._rendered[key] = self._template.render(messages, add_generation_prompt=generates, variables=values)
            except TemplateLimitReachedError:
                raise
            except ChatTemplateError:
                self._rendered[key] = None
        return self._rendered[key]

    def _shows(self, messages: Messages, *words: str, **variables: Any) -> bool:
        """Return True if all words come out, and no list or object as Python writes it."""
        text = self._render(messages, **variables)
        return text is not None and all(word in text for word in words) and not _has_python(text)

    # --- Properties -------------------------------------------------------------------------

    def _find_tools(self) -> dict[str, Any]:
        written = json.dumps(_TOOL)
        forms = {"objects": [_TOOL], "texts": [written], "text": json.dumps([_TOOL])}
        for name in self._tool_names():
            for (form, value), needs_system in itertools.product(forms.items(), (False, True)):
                turns = [*[message("system", _SYSTEM)] * needs_system, self._user]
                if self._shows(turns, TOOL_NAME, "qdescription0", **{name: value}):
                    needs_tools = not self._shows([self._user], _USER)
                    self._offered = {name: value}
                    if needs_tools:  # without any it prints nothing: the other conversations have some
                        self._tools, self._rendered = self._offered, {}
                    return {
                        "tools": name,
                        "tools_as": form,
                        "tools_need_system": needs_system,
                        "needs_tools": needs_tools,
                    }
        return {"tools": None}

    def _tool_names(self) -> list[str]:
        """Return the variables that may hold tools, the likeliest first."""
        names = [name for name in self._template.free_variables if "tool" in name or "function" in name]
        return sorted(names, key=lambda name: (name != "tools", "python" in name, name != "xml_tools", name))

    def _systems(self) -> dict[str, Any]:
        system, later, user = message("system", _SYSTEM), message("system", "qsystem1"), message("user", "quser1")
        as_developer, as_system = (
            self._render([message(role, _SYSTEM), self._user]) or "" for role in ("developer", "system")
        )
        knows = _SYSTEM in as_developer and as_developer.replace("developer", "system") != as_system
        if knows:  # a template that prints any role treats "developer" as any other
            as_other = self._render([message("qrole0", _SYSTEM), self._user]) or ""
            knows = as_developer != as_other.replace("qrole0", "developer")
        after = [self._user, message("assistant", _ANSWER), later, user]
        return {
            "developer": knows,
            "system": self._shows([system, self._user], _SYSTEM, _USER),
            "system_alone": self._shows([system], _SYSTEM)
            and (not self._offered or self._shows([system], _SYSTEM, TOOL_NAME, **self._offered)),
            "several_systems": self._shows([system, later, self._user], _SYSTEM, "qsystem1"),
            "later_system": self._shows([system, *after], _SYSTEM, "qsystem1", "quser1"),
        }

    def _find_calls(self, *, reads_tools: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the properties of calls, and a turn with a call as the template prints it."""
        forms = itertools.product((True, False), (False, True), (False, True), (None, "", "absent"))
        for with_result, short, as_text, empty in forms:
            turn = _call_turn(1, as_text=as_text, empty=empty, short=short)
            if self._prints_call(turn, with_result=with_result):
                shape = {"calls": "tool_calls", "arguments_as_text": as_text, "empty_content": empty}
                return {**shape, "short_ids": short, **self._around_calls(turn, as_text, empty, short)}, turn
        turn = message("assistant", json.dumps(PROBE_ARGUMENTS), metadata=TOOL_NAME)
        if reads_tools and self._shows([self._user, turn], TOOL_NAME, VALUE):
            written = self._written(turn)
            return {
                "calls": "metadata",
                "written_call": written,
                "several_calls": False,
                "text_beside_calls": False,
            }, turn
        return {"calls": None, "text_beside_calls": False}, message("assistant", _ANSWER)

    def _prints_call(self, turn: Mapping[str, Any], *, with_result: bool) -> bool:
        result = message("tool", _RESULT, tool_call_id=turn["tool_calls"][0]["id"], name=TOOL_NAME)
        turns, words = [self._user, turn], [TOOL_NAME, ARGUMENT, VALUE]
        text = self._render([*turns, result] if with_result else turns)
        if text is None or not all(word in text for word in [*words, _RESULT][: 3 + with_result]):
            return False
        return not _has_python(text) and f'\\"{ARGUMENT}' not in text and "None" not in text

    def _around_calls(self, turn: dict[str, Any], as_text: bool, empty: str | None, short: bool) -> dict[str, Any]:
        two = _call_turn(2, as_text=as_text, empty=empty, short=short)
        result = message("tool", _RESULT, tool_call_id=turn["tool_calls"][0]["id"], name=TOOL_NAME)
        last = message("assistant", "qanswer1")
        return {
            "several_calls": self._shows([self._user, two], TOOL_NAME, "qtool1"),
            "text_beside_calls": self._shows([self._user, {**turn, "content": _ANSWER}], _ANSWER, TOOL_NAME)
            and self._shows([self._user, {**turn, "content": _ANSWER}, result, last], _ANSWER, TOOL_NAME),
            "written_call": self._written(turn),
        }

    def _written(self, turn: Mapping[str, Any]) -> str:
        """Return the text of a turn without the beginning and the end that every turn has."""
        text = self._render([self._user, turn]) or ""
        start = self._render([self._user], generates=True) or ""
        answer = self._render([self._user, message("assistant", _ANSWER)]) or ""
        if not text.startswith(start):
            # Both may begin with a marker that differs only at its end.
            pairs = zip(text, answer, strict=False)
            num_common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            start = _OPEN_MARKER.sub("", text[:num_common])
        written = text[len(start) :].removesuffix(answer.partition(_ANSWER)[2])
        return written if len(written) <= MAX_WORDS_LEN else ""

    def _find_results(self, call: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the properties of results, and turns up to a result as the template prints it."""
        first, second = ([each["id"] for each in call.get("tool_calls", ())] * 2 or _IDS)[:2]
        for role in RESULT_ROLES:
            result = message(role, _RESULT, tool_call_id=first, name=TOOL_NAME)
            turns = [self._user, call, result]
            if self._shows(turns, _RESULT):
                other = {**result, "content": "qresult1", "tool_call_id": second}
                several = self._shows([*turns, other], _RESULT, "qresult1")
                lone = self._shows([self._user, message(role, _RESULT, tool_call_id=first)], _RESULT)
                return {"result_role": role, "several_results": several, "lone_result": lone}, turns
        return {"result_role": None}, [self._user, call]

    def _sequences(self, call: dict[str, Any], turns: list[dict[str, Any]]) -> dict[str, Any]:
        user, answer = message("user", "quser1"), message("assistant", _ANSWER)
        return {
            "several_users": self._shows([self._user, user], _USER, "quser1"),
            "several_assistants": self._shows(
                [self._user, answer, message("assistant", "qanswer1")], _ANSWER, "qanswer1"
            ),
            "assistant_first": self._shows([answer, self._user], _ANSWER, _USER),
            "user_after_call": self._shows([self._user, call, user], _USER, "quser1"),
            "user_after_result": len(turns) > 2 and self._shows([*turns, user], _RESULT, "quser1"),
            "answer_before_call": len(turns) < 3
            or self._shows(
                [self._user, answer, *turns[1:], message("assistant", "qanswer1")], _ANSWER, _RESULT, "qanswer1"
            ),
        }

    def _find_reasoning(self, call: dict[str, Any], turns: list[dict[str, Any]]) -> dict[str, Any]:
        opened = self._render([self._user], generates=True) or ""
        found: dict[str, Any] = {"reasoning": None, "opens_reasoning": _last_marker(opened)}
        thoughts = {key: f"{_THOUGHT}{key}" for key in REASONING_KEYS}
        answer, on = message("assistant", _ANSWER, **thoughts), {"thinking": True, "enable_thinking": True}
        # Some leave reasoning out unless the next answer reasons, or beside calls only.
        for messages, variables in (
            ([self._user, answer], {}),
            ([self._user, answer], on),
            ([self._user, {**call, **thoughts}, *turns[2:]], {}),
        ):
            text = self._render(messages, **variables) or ""
            if (name := next((key for key, word in thoughts.items() if word in text), None)) is None:
                continue
            _, _, behind = text.partition(thoughts[name])
            between, has_answer, _ = behind.partition(_ANSWER)
            closes = between if has_answer and len(between) <= MAX_WORDS_LEN else ""
            return {**found, "reasoning": name, "closes_reasoning": closes}
        return found

    def _content_forms(self, turns: list[dict[str, Any]]) -> dict[str, Any]:
        cases = {
            "user": ([self._user], 0, _USER),
            "system": ([message("system", _SYSTEM), self._user], 0, _SYSTEM),
            "assistant": ([self._user, message("assistant", _ANSWER)], 1, _ANSWER),
            "tool": (turns, 2, _RESULT),
        }
        texts, parts = set(), set()
        for role, (messages, at, word) in cases.items():
            if at < len(messages):
                listed = [_in_parts(item) if index == at else item for index, item in enumerate(messages)]
                texts |= {role} if self._shows(messages, word) and not self._is_parts_only else set()
                parts |= {role} if self._shows(listed, word, f"{word}b") else set()
        return {"text_roles": frozenset(texts), "parts_roles": frozenset(parts)}


def _call_turn(num_calls: int, *, as_text: bool, empty: str | None, short: bool) -> dict[str, Any]:
    arguments = json.dumps(PROBE_ARGUMENTS) if as_text else PROBE_ARGUMENTS
    calls = [
        {
            "id": call_id[-SHORT_ID_LEN:].replace("_", "q") if short else call_id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for call_id, name in zip(_IDS, (TOOL_NAME, "qtool1")[:num_calls], strict=False)
    ]
    turn: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
    return turn if empty == "absent" else {"role": "assistant", "content": empty, "tool_calls": calls}


def _in_parts(turn: Mapping[str, Any]) -> dict[str, Any]:
    texts = turn["content"], f"{turn['content']}b"
    return {**turn, "content": [{"type": "text", "text": text} for text in texts]}


def _has_python(text: str) -> bool:
    """Return True if a text has a probe's list or object as Python writes it, or a part as JSON."""
    pieces = ("'type':", "'name':", f"'{ARGUMENT}'", "['{", '"type": "text"')
    return any(piece in text for piece in pieces)


def _last_marker(prompt: str) -> str:
    """Return the marker of reasoning that a prompt ends with; "" if with none."""
    return next((item.start for item in FORMATS if prompt.rstrip().endswith(item.start)), "")
