import jinja2
import pytest
from jinja2.sandbox import SecurityError

from quire.text.template_bounds import template_budget
from quire.text.template_sandbox import BoundedEnvironment, TemplateRefusalError
from tests.text.template_cases import ESCAPES, NOT_NEEDED


@pytest.fixture(scope="module")
def environment() -> BoundedEnvironment:
    return BoundedEnvironment()


def run(environment: BoundedEnvironment, source: str, **values: object) -> str:
    with template_budget():
        return environment.compile_template(source).render(values)


@pytest.mark.parametrize("source", ESCAPES)
def test_no_way_out(environment: BoundedEnvironment, source: str) -> None:
    with pytest.raises((SecurityError, jinja2.UndefinedError)):
        run(environment, source, messages=[1])


@pytest.mark.parametrize("source", NOT_NEEDED)
def test_nothing_that_templates_do_not_need(environment: BoundedEnvironment, source: str) -> None:
    with pytest.raises((jinja2.TemplateError, TypeError)):
        run(environment, source)


def test_whitespace_is_trimmed_around_blocks(environment: BoundedEnvironment) -> None:
    assert run(environment, "  {% if true %}\na\n  {% endif %}\nb\n") == "a\nb"


def test_json_as_hugging_face_writes_it(environment: BoundedEnvironment) -> None:
    value = {"b": "<é&'>", "a": [1, 2]}
    assert run(environment, "{{ v | tojson }}", v=value) == """{"b": "<é&'>", "a": [1, 2]}"""
    assert run(environment, "{{ v | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}", v=value) == (
        """{"a":[1,2],"b":"<\\u00e9&'>"}"""
    )
    assert run(environment, "{{ v | tojson(indent=1) }}", v=[1]) == "[\n 1\n]"


def test_generation_block_prints_its_content_and_keeps_its_variables(environment: BoundedEnvironment) -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}[{{ x }}]{% endgeneration %}{{ x }}"
    assert run(environment, source) == "[2]1"


def test_loop_controls(environment: BoundedEnvironment) -> None:
    source = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
    )
    assert run(environment, source + "{% endfor %}") == "02"


def test_refusal_is_its_own_error(environment: BoundedEnvironment) -> None:
    with pytest.raises(TemplateRefusalError, match="not for me"):
        run(environment, "{{ raise_exception('not for me') }}")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for x in c.content %}{% endfor %}", True),
        ("{% for x in c['content'] | reverse | list %}{% endfor %}", True),
        ("{% if a %}{% for x in content %}{% endfor %}{% endif %}", True),
        ("{% for x in c['parts'] %}{% endfor %}{% for x in c.content %}{% endfor %}", True),
        ("{% for x in c.content.split('a') %}{% endfor %}", False),
        ("{% for x in messages %}{{ x.content }}{% endfor %}", False),
    ],
)
def test_loops_over_content(environment: BoundedEnvironment, source: str, expected: bool) -> None:
    assert environment.loops_over_content(source) is expected
