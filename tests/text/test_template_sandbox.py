"""Sandbox and limits of chat templates. Without limits, each template of WORK and LARGE takes hours or gigabytes."""

from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from quire.text import template_budget
from quire.text.template_budget import MAX_BYTES, MAX_CHARACTERS, TemplateLimitError
from quire.text.template_functions import FILTERS, METHODS, TESTS
from quire.text.template_sandbox import TemplateEnvironment
from tests.processes import outcomes_of
from tests.text.template_cases import ESCAPES, HOSTILE, LARGE, NOT_NEEDED, ORDINARY, WORK

ENVIRONMENT = TemplateEnvironment()
PLAIN = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])


def run(source: str, **values: Any) -> str:
    return ENVIRONMENT.compile_template(source).render(values)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[str, float]]:
    """Return the outcome of each hostile template, and the growth of the process in MiB."""
    return outcomes_of("tests.text.template_attacks:main", HOSTILE)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_is_refused(name: str, outcomes: dict[str, tuple[str, float]]) -> None:
    assert outcomes[name] != "ended"
    outcome, grown_mib = outcomes[name]
    assert outcome.startswith("refused: ")
    assert grown_mib < 1.5 * MAX_BYTES / 2**20


def test_filters_methods_and_operators_do_what_jinja2_does() -> None:
    for source in ORDINARY:
        assert run(source, x=7) == PLAIN.from_string(source).render(x=7), source


def test_each_filter_and_method_is_tried() -> None:
    text = " ".join(ORDINARY)
    filters = {name for name in FILTERS if f"| {name}" not in text and f"'{name}'" not in text}
    assert filters <= {"e", "escape", "forceescape", "safe", "tojson", "random"}
    methods = {name for methods in METHODS.values() for name in methods if f".{name}(" not in text}
    assert all(name.startswith("is") for name in methods)
    assert jinja2.tests.TESTS.keys() - TESTS.keys() == {"escaped"}


def test_html_is_no_concern_of_templates() -> None:
    source = "{{ '<b>' | safe }}{{ ('<b>' | safe) + '<' }}{{ '<&>\"' | e }}{{ ['<é>'] | tojson }}"
    assert run(source) == '<b><b><&lt;&amp;&gt;&#34;["<é>"]'


@pytest.mark.parametrize("source", ESCAPES)
def test_template_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises((SecurityError, jinja2.UndefinedError)):
        run(source, messages=[1])


@pytest.mark.parametrize("source", NOT_NEEDED)
def test_template_cannot_load_other_templates(source: str) -> None:
    with pytest.raises((jinja2.TemplateError, TypeError)):
        run(source)


@pytest.mark.parametrize("source", WORK)
def test_endless_template_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "MAX_SECONDS", 0.02)
    with pytest.raises((TemplateLimitError, RecursionError)):
        run(source, x=[1])


@pytest.mark.parametrize("source", LARGE)
def test_too_large_value_or_text_is_refused(source: str) -> None:
    with pytest.raises(TemplateLimitError):
        run(source)


def test_waiting_for_a_processor_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget.time, "thread_time", lambda: 7.0)
    monkeypatch.setattr(template_budget.time, "monotonic", iter(range(0, 10**9, 10**6)).__next__)
    assert run("{% for i in range(99) %}{% endfor %}done") == "done"


def test_ordinary_sizes_are_not_hindered() -> None:
    assert run("{% for i in range(15000) %}{% endfor %}ok") == "ok"
    assert len(run("{{ 'x' * n }}", n=MAX_CHARACTERS)) == MAX_CHARACTERS
    large = [{"role": "user", "content": "é" * 1_000_000}, {"role": "user", "content": "b"}] * 2
    source = "{% for m in [{}] + messages %}{{ '<' + (m.content | trim) + '>' if m.content }}{% endfor %}"
    assert len(run(source, messages=large)) == sum(len(message["content"]) + 2 for message in large)


def test_accumulated_list_of_messages_is_not_hindered() -> None:
    loop = "{% for m in messages %}{% set ns.m = ns.m + [m] %}{% endfor %}"
    source = "{% set ns = namespace(m=[]) %}" + loop + "{{ ns.m | length }}"
    assert run(source, messages=[{"content": "x" * 1000}] * 1000) == "1000"
