"""Each attempt would take gigabytes or hours if it ran."""

import pytest

from quire.text import template_bounds
from quire.text.template_bounds import MAX_OUTPUT_CHARACTERS, TemplateLimitError, template_budget
from quire.text.template_sandbox import BoundedEnvironment

ENVIRONMENT = BoundedEnvironment()
DOUBLING = "{% for i in range(40) %}{% set ns.s = BODY %}{% endfor %}"


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is bounded is the same with a smaller number, and sooner seen."""
    monkeypatch.setattr(template_bounds, "MAX_STEPS", 20_000)


def run(source: str, **values: object) -> str:
    with template_budget():
        return ENVIRONMENT.compile_template(source).render(values)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in x recursive %}{{ loop(x) }}{{ loop(x) }}{% endfor %}",
        "{% for i in range(99999) %}{% for j in 'aaaaaaaaa' %}{% if j %}{% endif %}{% endfor %}{% endfor %}",
    ],
)
def test_work_is_bounded(source: str) -> None:
    with pytest.raises((TemplateLimitError, RecursionError)):
        run(source, x=[1])


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bounds, "MAX_SECONDS", -1.0)
    with pytest.raises(TemplateLimitError, match="more than -1 s"):
        run("{% for i in range(3) %}{% endfor %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 1000000000000 }}",
        "{{ 1000000000000 * 'x' }}",
        "{{ [0] * 1000000000000 }}",
        "{{ (0, 1) * 1000000000000 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% set ns = namespace(s=3) %}" + DOUBLING.replace("BODY", "ns.s * ns.s"),
        "{% set ns = namespace(s='x') %}" + DOUBLING.replace("BODY", "ns.s ~ ns.s"),
        "{% set ns = namespace(s='x') %}" + DOUBLING.replace("BODY", "ns.s + ns.s"),
        "{% set ns = namespace(s=[1]) %}" + DOUBLING.replace("BODY", "ns.s + ns.s"),
        "{% set ns = namespace(s='x') %}" + DOUBLING.replace("BODY", "[ns.s, ns.s] | join"),
        "{% set ns = namespace(s='x') %}" + DOUBLING.replace("BODY", "ns.s.join([ns.s, ns.s, ns.s])"),
        "{% set ns = namespace(s='xx') %}" + DOUBLING.replace("BODY", "ns.s.replace('x', ns.s)"),
        "{% set ns = namespace(s='xx') %}" + DOUBLING.replace("BODY", "ns.s | replace('x', ns.s)"),
        "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}"
        "{% set ns.s = t %}{% endfor %}",
        "{% macro twice() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        + "{% call twice() %}" * 40
        + "x"
        + "{% endcall %}" * 40,
        "{% macro f() %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endmacro %}{{ f() }}",
        "{% set t %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endset %}{{ t | length }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 'x'.center(1000000000) }}",
        "{{ 'x'.zfill(1000000000) }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ 'x' | indent(1000000000, true) }}",
        "{{ ('\\n' * 1000000) | indent(9999) }}",
        "{{ ('x' * 1000000) | indent('y' * 1000000) }}",
        "{{ [[1]] | tojson(indent=1000000000) }}",
        "{{ ('x' * 1000000).replace('', 'y' * 1000000) }}",
    ],
)
def test_values_are_bounded(source: str) -> None:
    with pytest.raises(TemplateLimitError):
        run(source)


def test_printing_is_bounded() -> None:
    source = "{% set t = 'x' * 1000000 %}{% for i in range(99) %}{% set u %}{{ t }}{% endset %}{% endfor %}"
    with pytest.raises(TemplateLimitError, match="prints more than"):
        run(source)


def test_ordinary_use_is_not_hindered() -> None:
    cases = {
        "{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ [1] + [2] }}": "abababababab"[:6] + "10243[1, 2]",
        "{{ '%s has 100000 of %05.2f' % ('x', 1.5) }}": "x has 100000 of 01.50",
        "{{ '{} {:>4}'.format('a', 'b') }}{{ '{x}'.format_map({'x': 1}) }}": "a    b1",
        "{{ 'a-b'.replace('-', '+') }}{{ 'a-b' | replace('-', '+') }}": "a+ba+b",
        "{{ ', '.join(['a', 'b']) }}{{ [1, 2] | join('/') }}": "a, b1/2",
        "{{ [{'n': 1}, {'n': 2}] | join(',', attribute='n') }}": "1,2",
        "{{ 'a\nb' | indent(2) }}{{ 'x'.ljust(3) }}{{ 'y' | center(3) }}|": "a\n  bx   y |",
        "{{ 1 ~ 'a' ~ none }}": "1aNone",
        "{{ missing }}{{ true }}{{ none }}{{ 1.5 }}": "TrueNone1.5",
        "{% for i in range(15000) %}{% endfor %}ok": "ok",
    }
    for source, expected in cases.items():
        assert run(source) == expected


def test_each_rendering_has_its_own_budget() -> None:
    template = ENVIRONMENT.compile_template("{% for i in range(15000) %}{% endfor %}{{ 'x' * n }}")
    for _ in range(3):
        with template_budget():
            assert len(template.render(n=MAX_OUTPUT_CHARACTERS)) == MAX_OUTPUT_CHARACTERS
