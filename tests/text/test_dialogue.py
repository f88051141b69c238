"""Conversations reach templates of all families without loss, and as Transformers renders them where it can."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from quire.errors import ChatTemplateError
from quire.text.dialogue import Dialogue, DialogueOptions, PreparedPrompt
from quire.text.messages import text_of
from quire.text.template_probe import probe
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_parts import TokenizerParts
from tests.text.builders import byte_level_backend
from tests.text.families import FAMILIES, LOOP, PARTS_OF_USERS, USERS_AND_ANSWERS, VARIABLES

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def dialogue(templates: str | Mapping[str, str], variables: Mapping[str, str] = VARIABLES) -> Dialogue:
    named = {"default": templates} if isinstance(templates, str) else dict(templates)
    tokenizer = Tokenizer(TokenizerParts(byte_level_backend(), None, 0, dict(variables), named))
    return Dialogue(named, tokenizer)


def prepare(template: str, messages: list[Any], tools: Any = None, **options: Any) -> PreparedPrompt:
    return dialogue(template).prepare(messages, tools, DialogueOptions(**options))


def text(template: str, messages: list[Any], tools: Any = None, **options: Any) -> str:
    return prepare(template, messages, tools, **options).text


def user(content: Any = "hi", **others: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **others}


def system(content: Any = "Be brief.") -> dict[str, Any]:
    return {"role": "system", "content": content}


def answer(content: Any = "Fine.", **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **others}


def call(*names: str, arguments: Any = '{"city": "Ulm"}', content: Any = None, **others: Any) -> dict[str, Any]:
    calls = [
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, name in enumerate(names or ("weather",))
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, **others}


def result(content: Any = "sunny", index: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{index}", "content": content}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": item} for item in texts]


# --- Every template, every conversation -------------------------------------------------------

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [user()],
    "system": [system(), user()],
    "system in parts": [system(parts("Be brief.", "Be kind.")), user()],
    "several systems": [system("Be brief."), system("Be kind."), user()],
    "developer": [{"role": "developer", "content": "Be brief."}, user()],
    "later system": [user(), answer(), system("Be kind."), user("more")],
    "only a system": [system()],
    "user in parts": [user(parts("one", "two"))],
    "two users": [user("one"), user("two")],
    "assistant first": [answer("Hello!"), user()],
    "two answers": [user(), answer("one"), answer("two"), user("more")],
    "history": [system(), user(), answer(), user("more")],
    "answer in parts": [user(), answer(parts("Fine.", "Thanks.")), user("more")],
    "call": [user(), call()],
    "result": [user(), call(), result()],
    "result, then an answer": [system(), user(), call(), result(), answer("It is sunny."), user("more")],
    "result, then a user": [user(), call(), result(), user("more")],
    "result in parts": [user(), call(), result(parts("sunny", "warm"))],
    "empty content": [user(), call(content=""), result()],
    "text beside a call": [user(), call(content="Looking."), result(), answer("It is sunny.")],
    "empty arguments": [user(), call(arguments=""), result()],
    "arguments that are an object": [user(), call(arguments={"city": "Ulm"}), result()],
    "arguments that are no object": [user(), call(arguments="Ulm!"), result()],
    "parallel calls": [user(), call("weather", "clock"), result("sunny", 0), result("noon", 1), answer("Noon.")],
    "calls in a row": [user(), call(), result(), call("clock"), result("noon"), answer("Noon.")],
    "no calls": [user(), answer(tool_calls=[]), user("more")],
    "replayed answer": [user(), {**answer(), "refusal": None, "audio": None, "parsed": {"a": 1}}, user("more")],
    "reasoning": [user(), answer(reasoning="Hm.", reasoning_content="Hm."), user("more")],
    "reasoning beside a call": [user(), call(reasoning_content="I look."), result()],
    "unanswered call": [user(), call(), user("never mind")],
    "result without a call": [user(), result()],
    "older function": [
        user(), {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
        {"role": "function", "name": "weather", "content": "sunny"},
    ],
}  # fmt: skip


def words_of(messages: list[dict[str, Any]]) -> list[str]:
    """Return the texts that a prompt must have: contents, and the names and arguments of calls."""
    found: list[str] = []
    for message in messages:
        found += [part["text"] for part in message["content"]] if isinstance(message["content"], list) else []
        found += [message["content"]] if isinstance(message["content"], str) and message["content"] else []
        calls = [each["function"] for each in message.get("tool_calls", [])]
        for function in [*calls, *([message["function_call"]] if "function_call" in message else [])]:
            found.append(function["name"])
            found += (
                ["city", "Ulm"] if "city" in function["arguments"] else ["Ulm!"] if "!" in function["arguments"] else []
            )
    return found


@pytest.mark.parametrize("tools", [None, [WEATHER, CLOCK]], ids=["plain", "tools"])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("template", FAMILIES.values(), ids=FAMILIES)
def test_no_text_is_lost(template: str, messages: list[dict[str, Any]], tools: Any) -> None:
    before = json.dumps(messages)
    found = text(template, messages, tools)
    assert json.dumps(messages) == before
    place = 0
    for word in words_of(messages):
        at = found.find(word, place) if word not in ("weather", "city", "Ulm", "clock") else found.find(word)
        assert at >= 0, f"{word!r} is missing, or out of order, in {found!r}"
    if tools:
        assert "Weather of a city" in found
    assert "'type'" not in found
    assert '"type": "text"' not in found
    assert "None" not in found


# --- As Transformers renders ------------------------------------------------------------------


def transformers_text(template: str, messages: list[Any], tools: Any = None, **variables: Any) -> str:
    module = pytest.importorskip("transformers.utils.chat_template_utils")
    options = {"chat_template": template, "tools": tools, "add_generation_prompt": True, **VARIABLES, **variables}
    rendered, _ = module.render_jinja_template([messages], **options)
    found: str = rendered[0]
    return found


def as_trained(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Return messages as a maker's example writes them for a template: arguments, names and ids in its form."""
    traits = probe(template, VARIABLES)
    names = {}
    found = []
    for message in messages:
        item = dict(message)
        if "tool_calls" in item and not item.pop("tool_calls"):
            pass
        elif "tool_calls" in message:
            item["content"] = item["content"] or traits.empty_content
            item["tool_calls"] = []
            for each in message["tool_calls"]:
                names[each["id"]] = each["function"]["name"]
                arguments = each["function"]["arguments"]
                if isinstance(arguments, str) and not traits.arguments_as_text:
                    arguments = json.loads(arguments)
                function = {**each["function"], "arguments": arguments}
                item["tool_calls"].append({**each, "function": function})
        if item["role"] == "tool":
            item["name"] = names.get(item["tool_call_id"], "")
        found.append(item)
    return found


SIMPLE = ("user", "system", "history", "result", "result, then an answer", "replayed answer")


@pytest.mark.parametrize("tools", [None, [WEATHER]], ids=["plain", "tools"])
@pytest.mark.parametrize("name", SIMPLE)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_template_can_do_is_rendered_as_transformers_does(family: str, name: str, tools: Any) -> None:
    template, messages = FAMILIES[family], CONVERSATIONS[name]
    traits = probe(template, VARIABLES)
    has_call, has_system = any("tool_calls" in item for item in messages), messages[0]["role"] == "system"
    if (tools and traits.tools != "tools") or (has_call and (traits.calls != "tool_calls" or traits.short_ids)):
        pytest.skip("the template does not read these")
    if (has_system and not traits.system) or (has_call and traits.result_role != "tool"):
        pytest.skip("the template does not read these")
    assert text(template, messages, tools) == transformers_text(template, as_trained(messages, template), tools)


# --- Single rules -----------------------------------------------------------------------------


def test_tools_are_described_where_the_template_reads_none() -> None:
    template = "{# <tools> #}{{ xml_tools or '' }}" + LOOP
    found = text(template, [user()], [WEATHER])
    assert json.loads(found[: found.index("<user>")]) == [WEATHER]
    assert '"weather"' in text(LOOP, [user()], [WEATHER])
    assert text("{# tools #}" + LOOP, [user()], [WEATHER]).startswith("<system>You can call")


def test_system_and_tools_go_into_the_first_user_turn_if_the_template_has_no_system_role() -> None:
    raising = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + LOOP
    found = text(raising, [user()], [WEATHER])
    assert found.startswith("<user>You can call")
    assert found.endswith("\n\nhi")
    assert text(raising, [system(), user()]) == "<user>Be brief.\n\nhi"


def test_results_are_turns_that_the_template_prints() -> None:
    found = text(USERS_AND_ANSWERS, [user(), call(), result()])
    assert found.startswith("[user]hi[assistant]")
    assert json.loads(found[found.index("{") : found.rindex("}") + 1])["name"] == "weather"
    assert found.endswith("[user]Result of weather:\nsunny")


@pytest.mark.parametrize("arguments", ['{"city": "Ulm"}', {"city": "Ulm"}])
def test_arguments_are_encoded_once(arguments: Any) -> None:
    template = LOOP + "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}" \
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"  # fmt: skip
    assert '{"city": "Ulm"}' in text(template, [user(), call(arguments=arguments), result()])


def test_empty_arguments_are_an_empty_object() -> None:
    call_as_text = "{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %})"
    template = (
        f"{LOOP}{{% for m in messages %}}{{% for c in m.tool_calls or [] %}}{call_as_text}{{% endfor %}}{{% endfor %}}"
    )
    assert "weather()" in text(template, [user(), call(arguments=""), result()])
    assert "weather(city=Ulm)" in text(template, [user(), call(), result()])


def test_parts_are_text_for_roles_that_the_template_prints_as_text() -> None:
    found = text(PARTS_OF_USERS, [system(parts("a", "b")), user(parts("c", "d")), call(), result(parts("e", "f"))])
    assert found.startswith("<system>a\nb<user>cd<assistant>")
    assert found.endswith("<tool>e\nf")


def test_empty_list_of_calls_is_left_out() -> None:
    template = "{% for m in messages %}{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c.function.name }}" \
        "{{ c.function.arguments }}{% endfor %}{% else %}{{ m.content }};{% endif %}{% endfor %}"  # fmt: skip
    assert text(template, [user(), answer(tool_calls=[]), user("more")]) == "hi;Fine.;more;"


@pytest.mark.parametrize("sent", ["reasoning", "reasoning_content", "thinking"])
@pytest.mark.parametrize("read", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_is_under_the_name_that_the_template_reads(sent: str, read: str) -> None:
    template = "{% for m in messages %}{% if m.NAME %}({{ m.NAME }}){% endif %}{{ m.content }}{% endfor %}"
    assert text(template.replace("NAME", read), [user(), answer(**{sent: "Hm."})]) == "hi(Hm.)Fine."


def test_named_templates_are_chosen_as_transformers_does() -> None:
    both = dialogue({"default": "D{{ messages[0].content }}", "tool_use": "T{{ messages[0].content }}"})
    assert both.prepare([user()]).text == "Dhi"
    assert both.prepare([user()], [WEATHER]).text.startswith("T")
    assert both.prepare([user()], None, DialogueOptions(chat_template="tool_use")).text == "Thi"
    alone = dialogue({"tool_use": "T{{ messages[0].content }}"})
    assert alone.prepare([user()], [WEATHER]).text.startswith("T")
    with pytest.raises(ChatTemplateError, match="no chat template named 'rag': give one of its templates"):
        both.prepare([user()], None, DialogueOptions(chat_template="rag"))


def test_missing_template_names_the_next_step() -> None:
    with pytest.raises(ChatTemplateError, match="chat_template="):
        dialogue({}).prepare([user()])
    with pytest.raises(ChatTemplateError, match=r"no default chat template.*of one, two"):
        dialogue({"one": "1", "two": "2"}).prepare([user()])


def test_described_calls_have_the_form_that_the_template_writes() -> None:
    found = text(FAMILIES["deepseek"], [user()], [WEATHER])
    assert "<｜tool▁call▁begin｜>function<｜tool▁sep｜><name>\n```json\n" in found
    assert '{"<argument>": "<value>"}' in found


def test_ids_have_nine_characters_where_the_template_demands_it() -> None:
    found = text(FAMILIES["mistral"], [user(), call("weather", "clock"), result("a", 1), result("b", 0)], [WEATHER])
    written = re.findall(r'"id": "(\w+)"', found)
    assert [len(item) for item in written] == [9, 9]
    assert re.findall(r'"call_id": "(\w+)"', found) == [written[1], written[0]]


def test_tools_without_descriptions_reach_a_template_that_reads_them() -> None:
    fields = "{% for k, v in f.parameters.properties | items %}{{ k + v.description }}{% endfor %}"
    described = f"{{% set f = tool.function %}}{{{{ f.name + f.description }}}}{fields}"
    template = f"{{% for tool in tools or [] %}}{described}{{% endfor %}}{LOOP}"
    assert text(template, [user()], [CLOCK]) == "clock<user>hi"
    assert text(template, [user()], [WEATHER]) == "weatherWeather of a citycity<user>hi"


def test_final_message_is_continued_as_transformers_does() -> None:
    for family in ("chatml", "hermes", "llama", "alternating", "glm-4.5"):
        messages = [user(), answer("The answer is ")]
        ours = text(FAMILIES[family], messages, add_generation_prompt=False, continue_final_message=True)
        theirs = transformers_text(FAMILIES[family], messages, add_generation_prompt=False, continue_final_message=True)
        assert ours == theirs
        assert ours.rstrip().endswith("The answer is")


def test_text_of_joins_parts() -> None:
    assert (text_of(parts("a", "b")), text_of(None), text_of("c")) == ("a\nb", "", "c")


# --- Wrong messages ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", r"messages must be a list of messages, got \"hi\""),
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] must be an object with a role and text"),
        ([user(), {"content": "x"}], r"messages\[1\]\.role must be text"),
        ([user(3)], r"messages\[0\]\.content must be text, or a list of parts"),
        ([user([{"type": "image_url"}])], r"content\[0\]\.type must be 'text': this engine reads text only"),
        ([user("x", extra=object())], "messages cannot be passed to the chat template.*: object"),
        ([user(), {**call(), "tool_calls": "x"}], r"messages\[1\]\.tool_calls must be a list of calls"),
        ([user(), {**call(), "tool_calls": [{"id": "1"}]}], r"tool_calls\[0\] must be \{'function'"),
    ],
)
def test_wrong_message_is_named_by_its_place(messages: Any, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        text(LOOP, messages)


def test_callers_objects_reach_the_template_as_plain_data() -> None:
    messages = [user("x", meta=(1, True, 2.5))]
    assert text("{{ messages[0].meta | tojson }}{{ messages[0].content }}", messages) == "[1, true, 2.5]x"


def test_calls_have_the_familys_form_where_the_template_writes_none() -> None:
    found = text(FAMILIES["lfm"], [user(), call("weather", "clock"), result(), result("noon", 1)], [WEATHER, CLOCK])
    assert '<|tool_call_start|>[weather(city="Ulm"), clock(city="Ulm")]<|tool_call_end|>' in found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_in_the_history_is_read_as_it_was_written(family: str) -> None:
    """The reader of answers understands what the prompt shows as an earlier call."""
    prepared = prepare(FAMILIES[family], [user("What now?"), call()], [WEATHER], add_generation_prompt=False)
    reader = prepared.reply_reader()
    assert reader is not None
    message, reason = reader.message(prepared.text.rpartition("What now?")[2], "stop")
    (found,) = (each["function"] for each in message["tool_calls"])
    assert (found["name"], json.loads(found["arguments"]), reason) == ("weather", {"city": "Ulm"}, "tool_calls")


def test_half_of_a_surrogate_pair_in_replayed_arguments_is_replaced() -> None:
    arguments = '{"city": "cut \\ud83d", "sky": "\\ud83e\\udd6d", "path": "C:\\\\u00"}'
    said = text(LOOP, [user(), call(arguments=arguments), result()])
    assert '{"city": "cut \ufffd", "sky": "\U0001f96d", "path": "C:\\\\u00"}' in said


def test_system_message_is_added_only_for_tools_that_need_one() -> None:
    offered = "{% if m.role == 'system' and tools %}{{ tools | tojson }}{% endif %}"
    template = f"{{% for m in messages %}}<{{{{ m.role }}}}>{offered}{{{{ m.content }}}}{{% endfor %}}"
    assert text(template, [user()]) == "<user>hi"
    found = text(template, [user()], [WEATHER])
    assert found.startswith("<system>[")
    assert found.endswith("<user>hi")
