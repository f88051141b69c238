"""Each family's calls as its makers document them, and with the slips that models make, for every cut of the text."""

import json

import pytest

from quire.text.tool_calls.formats import FORMATS, GENERIC
from tests.text.tool_calls.builders import TOOLS, cuts, parse

ULM, BOTH = '{"city": "Ulm", "days": 3}', [("weather", '{"city": "Ulm", "days": 3}'), ("clock", "{}")]
ONE, CITY = BOTH[:1], [("weather", '{"city": "Ulm"}')]
W = '{"name": "weather", "arguments": {"city": "Ulm", "days": 3}}'
P = '{"name": "weather", "parameters": {"city": "Ulm", "days": 3}}'
C = '{"name": "clock", "arguments": {}}'
QWEN = "<function=weather>\n<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
QWEN_CLOCK = "<function=clock>\n</function>"
D, DE, DS = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
DD, DDE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DSML = (
    '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Ulm</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="clock">\n</｜DSML｜invoke>\n'
)
GLM = "<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
INVOKE = '<invoke name="weather">\n<parameter name="city">Ulm</parameter>\n<parameter name="days">3</parameter>\n'
KIMI = "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
HY = ":opensource>"
Case = tuple[str, str, list[tuple[str, str]]]

DOCUMENTED: dict[str, list[Case]] = {
    "hermes": [
        (f"Sure.\n<tool_call>\n{W}\n</tool_call>\n<tool_call>\n{C}\n</tool_call>\n", "Sure.", BOTH),
        (f"<tool_call>[{W}, {C}]</tool_call> Done. ", " Done. ", BOTH),
        ('<tool_call>{"arguments": {"city": "Ulm"}, "id": 3, "name": "weather"}</tool_call>', "", CITY),
        ('<tool_call>{"name": "clock", "arguments": null}</tool_call>', "", BOTH[1:]),
        ('<tool_call>{"name": "clock"}</tool_call>', "", BOTH[1:]),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call><tool_call>"}}</tool_call>', "",
         [("f", '{"a": "</tool_call><tool_call>"}')]),
    ],
    "smollm3": [
        (f"<tool_call>{W}</tool_call>", "", ONE),
        ("<code>weather(city='Ulm', days=3)\nclock()</code>", "", BOTH),
        ("<code>\nresult = weather(\"Ulm\", days=3)\n</code>", "", ONE),
    ],
    "qwen3-coder": [
        (f"Well.\n<tool_call>\n{QWEN}\n</tool_call>\n<tool_call>\n{QWEN_CLOCK}\n</tool_call>", "Well.", BOTH),
        (f"<tool_call>\n{QWEN}\n{QWEN_CLOCK}\n</tool_call>", "", BOTH),
        ("<tool_call><function=f><parameter=a>\n\n{x\n\n</parameter><parameter=b c>\n[1, \"</x>\"]\n</parameter>"
         "</function></tool_call>", "", [("f", '{"a": "\\n{x\\n", "b c": [1, "</x>"]}')]),
        ("<tool_call><function=f><parameter=a>see </function> and </tool_call></parameter></function></tool_call>", "",
         [("f", '{"a": "see </function> and </tool_call>"}')]),
    ],
    "seed": [
        (f"<seed:tool_call>\n{QWEN}\n</seed:tool_call>\n<seed:tool_call>\n{QWEN_CLOCK}\n</seed:tool_call>", "", BOTH),
    ],
    "glm-4.5": [
        (f"\nWell.\n<tool_call>weather\n{GLM}</tool_call>\n<tool_call>clock\n</tool_call>", "\nWell.", BOTH),
        ("<tool_call>clock</tool_call><tool_call>weather<arg_key>city</arg_key><arg_value>Ulm</arg_value>"
         "</tool_call> Done.", " Done.", [BOTH[1], CITY[0]]),
    ],
    "glm-4": [
        (f"weather\n{ULM}", "", ONE),
        (f"\nweather \n{ULM}<|assistant|>clock\n{{}}\n", "", BOTH),
        ("clock\n{}\nDone.", "\nDone.", BOTH[1:]),
    ],
    "llama": [
        (P, "", ONE),
        (f"<|python_tag|>{P}", "", ONE),
        (f"\n{P}; {C}\n", "", BOTH),
        ('<|python_tag|>brave_search.call(query="Ulm, today")', "", [("brave_search", '{"query": "Ulm, today"}')]),
        ('[weather(city="Ulm", days=3), clock()]', "", BOTH),
        ('<|python_start|>[weather(city="Ulm", days=3)]<|python_end|>', "", ONE),
        (f"<function=weather>{ULM}</function><function=clock>{{}}</function>", "", BOTH),
        ('{"type": "function", "function": {"name": "clock", "arguments": "{}"}}', "", BOTH[1:]),
    ],
    "xlam": [(f"[{W}, {C}]", "", BOTH)],
    "lfm": [
        ('Yes. <|tool_call_start|>[weather(city="Ulm", days=3), clock()]<|tool_call_end|>Done.', "Yes.Done.", BOTH),
        ("""<|tool_call_start|>[f(a="x]\\"", b={'c': [1, -2.5, null, True]}), a.g()]<|tool_call_end|>""", "",
         [("f", '{"a": "x]\\"", "b": {"c": [1, -2.5, null, true]}}'), ("a.g", "{}")]),
        ('[weather(city="Ulm")]', "", CITY),
        (f"<|tool_call_start|>[{W}]<|tool_call_end|>", "", ONE),
    ],
    "olmo": [("<function_calls>\nweather(city='Ulm', days=3)\nclock()\n</function_calls>", "", BOTH)],
    "mistral": [
        (f"[TOOL_CALLS] [{W}, {C}]", "", BOTH),
        (f'[TOOL_CALLS][{W[:-1]}, "id": "abcdef123"}}]', "", ONE),
        (f"Yes. [TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{ULM}[TOOL_CALLS]clock[CALL_ID]x[ARGS]{{}}", "Yes.", BOTH),
        (f"[TOOL_CALLS]weather[ARGS]{ULM}", "", ONE),
    ],
    "deepseek": [
        (f"Hm.\n\n{DD}{D}function{DS}weather\n```json\n{ULM}\n```{DE}\n{D}function{DS}clock\n```json\n{{}}\n```{DE}{DDE}",
         "Hm.", BOTH),
        (f"Yes. {DD}{D}weather{DS}{ULM}{DE}{D}clock{DS}{{}}{DE}{DDE}\n", "Yes.", BOTH),
    ],
    "deepseek-v3.2": [
        (f"Ok.\n\n<｜DSML｜function_calls>\n{DSML}</｜DSML｜function_calls>", "Ok.", BOTH),
        (f"<｜DSML｜tool_calls>\n{DSML}</｜DSML｜tool_calls>", "", BOTH),
        ('<｜DSML｜function_calls><｜DSML｜invoke name="f">'
         '<｜DSML｜parameter name="a" string="true">3</｜DSML｜parameter>'
         "</｜DSML｜invoke></｜DSML｜function_calls>", "", [("f", '{"a": "3"}')]),
    ],
    "kimi-k2": [
        (f"<|tool_calls_section_begin|>{KIMI}{ULM}<|tool_call_end|><|tool_call_begin|>functions.clock:1"
         "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>", "", BOTH),
    ],
    "kimi-k3": [
        ('<|open|>response<|sep|>Ok.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="weather" index="1"'
         '<|sep|><|open|>argument key="city" type="string"<|sep|>Ulm<|close|>argument<|sep|>'
         '<|open|>argument key="days" '
         'type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="clock" index="2"<|sep|>'
         "<|close|>call<|sep|><|close|>tools<|sep|>", "Ok.", BOTH),
    ],
    "minimax-m2": [
        (f'<minimax:tool_call>\n{INVOKE}</invoke>\n<invoke name="clock">\n</invoke>\n</minimax:tool_call>', "", BOTH),
    ],
    "gemma-4": [
        ('Sure.<|tool_call>call:weather{city:<|"|>Ulm<|"|>,days:3}<tool_call|><|tool_call>call:clock{}<tool_call|>',
         "Sure.", BOTH),
        ('<|tool_call>call:f{a:[1,<|"|>}]<|"|>,{b:null}],on : true , n:-1.5e3,}<tool_call|> Done. ', " Done. ",
         [("f", '{"a": [1, "}]", {"b": null}], "on": true, "n": -1500.0}')]),
    ],
    "functiongemma": [
        ("<start_function_call>call:weather{city:<escape>Ulm<escape>,days:3}<end_function_call>"
         "<start_function_call>call:clock{}<end_function_call><start_function_response>", "", BOTH),
    ],
    "gemma-3": [
        (f"Here:\n```json\n{P}\n```", "Here:", ONE),
        ('```tool_code\nprint(weather(city="Ulm", days=3))\n```', "", ONE),
        ('```python\n[weather(city="Ulm", days=3), clock()]\n```\n', "", BOTH),
    ],
    "granite-3": [(f"<|tool_call|>[{W}, {C}]", "", BOTH)],
    "phi-4": [
        (f"<|tool_call|>[{W}, {C}]<|/tool_call|>", "", BOTH),
        (f"functools[{W}, {C}]", "", BOTH),
    ],
    "command": [
        ('<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", '
         '"parameters": {"city": "Ulm", "days": 3}},'
         '\n    {"tool_call_id": "1", "tool_name": "clock", "parameters": {}}\n]<|END_ACTION|>', "", BOTH),
        ("<|START_RESPONSE|>Sunny.<|END_RESPONSE|>", "Sunny.", []),
    ],
    "nemotron": [(f"<TOOLCALL>[{W}, {C}]</TOOLCALL>", "", BOTH)],
    "jamba": [
        (f"<tool_calls>[{W}, {C}]</tool_calls>", "", BOTH),
        (f"<tool_calls>\n{W}\n{C}\n</tool_calls>", "", BOTH),
    ],
    "hunyuan": [
        (f"<answer><tool_calls>\n<tool_call>weather\n```json\n{ULM}\n```\n</tool_call>\n<tool_call>clock\n```json\n{{}}\n"
         "```\n</tool_call>\n</tool_calls></answer>", "", BOTH),
        (f"<tool_calls>[{W}]</tool_calls>", "", ONE),
    ],
    "hunyuan-3": [
        (f"<tool_calls{HY}\n<tool_call{HY}weather<tool_sep{HY}\n<arg_key{HY}city</arg_key{HY}\n<arg_value{HY}Ulm</arg_value"
         f"{HY}\n<arg_key{HY}days</arg_key{HY}\n<arg_value{HY}3</arg_value{HY}\n</tool_call{HY}\n<tool_call{HY}clock"
         f"<tool_sep{HY}\n</tool_call{HY}\n</tool_calls{HY}", "", BOTH),
    ],
    "apertus": [
        ('Ok.<|tools_prefix|>[{"weather": {"city": "Ulm", "days": 3}}, {"clock": {}}]<|tools_suffix|>', "Ok.", BOTH),
    ],
    "internlm": [
        (f"Ok.<|action_start|><|plugin|>\n{W}<|action_end|>\n<|action_start|> <|plugin|>{C}<|action_end|>",
         "Ok.", BOTH),
    ],
    "minicpm": [
        ('<function name="weather"><param name="city">Ulm</param><param name="days">3</param></function>\n'
         '<function name="clock"></function>', "", BOTH),
    ],
    "gigachat": [
        (f"Ok.<|message_sep|>\n\nfunction call<|role_sep|>\n{W}<|message_sep|>\n\n", "Ok.", ONE),
        (f"<|function_call|>{W}<|message_sep|>", "", ONE),
    ],
    "solar": [
        (f"<|tool_calls|><|tool_call:begin|>x1<|tool_call:name|>weather<|tool_call:args|>{ULM}<|tool_call:end|>"
         "<|tool_call:begin|>x2<|tool_call:name|>clock<|tool_call:args|>{}<|tool_call:end|>", "", BOTH),
    ],
    "generic": [
        (W, "", ONE), (f"[{W},{C}]", "", BOTH), (f"```json\n{W}\n```\n", "", ONE), (f"{W}\n{C}", "", BOTH),
    ],
}  # fmt: skip

SLIPS: dict[str, list[Case]] = {
    "hermes": [
        (f"<tool_call>{W}", "", ONE),
        (f"<tool_call>{W}\n</tool_c", "", ONE),
        (f"<tool_call>{W}<tool_call>{C}", "", BOTH),
        (f"<tool_call>{W}{C}</tool_call>", "", BOTH),
        (f"{W}\n</tool_call>", "", ONE),
        (f"<tool_call>{W}}}</tool_call>", "", ONE),
        (f"<tool_call>{W}}}\n</tool_call>\n<tool_call>{C}}}}}</tool_call>}}", "", BOTH),
        (f"<tool_call>{W[:-1]}</tool_call> more", " more", ONE),
        (f"<tool_call>{W[:-2]}</tool_call>", "", ONE),
        (f"<tool_call>{W[:-1]}", "", ONE),
        (f"<tool_call>[{W[:-1]}, {C}]</tool_call>", "", BOTH),
        (f"<tool_call>[{W}, {C}</tool_call>", "", BOTH),
        (f"<tool_call>\n```json\n{W}\n```\n</tool_call>", "", ONE),
        (f"Sure:\n```json\n{W}\n```", "Sure:", ONE),
        ("<tool_call>{'name': 'weather', 'arguments': {'city': \"Ulm\", 'days': 3,}}</tool_call>", "", ONE),
        ('<tool_call>{"name": "f", "arguments": {"on": True, "x": None}}</tool_call>', "",
         [("f", '{"on": true, "x": null}')]),
        (f"<tool_call>{P}</tool_call>", "", ONE),
        ('<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Ulm\\"}"}</tool_call>', "", CITY),
        ('<tool_call>{"name": "clock", "arguments": ""}</tool_call>', "", BOTH[1:]),
        ('<tool_call>{"name": "functions.clock", "arguments": {}}</tool_call>', "", BOTH[1:]),
        (f'<tool_call>[{W}, {{"name": "f", "arguments": {{"a": "</tool_call>"}}}}]</tool_call>', "",
         [*ONE, ("f", '{"a": "</tool_call>"}')]),
        (f"<tool_call>{W} so </tool_call> Done.", " so  Done.", ONE),
        (f"Sure, {W}", "Sure,", ONE),
        (f"I call it: {W} and wait.", "I call it: and wait.", ONE),
        (f"<tool_call>{W}</tool_call></tool_call> Done.", " Done.", ONE),
    ],
    "qwen3-coder": [
        (f"{QWEN}\n</tool_call>", "", ONE),
        (f"Sure.\n{QWEN}\n{QWEN_CLOCK}", "Sure.", BOTH),
        (f"<tool_call>\n{QWEN}", "", ONE),
        (f"<tool_call>\n{QWEN.removesuffix('</function>')}</tool_call>", "", ONE),
        (f"<tool_call>\n{QWEN.removesuffix('</function>')}", "", ONE),
        ("<tool_call><function=weather>\n<parameter=city>\nUlm\n<parameter=days>\n3\n</function></tool_call>", "", ONE),
        ("<tool_call><function=weather><parameter=city>\nUlm\n</tool_call>", "", CITY),
        (f"<tool_call><function=weather>{ULM}</function></tool_call>", "", ONE),
        (f"<tool_call>{W}</tool_call>", "", ONE),
    ],
    "glm-4.5": [
        (f"<tool_call>weather\n{GLM}", "", ONE),
        (f"weather\n{GLM}</tool_call>", "", ONE),
        (f"<tool_call>weather\n{GLM}<tool_call>clock</tool_call>", "", BOTH),
        ("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ulm</tool_call>", "", CITY),
        (f"<tool_call>{W}</tool_call>", "", ONE),
    ],
    "glm-4": [(f"Calling.\nweather\n{ULM}", "Calling.", ONE), (f"weather\n```json\n{ULM}\n```", "", ONE), (W, "", ONE)],
    "llama": [
        (f"{P[:-1]}", "", ONE), (f"{P}}}", "", ONE), (f"Sure.\n\n{P}\n\nDone.", "Sure.\n\nDone.", ONE),
        (f"```json\n{P}\n```", "", ONE), (f"[{P}, {C}]", "", BOTH), ('[weather(city="Ulm", days=3)', "", ONE),
        ('[weather("Ulm", 3)]', "", ONE),
    ],
    "lfm": [
        ('<|tool_call_start|>[weather(city="Ulm", days=3), clock()', "", BOTH),
        ('[weather(city="Ulm", days=3)]<|tool_call_end|>', "", ONE),
        ('Ok. [weather(city="Ulm", days=3)] Done.', "Ok. Done.", ONE),
        ('<|tool_call_start|>weather(city="Ulm", days=3)\nclock()<|tool_call_end|>', "", BOTH),
        ("<|tool_call_start|>[f(code=\"\"\"if x:\n  y('z')\"\"\")]<|tool_call_end|>", "",
         [("f", '{"code": "if x:\\n  y(\'z\')"}')]),
    ],
    "olmo": [
        ("<function_calls>weather(city='Ulm', days=3)</function_c", "", ONE),
        ("<function_calls>[weather(city='Ulm', days=3,), clock()]", "", BOTH),
    ],
    "mistral": [
        (f"[TOOL_CALLS] [{W}, ", "", ONE), (f"[TOOL_CALLS]{W}", "", ONE), (f"weather[ARGS]{ULM}", "", ONE),
        (f"[TOOL_CALLS]weather{ULM}", "", ONE), (f"[TOOL_CALLS]weather[ARGS]{ULM}}}", "", ONE),
        ('[TOOL_CALLS]weather[ARGS]"{\\"city\\": \\"Ulm\\"}"', "", CITY),
        (f"[TOOL_CALLS]weather[ARGS]{ULM[:-1]}[TOOL_CALLS]clock[ARGS]{{}}", "", BOTH),
    ],
    "deepseek": [
        (f"{D}function{DS}weather\n```json\n{ULM}\n```{DE} b", " b", ONE),
        (f"{DD}{D}function{DS}weather\n{ULM}{DDE} b", " b", ONE),
        (f"{DD}{D}function{DS}weather\n```json\n{ULM}\n``", "", ONE),
        (f"function{DS}weather\n```json\n{ULM}\n```{DE}", "", ONE),
        (f"weather{DS}{ULM}{DE}{DDE}", "", ONE),
        (f"{DD}{D}function{DS}{{}}{DE}{DDE}", f"{DD}{D}function{DS}{{}}{DE}{DDE}", []),
    ],
    "deepseek-v3.2": [(DSML, "", BOTH), (f"<｜DSML｜function_calls>{DSML.partition('</｜DSML｜invoke>')[0]}", "", ONE)],
    "kimi-k2": [
        (f"{KIMI}{ULM}<|tool_call_end|>", "", ONE), (f"<|tool_calls_section_begin|>{KIMI}{ULM}", "", ONE),
        (f"{KIMI[19:]}{ULM}<|tool_call_end|>", "", ONE), (f"{KIMI}{ULM}}}<|tool_call_end|>", "", ONE),
        (f"{KIMI}{ULM[:-1]}<|tool_call_end|>", "", ONE),
    ],
    "minimax-m2": [(f"{INVOKE}</invoke>", "", ONE), (f"<minimax:tool_call>{INVOKE}</minimax:tool_call>", "", ONE)],
    "gemma-4": [
        ('<|tool_call>call:weather{city:<|"|>Ulm<|"|>,days:3}', "", ONE),
        ('call:weather{city:<|"|>Ulm<|"|>,days:3}<tool_c', "", ONE),
        ('<|tool_call>call:weather{city:Ulm,days:3}}<tool_call|>', "", ONE),
        ('<|tool_call>call:weather{"city": "Ulm", "days": 3}<tool_call|>', "", ONE),
        ('<|tool_call>call:weather{city:<|"|>Ulm<|"|>,days:3<tool_call|>', "", ONE),
        (f"<|tool_call>{W}<tool_call|>", "", ONE),
    ],
    "command": [(f"<|START_ACTION|>{W}<|END_ACTION|>", "", ONE), (f"<|START_ACTION|>[{W}", "", ONE)],
    "apertus": [
        ('<|tools_prefix|>[{"clock": {}}', "", BOTH[1:]),
        ('<|tools_prefix|>[{"clock": {}}}]<|tools_suffix|>', "", BOTH[1:]),
    ],
    "internlm": [(f"<|plugin|>{W}", "", ONE), (f"<|action_start|><|plugin|>{P}}}<|action_end|>", "", ONE)],
    "generic": [
        (f"Sure.\n{W}\nDone.", "Sure.\nDone.", ONE), (f"[{W}", "", ONE), (f"```\n{W}\n```", "", ONE),
        (f"```json\n{W}", "", ONE), (f"{W};", "", ONE),
    ],
}  # fmt: skip

CONTENT: dict[str, list[str]] = {
    "hermes": [
        "Hello <b>world</b>.\n", "a <tool_call> nope </tool_call> b", '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "argum', "yes <tool_ca", "<tool_call>[]</tool_call>", "  \n\t ", "",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "a"}</tool_call>',
        "<tool_call><tool_call><tool_call>", '<tool_call>{"x": ' + "[" * 10**4 + "]" * 10**4 + "}",
        f"<tool_call>{W[:-2]}", '<tool_call>{"name": "weather", "arguments": {"city": "Ul',
        '<tool_call>{"name": "f", "arguments": {"a": 1 "b": 2}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
        '{"name": "Bob", "data": {"name": "clock", "arguments": {}}}',
        '{"answer": [{"name": "clock", "arguments": {}}]}',
        '<tool_call>{"name": "nope", "arguments": {"name": "clock", "arguments": {}}}</tool_call>',
    ],
    "qwen3-coder": [
        "<tool_call><function=></function></tool_call>", "<tool_call>\n<function=weather", "<function=nope></function>",
        "<tool_call><function=weather><parameter=city>Ul", "Write <function=weather> and so on.",
    ],
    "glm-4.5": ["<tool_call>I call weather</tool_call>", "<tool_call>weather\n", "weather is fine"],
    "glm-4": ["\nHello there {}", "weather\n", "weather\n[1]", "the weather {}"],
    "llama": ['{"answer": 42}', '{"name": "Bob"}', "<|python_tag|>print(1)", "<|pyth", "[1] is a list", "[weather is"],
    "lfm": ["[weather(city=", "<|tool_call_start|>[nope()]<|tool_call_end|>", "[weather(x=y)]"],
    "mistral": ["[TOOL_CALLS] nope()", "[TOOL_CALLS]{}", "weather[0]", "[TOOL_CALLS]weather[ARGS]{\"city\": \"U"],
    "deepseek": [f"{D}weather\n[1]{DE}", f"a {DD} b"],
    "gemma-4": [
        "<|tool_call>call:{}<tool_call|>", "a <|tool_call>call:f(1)<tool_call|> b", "<|tool_call>call:f", "call: me",
    ],
    "gemma-3": ["```python\nprint('weather')\n```", "```json\n{\"a\": 1}\n```"],
    "generic": [
        "[1, 2]", "```python\nprint(1)\n```", "[", '{"name": 3, "arguments": {}}', '{"name": "", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}', "{]", '{"name": "Bob", "arguments": {}}',
        '{"name": "f", "city": "Ulm"}',
    ],
}  # fmt: skip


def cases(table: dict[str, list[Case]]) -> list[tuple[str, str, str, list[tuple[str, str]]]]:
    return [(name, *case) for name, found in table.items() for case in found]


def test_every_row_has_documented_outputs() -> None:
    assert set(DOCUMENTED) == {name for name, row in FORMATS.items() if not row.is_harmony}


@pytest.mark.parametrize(("name", "text", "content", "calls"), cases(DOCUMENTED))
def test_documented_outputs_are_calls(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in cuts(text):
        found = parse(FORMATS[name], pieces, tools=TOOLS)
        assert (found.content, found.calls) == (content, calls)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize(("name", "text", "content", "calls"), cases(SLIPS))
def test_slips_are_calls_without_leftovers(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in cuts(text):
        found = parse(FORMATS[name], pieces, tools=TOOLS)
        assert (found.content, found.calls) == (content, calls)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in CONTENT.items() for text in texts])
def test_text_without_calls_is_content_to_the_character(name: str, text: str) -> None:
    for pieces in cuts(text) if len(text) < 1000 else ([text],):
        found = parse(FORMATS[name], pieces, tools=TOOLS)
        assert (found.content, found.calls) == (text, [])


@pytest.mark.parametrize("name", [name for name, row in FORMATS.items() if not row.is_harmony])
def test_objects_of_the_generic_format_are_read_in_every_format(name: str) -> None:
    for text in (W, f"[{W}]", f"```json\n{W}\n```"):
        assert parse(FORMATS[name], [text], tools=TOOLS) == parse(GENERIC, [text], tools=TOOLS)
