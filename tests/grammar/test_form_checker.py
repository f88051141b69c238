"""Forms that are checked for another process."""

import gc

import pytest

from quire.errors import InvalidParameterError
from quire.grammar.check_process import CheckProcess, Refused
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.form_checker import FormChecker
from quire.structured_outputs import StructuredOutputsParams
from tests.grammar.builders import accepts, make_vocabulary


class Counting(CheckProcess):
    """Answers by itself, and counts."""

    def __init__(self, answer: str | Refused) -> None:
        super().__init__()
        self.num_questions = 0
        self._answer = answer

    def check(self, spec: StructuredOutputsParams) -> str | Refused:
        self.num_questions += 1
        return self._answer


def form(number: int) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=f"a{{{number}}}")


def test_a_form_is_checked_once() -> None:
    process = Counting("grammar")
    checker = FormChecker(process)
    assert checker.passed(form(1)) is None
    assert checker.check(form(1)) == checker.check(form(1)) == checker.passed(form(1)) == "grammar"
    assert process.num_questions == 1


def test_what_cannot_be_enforced_is_refused_each_time() -> None:
    process = Counting(Refused("too deep"))
    checker = FormChecker(process)
    for _ in range(2):
        with pytest.raises(InvalidParameterError, match="too deep"):
            checker.check(form(1))
    assert (process.num_questions, checker.passed(form(1)), checker.num_bytes) == (2, None, 0)


def test_it_remembers_a_bounded_number_and_forgets_the_oldest() -> None:
    checker = FormChecker(Counting("x" * 95), cache_bytes=1000)
    for number in range(1, 10):
        checker.check(form(number))  # 100 bytes each
    checker.check(form(1))
    for number in range(10, 14):
        checker.check(form(number))
    assert checker.num_bytes <= 1000
    assert checker.passed(form(1)) is not None
    assert checker.passed(form(2)) is None


def test_what_it_makes_of_a_form_can_be_followed_elsewhere_without_another_check() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    spec = StructuredOutputsParams(json=schema)
    checker = FormChecker()
    process = Counting(Refused("asked again"))
    compiler = GrammarCompiler(make_vocabulary, check_process=process)
    compiled = compiler.compile(spec, checker.check(spec))
    assert accepts(compiled.start(), '{"a": 1}')
    assert not accepts(compiled.start(), '{"b": 1}')
    assert process.num_questions == 0
    assert compiler.compile(spec) is compiled, "who holds it finds it, with or without the text"
    del compiled
    gc.collect()
    with pytest.raises(InvalidParameterError, match="asked again"):
        compiler.compile(form(3))


def test_warming_up_starts_the_process_and_hides_its_errors() -> None:
    process = CheckProcess()
    checker = FormChecker(process)
    checker.warm_up()
    assert process._process is not None
    child = process._process
    checker.check(form(1))
    assert process._process is child
    checker.close()
    assert child.poll() is not None
    FormChecker(Counting(Refused("nothing works"))).warm_up()
