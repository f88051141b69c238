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


def render(template: str, messages: Any = CHAT, *, tools: Any = None, variables: Any = None, **options: Any) -> str:
    return ChatTemplate(template).render(messages, variables={"tools": tools, **(variables or {})}, **options)


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


def test_free_variables_are_those_that_a_template_may_read_from_outside() -> None:
    assert ChatTemplate(TOOLS_TEMPLATE).free_variables == ["add_generation_prompt", "messages", "tools"]


# --- Refusals ---------------------------------------------------------------------------------

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
