"""Chat templates in the manner of model families, written for these tests: what they read differs as theirs does."""
# ruff: noqa: E501 - line breaks within a template are text

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Prints every role, and nothing but content."""
LOOP = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
HERMES = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for call in m.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Qwen 2.5 and 3, Hermes: JSON in tags, reasoning under `reasoning_content`."""
QWEN_CODER = """\
{%- macro text(content) %}{% if content is string %}{{ content }}{% elif content is iterable %}
{%- for part in content %}{{ part.text }}{% endfor %}{% endif %}{% endmacro %}
{%- if tools %}<|im_start|>system
{% for tool in tools %}<function><name>{{ tool.function.name }}</name>{{ tool.function.description }}
{%- for name, field in tool.function.parameters.properties | items %}<{{ name }}>{{ field.type }}{% endfor %}</function>
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{{ text(m.content) }}{% if m.tool_calls %}{% for call in m.tool_calls %}<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
"""Qwen3-Coder and 3.5: tagged parameters, arguments that are iterated, content as parts."""
ALTERNATING = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' ~ (m.content | trim) ~ '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
"""Gemma 2: no system role, strict alternation, no tools."""
MISTRAL = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- set ns = namespace(index=0) %}
{%- for m in rest %}
{%- if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}
{%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.index = ns.index + 1 %}{% endif %}{% endfor %}
{%- set last_user = rest | selectattr('role', 'equalto', 'user') | list | last %}
{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if tools and m == last_user %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST]' ~ (system ~ '\n\n' if system is defined and m == last_user else '') ~ m.content ~ '[/INST]' }}
{%- elif m.tool_calls is defined and m.tool_calls is not none %}[TOOL_CALLS][
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids of calls have 9 characters') }}{% endif %}
{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}
{{- ', ' if not loop.last }}{% endfor %}]{{ eos_token }}
{%- elif m.role == 'assistant' %}{{ m.content ~ eos_token }}
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('only user, assistant and tool roles') }}{% endif %}
{%- endfor %}"""
"""Mistral: alternation of users and plain answers, ids of nine characters, tools before the last user's turn."""
DEEPSEEK = """\
{{- bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<｜User｜>{{ m.content }}
{%- elif m.role == 'assistant' and m.content is none %}<｜Assistant｜><｜tool▁calls▁begin｜>
{%- for call in m.tool_calls %}<｜tool▁call▁begin｜>{{ call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}<｜tool▁call▁end｜>
{%- endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>
{%- elif m.role == 'assistant' %}<｜Assistant｜>{{ (m.content.split('</think>') | last) ~ '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<｜Assistant｜><think>
{% endif %}"""
"""DeepSeek-R1: describes no tools, writes calls only beside content None, arguments as text."""
LLAMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}<|start_header_id|>system<|end_header_id|>

{{ system }}<|eot_id|>
{%- if tools %}{% set first = messages[0].content | trim %}{% set messages = messages[1:] %}
{{- '<|start_header_id|>user<|end_header_id|>\n\nFunctions:\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}{{ first + '<|eot_id|>' }}{% endif %}
{%- for m in messages %}
{%- if m.tool_calls is defined and m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}}<|eot_id|>
{%- elif m.role == 'tool' or m.role == 'ipython' %}<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson if m.content is mapping else m.content }}<|eot_id|>
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
"""Llama 3.1: one call a turn, tools in the first user's turn, results as `ipython`."""
HARMONY = """\
{%- set system = '' %}<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>
{%- if messages[0].role in ('system', 'developer') %}{% set system = messages[0].content %}{% set messages = messages[1:] %}
{%- endif %}
{%- if system or tools %}<|start|>developer<|message|># Instructions
{{ system }}{% if tools %}
namespace functions {
{%- for tool in tools %}
// {{ tool.function.description }}
type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}) => any;{% endfor %}
}{% endif %}<|end|>{% endif %}
{%- set last = namespace(name='') %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.tool_calls %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{%- if m.content %}<|start|>assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>{% endif %}
{%- set call = m.tool_calls[0].function %}{% set last.name = call.name %}<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}
{%- elif m.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""gpt-oss: channels, the first call of a turn only, reasoning under `thinking` beside calls."""
GLM_4 = """\
[gMASK]<sop>{% if tools %}<|system|>
{% for tool in tools %}{{ tool.function | tojson(indent=4) }}
{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'observation' %}<|observation|>
{{ m.content }}
{%- elif m.role == 'assistant' and m.metadata %}<|assistant|>{{ m.metadata }}
{{ m.content }}
{%- elif m.role in ('system', 'user', 'assistant') %}<|{{ m.role }}|>
{{ m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""GLM-4 (0414): a call is a turn with `metadata`, its result an observation."""
LFM = """\
{{- bos_token }}{% if messages[0].role == 'system' or tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if tools %}
List of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>{% endif %}<|im_end|>
{% endif %}
{%- for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}
{% if m.role == 'tool' %}<|tool_response_start|>{{ m.content }}<|tool_response_end|>{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""LFM2: describes tools, and writes no calls."""
SMOLLM3 = """\
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if xml_tools %}
<tools>{% for tool in xml_tools %}
{{ tool | string }}{% endfor %}
</tools>{% endif %}{% if python_tools %}
<code>{% for tool in python_tools %}{{ tool | string }}{% endfor %}</code>{% endif %}<|im_end|>
{% for m in messages if m.role != 'system' %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{{ m.content if m.content is string else '' }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""SmolLM3: tools under `xml_tools`, printed as they are."""
GEMMA_4 = """\
{{- bos_token }}{% if messages[0].role == 'system' or tools %}<|turn>system
{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}
{%- for tool in tools or [] %}<|tool>declaration:{{ tool.function.name }}{description:<|"|>{{ tool.function.description }}<|"|>}<tool|>{% endfor %}<turn|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|tool_response>response:{{ m.name }}{value:<|"|>{{ m.content }}<|"|>}<tool_response|>
{%- else %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}
{% if m.content is string %}{{ m.content | trim }}{% elif m.content %}{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}
{%- for call in m.tool_calls or [] %}<|tool_call>call:{{ call.function.name }}{
{%- for name, value in call.function.arguments | dictsort %}{{ ',' if not loop.first }}{{ name }}:
{%- if value is string %}<|"|>{{ value }}<|"|>{% else %}{{ value | tojson }}{% endif %}{% endfor %}}<tool_call|>{% endfor %}<turn|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|turn>model
{% endif %}"""
"""Gemma 4: calls with bare keys, results with the name of their tool."""
GLM_45 = """\
[gMASK]<sop>{% if tools %}<|system|>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|assistant|>
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% else %}<think></think>{% endif %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}
{%- elif m.role == 'tool' %}<|observation|>
<tool_response>{{ m.content }}</tool_response>
{%- else %}<|{{ m.role }}|>
{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ '<think></think>' if enable_thinking is defined and not enable_thinking }}{% endif %}"""
USERS_AND_ANSWERS = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
"""Drops every other role."""
PARTS_OF_USERS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' and m.content is not string %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
"""Loops over parts for users only."""
FAMILIES = {
    "chatml": CHATML, "loop": LOOP, "hermes": HERMES, "qwen-coder": QWEN_CODER, "alternating": ALTERNATING,
    "mistral": MISTRAL, "deepseek": DEEPSEEK, "llama": LLAMA, "harmony": HARMONY, "glm-4": GLM_4, "glm-4.5": GLM_45,
    "lfm": LFM, "smollm3": SMOLLM3, "gemma-4": GEMMA_4, "users and answers": USERS_AND_ANSWERS,
    "parts of users": PARTS_OF_USERS,
}  # fmt: skip
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
