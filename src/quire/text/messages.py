"""Messages of a conversation: from what clients send to one form, and from that to what a chat template reads.

`normalise` checks messages and brings them into the form of OpenAI's API with parsed arguments; `adapt` then does what
the template does not do by itself: it folds system messages, describes tools, writes calls and results as text, joins
parts, and merges turns. No text is left out. Must not know: Jinja2, tokenizers. Next to read: `template_probe.py`,
`dialogue.py`.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import ChatTemplateError
from quire.text.chat_template import plain, unicode_text
from quire.text.template_probe import REASONING_KEYS, SHORT_ID_LEN, TemplateTraits

Message = dict[str, Any]
ROLES_OF_SYSTEM = ("system", "developer")
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = ("thinking", "reasoning", "reasoning_text")
_ACKNOWLEDGED = "OK."
"""Turn of the assistant between a result and a user's turn, where a template demands one: some refuse an empty one."""
_GAP = "\n\n"
"""Between texts that become one turn."""


# --- One form ---------------------------------------------------------------------------------


def normalise(messages: Any) -> list[Message]:
    """Return a copy of messages in one form, with all keys that templates may read.

    Content is text, None, or parts `{"type": "text", "text": …}`; arguments of calls are objects where they are JSON
    objects; reasoning is under `reasoning`; results have the name of their tool; keys without a value and empty lists
    of calls are left out. Raises: ChatTemplateError naming the message.
    """
    found = plain(messages, "messages")
    if not isinstance(found, list):
        raise _wrong("messages", found, "a list of messages")
    if not found:
        raise ChatTemplateError("messages is empty: give at least one message with a role and text")
    names: dict[str, str] = {}
    return [_normalised(item, f"messages[{index}]", names) for index, item in enumerate(found)]


def _normalised(item: Any, place: str, names: dict[str, str]) -> Message:
    """Return one message. Mutates: `names`, of the tools by id of their calls."""
    if not isinstance(item, dict):
        raise _wrong(place, item, "an object with a role and text")
    role = item.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(f"{place}.role", role, "text such as 'user'")
    message = {name: value for name, value in item.items() if value is not None or name == "content"}
    message.setdefault("content", None)
    thoughts = [message.pop(key, None) for key in REASONING_KEYS]
    message["content"], inside = _content(message["content"], f"{place}.content")
    thoughts.append("\n".join(inside))
    calls = message.pop("tool_calls", None) or _older_call(message.pop("function_call", None))
    if calls:
        message["tool_calls"] = _calls(calls, f"{place}.tool_calls", names)
    if role == "function":
        message |= {"role": "tool", "tool_call_id": message.get("tool_call_id") or f"call_{message.get('name')}"}
    if message["role"] == "tool" and (name := names.get(str(message.get("tool_call_id")))):
        message.setdefault("name", name)
    if reasoning := next((text for text in thoughts if isinstance(text, str) and text), ""):
        message["reasoning"] = reasoning
    return message


def _content(content: Any, place: str) -> tuple[Any, list[str]]:
    """Return content as text, None or parts of text, and the texts of parts with reasoning."""
    if content is None or isinstance(content, str):
        return content, []
    if not isinstance(content, list):
        raise _wrong(place, content, "text, or a list of parts with text")
    parts, reasoning = [], []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else "text" if isinstance(part, str) else None
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if isinstance(part, dict) and kind in _REASONING_PARTS:
            reasoning.append(str(part.get("thinking") or text or ""))
            continue
        if isinstance(part, dict) and kind == "refusal":
            text = part.get("refusal")
        elif kind not in _TEXT_PARTS:
            raise _wrong(f"{place}[{index}].type", kind, "'text': this engine reads text only")
        if not isinstance(text, str):
            raise _wrong(f"{place}[{index}].text", text, "text")
        parts.append({"type": "text", "text": text})
    return parts, reasoning


def _older_call(call: Any) -> list[Any]:
    """Return OpenAI's older `function_call` as calls."""
    if not isinstance(call, dict):
        return []
    return [{"id": f"call_{call.get('name')}", "function": call}]


def _calls(calls: Any, place: str, names: dict[str, str]) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _wrong(place, calls, "a list of calls")
    found = []
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise _wrong(f"{place}[{index}]", call, "{'function': {'name': …, 'arguments': …}}")
        call_id = call.get("id")
        call_id = call_id if isinstance(call_id, str) and call_id else f"call_{len(names) + index}"
        names[call_id] = name
        arguments = _arguments(function.get("arguments"))
        found.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return found


def _arguments(value: Any) -> Any:
    """Return arguments as an object; text that is no JSON object stays text."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if isinstance(found, dict) and "\\u" in value:
        # An escape can be half of a surrogate pair, which no tokenizer takes.
        found = json.loads(unicode_text(json.dumps(found, ensure_ascii=False)))
    return found if isinstance(found, dict) else value


def _wrong(place: str, value: Any, expected: str) -> ChatTemplateError:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    shown = shown if len(shown) <= 60 else type(value).__name__
    return ChatTemplateError(f"{place} must be {expected}, got {shown}")


# --- What a template reads --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Described:
    """Our own texts for a template that does not write something: the description of tools, and calls as text.

    `has_tools`: the request has tools.
    """

    has_tools: bool
    tools: str
    write_calls: Callable[[Sequence[Mapping[str, Any]]], str]


def adapt(messages: list[Message], traits: TemplateTraits, described: Described) -> list[Message]:
    """Return normalised messages as a template with these properties reads them. Mutates: `messages`."""
    turns: list[Message] = []
    follows_call = False
    for message in messages:
        if message["role"] != "tool":
            follows_call = "tool_calls" in message
        turns += _calls_and_results(message, traits, described, is_lone=not follows_call)
    if not traits.several_results or not traits.several_calls:
        turns = _one_by_one(turns, traits)
    turns = _fold_systems(turns, traits, described)
    return [_shaped(turn, traits) for turn in _merge(turns, traits)]


def text_of(content: Any) -> str:
    """Return content as text: parts joined by line breaks."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _calls_and_results(
    message: Message, traits: TemplateTraits, described: Described, *, is_lone: bool
) -> list[Message]:
    """Return a turn as one or several that the template prints. `is_lone`: no call is before this result."""
    calls = message.get("tool_calls")
    if message["role"] == "tool" and (traits.result_role is None or (is_lone and not traits.lone_result)):
        name = message.get("name")
        text = f"Result of {name}:\n" if name else "Result:\n"
        return [{"role": "user", "content": text + text_of(message["content"])}]
    if not calls:
        return [message]
    content = text_of(message["content"])
    without_calls = {name: value for name, value in message.items() if name != "tool_calls"}
    if traits.calls is None:
        written = described.write_calls(calls)
        return [{**without_calls, "content": f"{content}\n{written}" if content else written}]
    before: list[Message] = []
    if content and not traits.text_beside_calls:
        before.append(without_calls)
        if not traits.answer_before_call:
            before.append({"role": "user", "content": ""})
        message = {"role": "assistant", "content": None, "tool_calls": calls}
    if traits.calls == "metadata":
        functions = [call["function"] for call in calls]
        return before + [
            {"role": "assistant", "metadata": item["name"], "content": _as_text(item["arguments"])}
            for item in functions
        ]
    return [*before, message]


def _one_by_one(turns: list[Message], traits: TemplateTraits) -> list[Message]:
    """Return calls one a turn, each with its result behind it, or results in a row joined into one."""
    found: list[Message] = []
    waiting = deque(turns)
    while waiting:
        turn = waiting.popleft()
        calls = turn.get("tool_calls") or []
        if len(calls) > 1 and not traits.several_calls:
            results: list[Message] = []
            while waiting and waiting[0]["role"] == "tool":
                results.append(waiting.popleft())
            for index, call in enumerate(calls):
                found.append({**turn, "content": None if index else turn["content"], "tool_calls": [call]})
                found += [item for item in results if item.get("tool_call_id") == call["id"]]
            known = {call["id"] for call in calls}
            found += [item for item in results if item.get("tool_call_id") not in known]
        elif turn["role"] == "tool" and not traits.several_results and found and found[-1]["role"] == "tool":
            text = f"{text_of(found[-1]['content'])}\n{text_of(turn['content'])}"
            found[-1] = {**found[-1], "content": text}
        else:
            found.append(turn)
    return found


def _fold_systems(turns: list[Message], traits: TemplateTraits, described: Described) -> list[Message]:
    """Return turns whose system messages the template prints, with the description of tools."""
    if not traits.developer:
        turns = [{**turn, "role": "system"} if turn["role"] == "developer" else turn for turn in turns]
    num_leading = next((at for at, turn in enumerate(turns) if turn["role"] not in ROLES_OF_SYSTEM), len(turns))
    leading, rest = turns[:num_leading], turns[num_leading:]
    if not traits.later_system:
        rest = [{**turn, "role": "user"} if turn["role"] in ROLES_OF_SYSTEM else turn for turn in rest]
    if described.tools:
        leading = [*leading, {"role": "system", "content": described.tools}]
    if len(leading) > 1 and (described.tools or not traits.several_systems or not traits.system):
        text = _GAP.join(text_of(turn["content"]) for turn in leading)
        leading = [{**leading[0], "content": text}]
    if leading and not rest and not traits.system_alone:
        leading, rest = leading[:-1], [{"role": "user", "content": leading[-1]["content"]}]
    if leading and not traits.system:
        rest = [{"role": "user", "content": turn["content"]} for turn in leading] + rest
        if len(rest) > 1 and rest[1]["role"] == "user":
            rest[:2] = [_joined(rest[0], rest[1])]
        return rest
    if described.has_tools and traits.tools_need_system and not leading:
        leading = [{"role": "system", "content": ""}]
    return leading + rest


def _merge(turns: list[Message], traits: TemplateTraits) -> list[Message]:
    """Return turns in a sequence that the template prints."""
    found: list[Message] = []
    for turn in turns:
        role, before = turn["role"], found[-1]["role"] if found else ""
        prints = {"user": traits.several_users, "assistant": traits.several_assistants}.get(role, True)
        if role == before and not prints and not turn.get("tool_calls") and not found[-1].get("tool_calls"):
            found[-1] = _joined(found[-1], turn)
        else:
            starts = all(item["role"] in ROLES_OF_SYSTEM for item in found)
            if role == "assistant" and starts and not traits.assistant_first:
                found.append({"role": "user", "content": ""})
            elif role == "user" and found and _needs_answer(found[-1], traits):
                found.append({"role": "assistant", "content": _ACKNOWLEDGED})
            found.append(turn)
    return found


def _needs_answer(turn: Message, traits: TemplateTraits) -> bool:
    """Return True if a template prints no user's turn behind this one."""
    if turn["role"] == "tool":
        return not traits.user_after_result
    return "tool_calls" in turn and not traits.user_after_call


def _joined(first: Message, second: Message) -> Message:
    texts = [text for turn in (first, second) if (text := text_of(turn["content"]))]
    return {**second, **first, "content": _GAP.join(texts)}


def _shaped(turn: Message, traits: TemplateTraits) -> Message:
    """Return a turn with content, arguments, ids and reasoning in the form that the template reads."""
    shaped = dict(turn)
    role = shaped["role"]
    kind = "system" if role in ROLES_OF_SYSTEM else role
    if role == "tool" and traits.result_role is not None:
        shaped["role"] = traits.result_role
    content = shaped["content"]
    if isinstance(content, list) and kind not in traits.parts_roles:
        shaped["content"] = text_of(content)
    elif isinstance(content, str) and kind not in traits.text_roles and kind in traits.parts_roles:
        shaped["content"] = [{"type": "text", "text": content}]
    reasoning = shaped.pop("reasoning", None)
    if reasoning and traits.reasoning is not None:
        shaped[traits.reasoning] = reasoning
    if calls := shaped.get("tool_calls"):
        shaped["tool_calls"] = [_shaped_call(call, traits) for call in calls]
        if not text_of(shaped["content"]):
            shaped["content"] = traits.empty_content
            if traits.empty_content == "absent":
                del shaped["content"]
    elif shaped["content"] is None:
        shaped["content"] = ""
    if traits.short_ids and "tool_call_id" in shaped:
        shaped["tool_call_id"] = _short_id(shaped["tool_call_id"])
    return shaped


def _shaped_call(call: Mapping[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    function = dict(call["function"])
    if traits.arguments_as_text:
        function["arguments"] = _as_text(function["arguments"])
    elif not isinstance(function["arguments"], Mapping):  # a client's text that is no object
        function["arguments"] = {"arguments": function["arguments"]}
    return {**call, "id": _short_id(call["id"]) if traits.short_ids else call["id"], "function": function}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _short_id(call_id: str) -> str:
    """Return nine letters and digits, the same for the same id."""
    if len(call_id) == SHORT_ID_LEN and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:SHORT_ID_LEN]
