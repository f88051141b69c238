"""Each attempt would take gigabytes or hours if it ran."""

import itertools
import threading

import pytest

from quire.text import template_bounds
from quire.text.template_bounds import MAX_OUTPUT_CHARACTERS, TemplateLimitError, template_budget
from quire.text.template_sandbox import BoundedEnvironment
from tests.text.template_cases import LARGE, WORK

ENVIRONMENT = BoundedEnvironment()


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is bounded is the same with a smaller number, and sooner seen."""
    monkeypatch.setattr(template_bounds, "MAX_STEPS", 20_000)


def run(source: str, **values: object) -> str:
    with template_budget():
        return ENVIRONMENT.compile_template(source).render(values)


@pytest.mark.parametrize("source", WORK)
def test_work_is_bounded(source: str) -> None:
    with pytest.raises((TemplateLimitError, RecursionError)):
        run(source, x=[1])


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bounds, "MAX_SECONDS", -1.0)
    with pytest.raises(TemplateLimitError, match="more than -1 s"):
        run("{% for i in range(30) %}{% endfor %}")


def test_waiting_for_a_processor_takes_nothing_from_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bounds.time, "thread_time", lambda: 7.0)
    monkeypatch.setattr(template_bounds.time, "monotonic", iter(range(0, 10**9, 10**6)).__next__)
    assert run("{% for i in range(99) %}{% endfor %}done") == "done"


ENDLESS = "{% for a in range(999) %}{% for b in range(999) %}{% endfor %}{% endfor %}"


def test_a_costly_template_stands_aside_and_a_short_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(template_bounds.time, "sleep", pauses.append)
    used_s = iter(range(10**9))
    monkeypatch.setattr(template_bounds.time, "thread_time", lambda: next(used_s) * 0.002)
    run("{% for i in range(99) %}{% endfor %}")
    assert not pauses
    with pytest.raises(TemplateLimitError, match=r"more than 0.25 s"):
        run(ENDLESS)
    assert len(pauses) > 50


def test_one_costly_template_is_rendered_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    monkeypatch.setattr(template_bounds.time, "sleep", lambda _: turns.append(threading.get_ident()))
    monkeypatch.setattr(template_bounds, "SHORT_SECONDS", 0.0)
    barrier = threading.Barrier(3)

    def render() -> None:
        barrier.wait()
        with pytest.raises(TemplateLimitError):
            run(ENDLESS)

    threads = [threading.Thread(target=render) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([turn for turn, _ in itertools.groupby(turns)]) == len(set(turns)) == 3


@pytest.mark.parametrize("source", LARGE)
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
