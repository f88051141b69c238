"""The tool-call format that a chat template teaches."""

import pytest

from quire.text.tool_calls import formats
from quire.text.tool_calls.formats import (
    GEMMA,
    GENERIC,
    HERMES,
    LLAMA,
    MISTRAL,
    ToolCallFormat,
    choose_format,
    uses_tools,
)

QWEN = '{%- if tools %}within <tools></tools> … return <tool_call>\\n{"name": …}\\n</tool_call>{%- endif %}'
LLAMA_31 = "{%- if tools is not none %}{{- '<|python_tag|>' }}{% if message.role == 'ipython' %}{%- endif %}"
LLAMA_32 = '{%- if tools %}{"name": function name, "parameters": dictionary}{% if role == "ipython" %}{%- endif %}'
QWEN_35 = QWEN.replace('{"name": …}', "<function=example>\\n<parameter=x>\\n1\\n</parameter>\\n</function>")
MISTRAL_V3 = "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] ["
GPT_OSS = "{% if tools %}{% endif %}<|start|>assistant to={{ name }}<|channel|>commentary json<|message|>"
GEMMA_4 = "{% if tools %}…{% endif %}<|tool_call>call:{{ name }}{…}<tool_call|>"
GLM_45 = "{% if tools %}<tool_call>{name}\\n<arg_key>{key}</arg_key>…</tool_call>{% endif %}<|observation|>"
GLM_4 = "[gMASK]<sop>{% if tools %}…{% endif %}{{ message.metadata }}<|observation|>"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>…```json"
DEEPSEEK_31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>"
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "chosen"),
    [
        (QWEN, HERMES), (QWEN_35, formats.QWEN), (LLAMA_31, LLAMA), (LLAMA_32, LLAMA), (MISTRAL_V3, MISTRAL),
        (f"{MISTRAL_V3} [ARGS]", formats.MISTRAL_ARGS), (GPT_OSS, formats.HARMONY),
        ("{{ tools }}<|tool_call_start|>", formats.LFM), ("{{ tools }}<function_calls>", formats.OLMO),
        ("{{ tools }}<|tool_call|>", formats.PHI), ("{{ tools }}<seed:tool_call><function=", formats.SEED),
        (GLM_45, formats.GLM_TAGGED), (GLM_4, formats.GLM), (DEEPSEEK, formats.DEEPSEEK),
        (DEEPSEEK_31, formats.DEEPSEEK_V31), ("{{ tools }}" + DEEPSEEK, formats.DEEPSEEK),
        (GEMMA_4, GEMMA), (PLAIN, GENERIC), (None, GENERIC),
        ("{{ tools }}", GENERIC), ("{# <tool_call> #}", GENERIC),
    ],
)  # fmt: skip
def test_format_follows_the_template(template: str | None, chosen: ToolCallFormat) -> None:
    assert choose_format(template) == chosen


def test_uses_tools_finds_the_variable() -> None:
    assert all(uses_tools(template) for template in (QWEN, LLAMA_31, LLAMA_32, MISTRAL_V3))
    assert not any(uses_tools(template) for template in (PLAIN, None, "{{ mytools }}"))


class FakeTokenizer:
    special_token_ids = frozenset({7})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [7] if text == MISTRAL.opening else [1, 2]


def test_special_markers_are_found_by_the_tokenizer() -> None:
    assert choose_format(MISTRAL_V3, FakeTokenizer()).has_special_marker
    assert not choose_format(QWEN, FakeTokenizer()).has_special_marker
    assert choose_format(PLAIN, FakeTokenizer()) is GENERIC
