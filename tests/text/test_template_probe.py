"""Properties of templates, found by rendering."""

from dataclasses import replace
from typing import Any

import pytest

from quire.errors import ChatTemplateError
from quire.text.chat_template import ChatTemplate
from quire.text.template_probe import TemplateTraits, probe
from quire.text.tool_calls.formats import choose_format
from tests.text import families
from tests.text.families import FAMILIES, VARIABLES

PROPERTIES: dict[str, dict[str, Any]] = {
    "chatml": {"tools": None, "calls": None, "result_role": "tool", "reasoning": None, "developer": False},
    "hermes": {"tools": "tools", "calls": "tool_calls", "reasoning": "reasoning_content"},
    "qwen-coder": {"parts_roles": frozenset({"system", "user", "assistant", "tool"}), "opens_reasoning": "<think>"},
    "alternating": {"system": False, "several_users": False, "assistant_first": False, "result_role": None},
    "mistral": {"short_ids": True, "text_beside_calls": False, "user_after_result": False},
    "deepseek": {"tools": None, "arguments_as_text": True, "empty_content": None, "text_beside_calls": False},
    "llama": {"several_calls": False, "result_role": "tool"},
    "harmony": {"reasoning": "thinking", "several_calls": False},
    "glm-4": {"calls": "metadata", "result_role": "observation"},
    "lfm": {"tools": "tools", "calls": None},
    "smollm3": {"tools": "xml_tools", "tools_as": "texts"},
    "users and answers": {"system": False, "result_role": None},
    "parts of users": {"parts_roles": frozenset({"user"})},
}


@pytest.mark.parametrize("family", PROPERTIES)
def test_properties_of_families(family: str) -> None:
    found = probe(FAMILIES[family], VARIABLES)
    assert {name: getattr(found, name) for name in PROPERTIES[family]} == PROPERTIES[family]


def test_words_between_reasoning_and_answer_are_the_templates_own() -> None:
    assert probe(families.HERMES, VARIABLES).closes_reasoning == "\n</think>\n\n"


def test_comment_with_a_marker_shows_nothing() -> None:
    assert probe("{# <tools> tools tool_calls #}" + families.LOOP, {}) == probe(families.LOOP, {})


@pytest.mark.parametrize("family", FAMILIES)
def test_number_of_renderings_is_bounded(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_renderings, render = 0, ChatTemplate.render

    def counted(self: ChatTemplate, *arguments: Any, **options: Any) -> str:
        nonlocal num_renderings
        num_renderings += 1
        return render(self, *arguments, **options)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    probe(FAMILIES[family] + "{# anew #}", VARIABLES)
    assert num_renderings <= 75


def test_template_that_reaches_a_limit_is_taken_to_read_everything() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    assert probe(endless, {}) == TemplateTraits()


def test_template_that_does_not_parse_is_an_error() -> None:
    with pytest.raises(ChatTemplateError, match="error in line 1"):
        probe("{% for %}", {})


def test_template_that_always_raises_reads_nothing() -> None:
    found = probe("{{ raise_exception('no') }}", {})
    assert (found.system, found.tools, found.calls, found.result_role) == (False, None, None, None)


def test_described_properties_are_json() -> None:
    traits = replace(TemplateTraits(), parts_roles=frozenset({"user", "system"}))
    assert traits.described()["parts_roles"] == ["system", "user"]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("hermes", "hermes"), ("qwen-coder", "qwen3-coder"), ("mistral", "mistral"), ("deepseek", "deepseek"),
        ("llama", "llama"), ("harmony", "harmony"), ("glm-4", "glm-4"), ("glm-4.5", "glm-4.5"), ("lfm", "lfm"),
        ("gemma-4", "gemma-4"), ("chatml", "generic"),
    ],
)  # fmt: skip
def test_format_of_calls_is_that_of_the_written_call(family: str, name: str) -> None:
    traits = probe(FAMILIES[family], VARIABLES)
    form = choose_format(FAMILIES[family], written=traits.written_call, name="qtool0", arguments={"qkey0": "qvalue0"})
    assert form.name == name
