import enum
import json
from typing import Any

import pytest

from quire.errors import ChatTemplateError
from quire.text.chat_template import MAX_TEMPLATE_CHARACTERS, ChatTemplate

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALTERNATING = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim + '\\n\\n' %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the system message, roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""
TOOLS_TEMPLATE = """
{%- set ns = namespace(calls=0) -%}
{%- macro turn(role, text) -%}<|{{ role }}|>{{ text }}<|end|>
{% endmacro -%}
{%- if tools %}
  {{- turn('system', 'Tools: ' ~ (tools | map('tojson') | join('\\n'))) }}
  {{- tools | tojson(indent=2) }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'skip' %}{% continue %}{% endif %}
  {%- if message.role == 'halt' %}{% break %}{% endif %}
  {%- if message.tool_calls is defined and message.tool_calls %}
    {%- for call in message.tool_calls %}
      {%- set ns.calls = ns.calls + 1 %}
      {{- '<call ' ~ ns.calls ~ '>' ~ (call.function | tojson) }}
    {%- endfor %}
  {%- else %}
    {%- generation %}{{ turn(message.role, message.content) }}{% endgeneration %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""
PARTS_TEMPLATE = """
{%- for message in messages %}{{ message.role }}:
    {%- if message['content'] is string %}{{ message['content'] }}
    {%- else %}{% for part in message['content'] %}[{{ part['text'] }}]{% endfor %}{% endif %}
{% endfor %}"""
REASONING = """
{%- for m in messages %}
    {%- set content = m.content %}
    {%- if m.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>' }}{% endif %}
{%- if documents %}{{ documents | length }}{% endif %}"""
CHAT = [
    {"role": "user", "content": "  Hello <b>& “you”</b>  "},
    {"role": "assistant", "content": "<think>hm</think>\nHi! "},
    {"role": "user", "content": "Thanks\n\n"},
]
SYSTEM = {"role": "system", "content": " Be brief. "}
TOOLS = [
    {"type": "function", "function": {"name": "größe", "parameters": {"a": {"type": "<int>", "n": [1, 2.5, None]}}}}
]
CALLS = [
    {"role": "skip", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": "é"}}}] * 2},
    {"role": "user", "content": "ok"},
    {"role": "halt", "content": "x"},
    {"role": "user", "content": "unseen"},
]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


def render(template: str, messages: Any = CHAT, **options: Any) -> str:
    return ChatTemplate(template).render(messages, **options)


def transformers_render(template: str, messages: Any, **options: Any) -> str:
    module = pytest.importorskip("transformers.utils.chat_template_utils")
    variables = options.pop("variables", {})
    rendered, _ = module.render_jinja_template([messages], chat_template=template, **options, **variables)
    text: str = rendered[0]
    return text


GOLDEN = [
    ("smollm2", SMOLLM2, CHAT, {}),
    ("smollm2 with a system message", SMOLLM2, [SYSTEM, *CHAT], {"add_generation_prompt": True}),
    ("alternating", ALTERNATING, CHAT, {"variables": VARIABLES}),
    ("alternating with a system message", ALTERNATING, [SYSTEM, *CHAT], {"variables": VARIABLES}),
    ("tools", TOOLS_TEMPLATE, CALLS, {"tools": TOOLS, "add_generation_prompt": True}),
    ("no tools", TOOLS_TEMPLATE, CALLS, {}),
    ("text and parts", PARTS_TEMPLATE, [CHAT[0], {"role": "user", "content": [{"type": "text", "text": "a"}] * 2}], {}),
    (
        "reasoning",
        REASONING,
        CHAT,
        {"variables": {"enable_thinking": False, "documents": [{"title": "t", "text": "x"}]}},
    ),
]


@pytest.mark.parametrize(("template", "messages", "options"), [case[1:] for case in GOLDEN], ids=[c[0] for c in GOLDEN])
def test_rendered_chat_equals_transformers(template: str, messages: Any, options: dict[str, Any]) -> None:
    assert render(template, messages, **options) == transformers_render(template, messages, **options)


@pytest.mark.parametrize("template", [SMOLLM2, ALTERNATING, TOOLS_TEMPLATE, REASONING])
@pytest.mark.parametrize("text", ["The answer is", "trailing space ", "\nlines\n"])
def test_continued_message_equals_transformers(template: str, text: str) -> None:
    messages = [CHAT[0], {"role": "assistant", "content": text}]
    options: dict[str, Any] = {"continue_final_message": True, "variables": VARIABLES}
    ours = render(template, messages, **options)
    assert ours == transformers_render(template, messages, **options)
    assert ours.rstrip().endswith(text.strip())


def test_last_text_part_is_continued() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "assistant", "content": parts}]
    assert render(PARTS_TEMPLATE, messages, continue_final_message=True) == "assistant:[one][two"
    assert render(SMOLLM2, messages, continue_final_message=True).endswith("assistant\none\ntwo")


@pytest.mark.parametrize("content", [None, []])
def test_message_without_text_cannot_be_continued(content: Any) -> None:
    with pytest.raises(ChatTemplateError, match="continue_final_message needs text"):
        render(PARTS_TEMPLATE, [{"role": "assistant", "content": content}], continue_final_message=True)


def test_template_that_drops_the_message_cannot_continue_it() -> None:
    with pytest.raises(ChatTemplateError, match="changes or drops it"):
        render("{{ messages[0].role }}", CHAT, continue_final_message=True)


def test_parts_are_joined_if_the_template_expects_text() -> None:
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": content}]) == "one\ntwo"


ROLES = "{% for message in messages %}<{{ message.role }}>{% endfor %}"
NAMES_DEVELOPER = ROLES + "{% if messages[0].role == 'developer' %}!{% endif %}"


@pytest.mark.parametrize(
    ("template", "text"), [(ROLES, "<system><user>"), (NAMES_DEVELOPER, "<developer><user>!")], ids=["old", "new"]
)
def test_developer_becomes_system_for_templates_without_that_role(template: str, text: str) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert render(template, messages, add_generation_prompt=False) == text
    assert messages[0]["role"] == "developer"


def test_parts_may_come_in_a_tuple() -> None:
    parts = ({"type": "text", "text": "a"}, {"type": "text", "text": "b"})
    message = {"role": "user", "content": parts}
    assert render("{{ messages[0].content }}", [message], add_generation_prompt=False) == "a\nb"
    assert render("{{ messages[0].content }}", [message], continue_final_message=True) == "a\nb"


def test_callers_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    before = json.dumps(messages)
    render("{{ messages[0].content }}", messages, continue_final_message=True)
    assert json.dumps(messages) == before


def test_template_gets_plain_data() -> None:
    class Role(enum.StrEnum):
        USER = "user"

    messages = [{"role": Role.USER, "content": "x", "meta": (1, True, 2.5, None)}]
    assert render("{{ messages[0].role }}{{ messages[0] | tojson }}", messages) == (
        'user{"role": "user", "content": "x", "meta": [1, true, 2.5, null]}'
    )


# --- Refusals ---------------------------------------------------------------------------------

BAD_MESSAGES: list[tuple[Any, str]] = [
    ("hi", "Expected `array`, got `str`; messages must be objects with a role and text"),
    ([], "length >= 1"),
    (["hi"], r"Expected `object`, got `str` - at `messages\[0\]`"),
    ([CHAT[0], {"content": "x"}], r"missing required field `role` - at `messages\[1\]`"),
    ([{"role": 1, "content": "x"}], r"Expected `str`, got `int` - at `messages\[0\].role`"),
    ([{"role": "user", "content": 3}], r"got `int` - at `messages\[0\]\.content`"),
    ([{"role": "user", "content": ["x"]}], r"got `str` - at `messages\[0\]\.content\[0\]`"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], r"'image_url' - at .*content\[0\]\.type`; .* text only"),
    ([{"role": "user", "content": "x", "extra": object()}], "messages cannot be passed to the chat template.*: object"),
    ([{"role": "user", "content": b"x"}], r"got `bytes` - at `messages\[0\]\.content`"),
    ([{"role": "user", "content": "x", 3: "y"}], r"at `messages\[0\]`|key"),
]


@pytest.mark.parametrize(("messages", "message"), BAD_MESSAGES)
def test_bad_message_is_refused_by_place(messages: Any, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(SMOLLM2, messages)


@pytest.mark.parametrize("tools", ["x", [1], {"a": 1}])
def test_bad_tools_are_refused(tools: Any) -> None:
    with pytest.raises(ChatTemplateError, match="tools must be objects such as"):
        render(SMOLLM2, CHAT, tools=tools)


def test_deep_nesting_is_refused() -> None:
    nested: Any = "x"
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ChatTemplateError, match="recursion"):
        render(SMOLLM2, [{"role": "user", "content": "x", "extra": nested}])


BAD_TEMPLATES = [
    ("a\n{% for %}", "error in line 2"),
    ("{% unknown %}", "unknown tag 'unknown'"),
    ("{{ messages.x.y }}", "UndefinedError"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ("{{ messages[0].content + 1 }}", "TypeError"),
    ("{{ missing | tojson }}", "TypeError"),
    ("{{ 'a' | nofilter }}", "No filter named 'nofilter'"),
    ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
    ("{{ raise_exception('one\ntwo') }}", "refused the messages: one two"),
    ("(" * 50 + "{{ " + "(" * 5000 + ")" * 5000 + " }}", "chat template"),
]


@pytest.mark.parametrize(("template", "message"), BAD_TEMPLATES)
def test_template_errors_are_one_line(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message) as caught:
        render(template)
    assert "\n" not in str(caught.value)


def test_template_length_is_bounded() -> None:
    with pytest.raises(ChatTemplateError, match=f"more than the {MAX_TEMPLATE_CHARACTERS} allowed"):
        render("x" * (MAX_TEMPLATE_CHARACTERS + 1))
