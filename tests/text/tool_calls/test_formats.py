"""The row of a chat template: by the call that it writes, by the markers in its source, by special tokens."""

from pathlib import Path
from typing import Any

import pytest

from quire.text.tool_calls.formats import FORMATS, GENERIC, choose_format, has_special_marker, hinted, recognise
from tests.text.tool_calls.test_families import DOCUMENTED

NAME, ARGUMENTS = "weather", {"city": "Ulm", "days": 3}
JSON = '{"name": "weather", "arguments": {"city": "Ulm", "days": 3}}'
LLAMA = '{"name": "weather", "parameters": {"city": "Ulm", "days": 3}}'
VALUES = '{"city": "Ulm", "days": 3}'
WRITTEN = {
    "hermes": f"<think>\n\n</think>\n\n<tool_call>\n{JSON}\n</tool_call><|im_end|>\n",
    "qwen3-coder": "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n"
    "</function>\n</tool_call><|im_end|>\n",
    "seed": "<seed:tool_call>\n<function=weather>\n<parameter=city>Ulm</parameter>\n<parameter=days>3</parameter>\n"
    "</function>\n</seed:tool_call><seed:eos>",
    "glm-4.5": "\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n"
    "<arg_key>days"
    "</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "glm-4": f"<|assistant|>weather\n{VALUES}",
    "llama": f"<|start_header_id|>assistant<|end_header_id|>\n\n{LLAMA}<|eot_id|>",
    "xlam": f"<|assistant|>\n[{JSON}]<|end|>",
    "lfm": '<|tool_call_start|>[weather(city="Ulm", days=3)]<|tool_call_end|><|im_end|>',
    "olmo": "<function_calls>\nweather(city='Ulm', days=3)\n</function_calls><|im_end|>",
    "mistral": f"[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]{VALUES}</s>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n" + VALUES
    + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    "deepseek-v3.2": '</think><｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" '
    'string="true">Ulm</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>" + VALUES
    + "<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
    "kimi-k3": '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"'
    '<|sep|>Ulm<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Ulm</parameter>\n<parameter '
    'name="days">3</parameter>\n</invoke>\n</minimax:tool_call>[e~[\n',
    "gemma-4": '<|tool_call>call:weather{city:<|"|>Ulm<|"|>,days:3}<tool_call|><turn|>\n',
    "functiongemma": "<start_function_call>call:weather{city:<escape>Ulm<escape>,days:3}<end_function_call>",
    "granite-3": f"<|tool_call|>[{JSON}]<|end_of_text|>",
    "phi-4": f"<|tool_call|>[{JSON}]<|/tool_call|><|end|>",
    "command": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": ' + VALUES
    + "}\n]<|END_ACTION|><|END_OF_TURN_TOKEN|>",
    "nemotron": f"<TOOLCALL>[{JSON}]</TOOLCALL><SPECIAL_12>",
    "jamba": f"<tool_calls>[{JSON}]</tool_calls>",
    "hunyuan": "<answer><tool_calls>\n"
    f"<tool_call>weather\n```json\n{VALUES}\n```\n</tool_call>\n</tool_calls></answer>",
    "hunyuan-3": DOCUMENTED["hunyuan-3"][0][0].partition("\n<tool_call:opensource>clock")[0],
    "apertus": '<|tools_prefix|>[{"weather": {"city": "Ulm", "days": 3}}]<|tools_suffix|>',
    "internlm": f"<|action_start|><|plugin|>\n{JSON}<|action_end|><|im_end|>\n",
    "minicpm": '<function name="weather"><param name="city">Ulm</param><param name="days">3</param></function>',
    "gigachat": f"<|message_sep|>\n\nfunction call<|role_sep|>\n{JSON}<|message_sep|>\n\n",
    "solar": f"<|tool_calls|><|tool_call:begin|>x<|tool_call:name|>weather<|tool_call:args|>{VALUES}<|tool_call:end|>",
    "harmony": f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{VALUES}<|call|>",
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_row_is_recognised_by_the_call_that_a_template_writes(name: str) -> None:
    written = WRITTEN[name]
    found = recognise(written, NAME, ARGUMENTS)
    assert found is not None
    assert found.name == name
    assert choose_format("{{ messages }}", written=written, name=NAME, arguments=ARGUMENTS) is found
    assert recognise(written, NAME, {"city": "Bonn"}) is None
    assert recognise(written, "clock", ARGUMENTS) is None


def test_versions_of_a_family_share_a_row() -> None:
    for name, written in {
        "mistral": f'[TOOL_CALLS] [{JSON[:-1]}, "id": "abcdef123"}}]</s>',
        "deepseek": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{VALUES}<｜tool▁call▁end｜>",
        "llama": f"<|python_tag|>{LLAMA}<|eom_id|>",
    }.items():
        assert recognise(written, NAME, ARGUMENTS) is FORMATS[name]


def test_bare_object_tells_nothing_and_hints_decide() -> None:
    assert recognise(f"<|assistant|>{JSON}", NAME, ARGUMENTS) is None
    source = "Answer with <tool_call>. {{ tools }}"
    assert choose_format(source, written=JSON, name=NAME, arguments=ARGUMENTS) is FORMATS["hermes"]
    assert choose_format("{{ tools }}", written=JSON, name=NAME, arguments=ARGUMENTS) is GENERIC
    assert recognise("The weather in Ulm.", NAME, ARGUMENTS) is None


@pytest.mark.parametrize(
    ("source", "tokens", "name"),
    [
        ("{% if tools %}within <tools></tools>, <tool_call>{% endif %}", (), "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=x>", (), "qwen3-coder"),
        ("<tool_call>{name}\n<arg_key>{key}</arg_key>{% endif %}<|observation|>", (), "glm-4.5"),
        ("{% if tools %}{% endif %}{{ message.metadata }}<|observation|>", (), "glm-4"),
        ('<tool_call> … <code>{{ python_tools }}', (), "smollm3"),
        ("{% if tools %}<|tool_list_start|>{{tools|tojson}}{% endif %}", (), "lfm"),
        ('{"name": function name, "parameters": dictionary}{% if role == "ipython" %}', (), "llama"),
        ("[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS] [", (), "mistral"),
        ("<|start|>assistant to={{ name }}<|channel|>commentary json<|message|>", (), "harmony"),
        ("<|tool_call|>[…]<|/tool_call|>", (), "phi-4"), ("<|tool_call|>[…]", (), "granite-3"),
        ("<tool_calls><tool_call>", (), "hunyuan"), ("<tool_calls>[…]", (), "jamba"),
        ("<start_of_turn>user", (), "gemma-3"), ("{{ messages }}", ("<|tool_call_start|>", "<s>"), "lfm"),
        ("<tool_call>", ("[TOOL_CALLS]",), "hermes"), ("{{ tools }}", ("[TOOL_CALLS]",), "mistral"),
    ],
)  # fmt: skip
def test_markers_in_the_source_or_among_special_tokens_are_hints(
    source: str, tokens: tuple[str, ...], name: str
) -> None:
    assert hinted(source, tokens) is FORMATS[name]
    assert choose_format(source, special_tokens=tokens) is FORMATS[name]


@pytest.mark.parametrize(
    "source", ["{{ messages }}", "", None, "{{ tools }}", "{# <tool_call> #}", "{#\n[TOOL_CALLS]\n#}"]
)
def test_without_any_hint_the_format_is_generic(source: str | None) -> None:
    assert choose_format(source) is GENERIC
    assert hinted(source or "") is None


def test_documentation_has_every_row() -> None:
    page = (Path(__file__).parents[3] / "docs" / "structured-output.md").read_text()
    assert [row.name for row in FORMATS.values() if f"| `{row.name}` | {row.models} |" not in page] == []


class FakeTokenizer:
    special_token_ids = frozenset({7})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [7] if text == "[TOOL_CALLS]" else [1, 2]


def test_special_markers_are_found_by_the_tokenizer() -> None:
    tokenizer: Any = FakeTokenizer()
    assert has_special_marker(FORMATS["mistral"], tokenizer)
    assert not has_special_marker(FORMATS["hermes"], tokenizer)
    assert not has_special_marker(GENERIC, tokenizer)
