"""What is kept, for how long, and what it is worth."""

import gc
import json
import threading
from typing import Any

import pytest

from quire.errors import InvalidParameterError
from quire.grammar.check_process import CheckProcess, Refused
from quire.grammar.compiler import CACHE_BYTES, GrammarCompiler, check_form
from quire.structured_outputs import StructuredOutputsParams
from tests.grammar.builders import accepts, make_vocabulary


class CountingProcess(CheckProcess):
    """Counts questions; answers without a process where it is told how."""

    def __init__(self, answer: str | Refused | None = None) -> None:
        super().__init__()
        self.num_questions = 0
        self._answer = answer

    def check(self, spec: StructuredOutputsParams) -> str | Refused:
        self.num_questions += 1
        return super().check(spec) if self._answer is None else self._answer


def unique(number: int) -> StructuredOutputsParams:
    properties = {f"field_{number}_{j}": {"type": "string", "maxLength": 9 + j} for j in range(1 + number % 7)}
    return StructuredOutputsParams(json={"type": "object", "properties": properties})


def test_a_grammar_is_checked_once() -> None:
    process = CountingProcess()
    compiler = GrammarCompiler(make_vocabulary, check_process=process)
    forms = [StructuredOutputsParams(json={"type": "object"}), StructuredOutputsParams(json='{"type": "object"}')]
    assert compiler.compile(forms[0]) is compiler.compile(forms[1])
    assert process.num_questions == 1
    compiler.compile(StructuredOutputsParams(json={"type": "object"}, disable_any_whitespace=True))
    assert process.num_questions == 2


def test_the_vocabulary_is_made_with_the_first_grammar() -> None:
    made = []

    def make() -> Any:
        made.append(1)
        return make_vocabulary()

    compiler = GrammarCompiler(make)
    assert made == []
    compiler.compile(unique(1))
    compiler.compile(unique(2))
    assert made == [1]


def test_warming_up_makes_the_vocabulary_before_the_first_grammar() -> None:
    made = []

    def make() -> Any:
        made.append(make_vocabulary())
        return made[-1]

    compiler = GrammarCompiler(make, check_process=CountingProcess(Refused("nobody may ask")))
    compiler.warm_up()
    assert "library_tokenizer" in made[0].__dict__
    compiler.warm_up()
    assert (len(made), compiler.num_bytes) == (1, 0)


def test_warming_up_where_no_grammar_can_be_followed_does_nothing() -> None:
    def refuse() -> Any:
        raise InvalidParameterError("structured_outputs", "a form", "left out: no tokenizer")

    compiler = GrammarCompiler(refuse)
    compiler.warm_up()
    with pytest.raises(InvalidParameterError, match="no tokenizer"):
        compiler.compile(unique(1))


def test_2000_schemas_stay_within_the_bound() -> None:
    compiler = GrammarCompiler(make_vocabulary, check_process=CheckProcess(deadline_s=120))
    for number in range(2000):
        compiler.compile(unique(number))
        assert compiler.num_bytes <= CACHE_BYTES
    assert compiler.num_bytes > CACHE_BYTES // 2
    assert len(compiler._kept) < 500
    gc.collect()
    assert len(compiler._in_use) == len(compiler._kept), "what was dropped is gone"


def test_the_least_recently_used_is_dropped() -> None:
    process = CountingProcess()
    size = GrammarCompiler(make_vocabulary).compile(unique(21)).size_bytes
    compiler = GrammarCompiler(make_vocabulary, cache_bytes=3 * size, check_process=process)
    for number in (0, 7, 14, 0, 21):  # about the same size each
        compiler.compile(unique(number))
    assert process.num_questions == 4
    gc.collect()
    compiler.compile(unique(0))
    assert process.num_questions == 4
    compiler.compile(unique(7))
    assert process.num_questions == 5


def test_what_is_held_is_found_though_it_was_dropped() -> None:
    process = CountingProcess()
    compiler = GrammarCompiler(make_vocabulary, cache_bytes=1, check_process=process)
    held = compiler.compile(unique(0))
    assert compiler.num_bytes == 0
    assert compiler.compile(unique(0)) is held
    assert process.num_questions == 1
    del held
    gc.collect()
    compiler.compile(unique(0))
    assert process.num_questions == 2


def test_each_text_has_a_matcher_of_its_own() -> None:
    grammar = GrammarCompiler(make_vocabulary).compile(StructuredOutputsParams(regex="ab"))
    first, second = grammar.start(), grammar.start()
    first.append(ord("a"))
    assert accepts(second, "ab")


def test_a_refusal_names_the_field_the_value_and_the_reason() -> None:
    compiler = GrammarCompiler(make_vocabulary)
    with pytest.raises(InvalidParameterError, match="unclosed group") as caught:
        compiler.compile(StructuredOutputsParams(regex="(a"))
    assert caught.value.field == "structured_outputs.regex"
    assert caught.value.value == "(a"
    with pytest.raises(InvalidParameterError, match="deadline of 2 s") as caught:
        GrammarCompiler(
            make_vocabulary, check_process=CountingProcess(Refused("compiling takes longer than the deadline of 2 s"))
        ).compile(StructuredOutputsParams(json={}))
    assert caught.value.field == "structured_outputs.json"


def test_a_form_is_checked_without_a_vocabulary() -> None:
    assert "a+" in check_form(StructuredOutputsParams(regex="a+"))
    with pytest.raises(InvalidParameterError, match=r"structured_outputs.regex .*unclosed group"):
        check_form(StructuredOutputsParams(regex="(a"))
    with pytest.raises(InvalidParameterError, match="too deep"):
        check_form(StructuredOutputsParams(regex="a"), CountingProcess(Refused("too deep")))


def test_refusals_are_not_kept() -> None:
    process = CountingProcess(Refused("x"))
    compiler = GrammarCompiler(make_vocabulary, check_process=process)
    for _ in range(2):
        with pytest.raises(InvalidParameterError):
            compiler.compile(StructuredOutputsParams(regex="a"))
    assert process.num_questions == 2


def test_what_passes_the_check_and_fails_here_is_an_error_of_the_request() -> None:
    bad = json.dumps({"grammars": [{"lark_grammar": "start: nope"}]})
    compiler = GrammarCompiler(make_vocabulary, check_process=CountingProcess(bad))
    with pytest.raises(InvalidParameterError, match="nope"):
        compiler.compile(StructuredOutputsParams(regex="a"))


def test_threads_may_compile_at_once() -> None:
    compiler = GrammarCompiler(make_vocabulary)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for number in range(30):
                matcher = compiler.compile(unique((seed + number) % 20)).start()
                assert accepts(matcher, "{}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert compiler.num_bytes == sum(grammar.size_bytes for grammar in compiler._kept.values())
