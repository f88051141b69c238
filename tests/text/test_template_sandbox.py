"""Sandbox and limits of chat templates. Without limits, each template of WORK and LARGE takes hours or gigabytes."""

from typing import Any

import jinja2
import pytest
from jinja2.sandbox import SecurityError

from quire.text import template_sandbox
from quire.text.template_sandbox import (
    MAX_CHARACTERS,
    TemplateEnvironment,
    TemplateLimitError,
    render,
)
from tests.text.template_cases import ESCAPES, LARGE, NOT_NEEDED, WORK

ENVIRONMENT = TemplateEnvironment()


def run(source: str, **values: Any) -> str:
    return render(ENVIRONMENT.compile_template(source), values)


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
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.02)
    with pytest.raises((TemplateLimitError, RecursionError)):
        run(source, x=[1])


@pytest.mark.parametrize("source", LARGE)
def test_too_large_value_or_text_is_refused(source: str) -> None:
    with pytest.raises(TemplateLimitError):
        run(source)


def test_waiting_for_a_processor_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox.time, "thread_time", lambda: 7.0)
    monkeypatch.setattr(template_sandbox.time, "monotonic", iter(range(0, 10**9, 10**6)).__next__)
    assert run("{% for i in range(99) %}{% endfor %}done") == "done"


def test_ordinary_operators_and_loops_are_not_hindered() -> None:
    cases = {
        "{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ [1] + [2] }}{{ 1 + 2.5 }}": "ababab10243[1, 2]3.5",
        "{{ '%s has %05.2f' % ('x', 1.5) }}{{ 'a' + 'b' }}": "x has 01.50ab",
        "{{ 1 ~ 'a' ~ none }}{{ missing }}{{ true }}": "1aNoneTrue",
        "{% for i in range(15000) %}{% endfor %}ok": "ok",
    }
    for source, expected in cases.items():
        assert run(source) == expected
    assert len(run("{{ 'x' * n }}", n=MAX_CHARACTERS)) == MAX_CHARACTERS
