"""Caches of grammars: what is checked again, and what is kept for how long."""

import gc
import json
import os
import sys
import threading
from typing import Any

import pytest

from quire.errors import InvalidParameterError
from quire.grammar.check_process import CheckProcess, RefusedGrammar
from quire.grammar.compiler import CompiledGrammar, GrammarChecker, GrammarCompiler
from quire.structured_outputs import ReasoningSpan, StructuredOutputsParams
from tests.grammar.builders import accepts, make_vocabulary


class CountingProcess(CheckProcess):
    """Counts questions; returns `answer` if it is given."""

    def __init__(self, answer: str | RefusedGrammar | None = None) -> None:
        super().__init__()
        self.num_questions = 0
        self._answer = answer

    def check(self, spec: StructuredOutputsParams) -> str | RefusedGrammar:
        self.num_questions += 1
        return super().check(spec) if self._answer is None else self._answer


def unique(number: int) -> StructuredOutputsParams:
    properties = {f"field_{number}_{j}": {"type": "string", "maxLength": 9 + j} for j in range(1 + number % 7)}
    return StructuredOutputsParams(json={"type": "object", "properties": properties})


def test_equal_grammars_are_checked_once() -> None:
    process = CountingProcess()
    compiler = GrammarCompiler(make_vocabulary, check_process=process)
    specs = [StructuredOutputsParams(json={"type": "object"}), StructuredOutputsParams(json='{"type": "object"}')]
    assert compiler.compile(specs[0]) is compiler.compile(specs[1])
    assert process.num_questions == 1
    compiler.compile(StructuredOutputsParams(json={"type": "object"}, disable_any_whitespace=True))
    assert process.num_questions == 2


def test_vocabulary_is_made_once_with_the_first_grammar_or_warm_up() -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(make_vocabulary())
        return made[-1]

    compiler = GrammarCompiler(make, check_process=CountingProcess(RefusedGrammar("not asked")))
    assert made == []
    compiler.warm_up()
    assert "library_tokenizer" in made[0].__dict__
    compiler.warm_up()
    assert (len(made), compiler._kept.num_bytes) == (1, 0)


def test_warm_up_does_nothing_for_a_model_without_structured_outputs() -> None:
    def refuse() -> Any:
        raise InvalidParameterError("structured_outputs", "a grammar", "left out: no tokenizer")

    compiler = GrammarCompiler(refuse)
    compiler.warm_up()
    with pytest.raises(InvalidParameterError, match="no tokenizer"):
        compiler.compile(unique(1))


def test_least_recently_used_grammar_is_dropped() -> None:
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


def test_grammar_in_use_is_found_after_it_was_dropped() -> None:
    process = CountingProcess()
    compiler = GrammarCompiler(make_vocabulary, cache_bytes=1, check_process=process)
    held = compiler.compile(unique(0))
    assert compiler._kept.num_bytes == 0
    assert compiler.compile(unique(0)) is held
    assert process.num_questions == 1
    del held
    gc.collect()
    compiler.compile(unique(0))
    assert process.num_questions == 2


def test_each_text_has_its_own_matcher() -> None:
    grammar = GrammarCompiler(make_vocabulary).compile(StructuredOutputsParams(regex="ab"))
    first, second = grammar.start(), grammar.start()
    first.append(ord("a"))
    assert accepts(second, "ab")


def test_refusal_names_field_value_and_reason_and_is_not_kept() -> None:
    with pytest.raises(InvalidParameterError, match="unclosed group") as caught:
        GrammarCompiler(make_vocabulary).compile(StructuredOutputsParams(regex="(a"))
    assert (caught.value.field, caught.value.value) == ("structured_outputs.regex", "(a")
    process = CountingProcess(RefusedGrammar("compiling takes longer than the deadline of 2 s"))
    compiler = GrammarCompiler(make_vocabulary, check_process=process)
    for _ in range(2):
        with pytest.raises(InvalidParameterError, match="deadline of 2 s") as caught:
            compiler.compile(StructuredOutputsParams(json={}))
    assert caught.value.field == "structured_outputs.json"
    assert process.num_questions == 2


def test_error_after_the_check_is_an_error_of_the_request() -> None:
    bad = json.dumps({"grammars": [{"lark_grammar": "start: nope"}]})
    compiler = GrammarCompiler(make_vocabulary, check_process=CountingProcess(bad))
    with pytest.raises(InvalidParameterError, match="nope"):
        compiler.compile(StructuredOutputsParams(regex="a"))


def test_threads_may_compile_at_once() -> None:
    compiler = GrammarCompiler(make_vocabulary)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for number in range(12):
                matcher = compiler.compile(unique((seed + number) % 8)).start()
                assert accepts(matcher, "{}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert compiler._kept.num_bytes == sum(grammar.size_bytes for grammar in set(compiler._in_use.values()))


@pytest.mark.parametrize("reasons", [False, True])
def test_reserved_matchers_are_taken_by_their_sequences_and_freed_with_their_request(
    monkeypatch: pytest.MonkeyPatch, reasons: bool
) -> None:
    compiler = GrammarCompiler(make_vocabulary)
    spec = StructuredOutputsParams(regex="ab", reasoning=SPAN if reasons else None)
    names = ["a", "a/1", "b"]
    held = [compiler.reserve(names[:2], spec), compiler.reserve(names[2:], spec)]
    assert compiler.num_reserved == 3
    make = CompiledGrammar._make
    monkeypatch.setattr(CompiledGrammar, "_make", lambda self: pytest.fail("made in a step"))
    matchers = [compiler.start(name, spec) for name in names]
    assert len(set(map(id, matchers))) == 3
    assert compiler.num_reserved == 0
    monkeypatch.setattr(CompiledGrammar, "_make", make)
    matchers.append(compiler.start("a", spec))  # after a preemption
    for matcher in matchers:
        for byte in b"</r>ab" if reasons else b"ab":
            matcher.append(byte)
        assert matcher.failure is None
    held.append(compiler.reserve(["c"], spec))
    assert compiler.num_reserved == 1
    held.clear()
    assert compiler.num_reserved == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_only_matchers_that_are_reserved_are_made_by_a_thread_that_yields_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policies: list[int] = []
    make = CompiledGrammar._make

    def watched(grammar: CompiledGrammar) -> Any:
        policies.append(os.sched_getscheduler(0))
        return make(grammar)

    monkeypatch.setattr(CompiledGrammar, "_make", watched)
    compiler, spec = GrammarCompiler(make_vocabulary), StructuredOutputsParams(regex="ab")
    held = compiler.reserve(["a", "a/1"], spec)
    assert policies == [os.SCHED_IDLE] * 2
    compiler.start("a", spec)
    compiler.start("b", spec)  # in a step, after a preemption
    assert policies[2:] == [os.sched_getscheduler(0)]
    assert policies[2] != os.SCHED_IDLE
    with pytest.raises(InvalidParameterError):
        compiler.reserve(["c"], StructuredOutputsParams(regex="abc"), "start: nothing")
    del held


# --- GrammarChecker ---------------------------------------------------------------------------


def regex(number: int) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=f"a{{{number}}}")


def test_checker_asks_once_for_a_valid_grammar_and_again_for_a_refused_one() -> None:
    process = CountingProcess("grammar")
    checker = GrammarChecker(process)
    assert checker._passed.get(regex(1)) is None
    assert checker.check(regex(1)) == checker.check(regex(1)) == checker._passed.get(regex(1)) == "grammar"
    assert process.num_questions == 1
    refusing = CountingProcess(RefusedGrammar("too deep"))
    checker = GrammarChecker(refusing)
    for _ in range(2):
        with pytest.raises(InvalidParameterError, match="too deep"):
            checker.check(regex(1))
    assert (refusing.num_questions, checker._passed.get(regex(1)), checker._passed.num_bytes) == (2, None, 0)


def test_checker_keeps_a_bounded_number_and_drops_the_least_recently_used() -> None:
    checker = GrammarChecker(CountingProcess("x" * 95), cache_bytes=1000)
    for number in (*range(1, 10), 1, *range(10, 14)):
        checker.check(regex(number))  # 100 bytes each
    assert checker._passed.num_bytes <= 1000
    assert checker._passed.get(regex(1)) is not None
    assert checker._passed.get(regex(2)) is None
    small = GrammarChecker(CountingProcess("x" * 95), cache_bytes=10)
    small.check(regex(1))
    assert (small._passed.num_bytes, small._passed.get(regex(1))) == (0, None)


def test_checked_grammar_is_compiled_without_another_check() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    spec = StructuredOutputsParams(json=schema)
    process = CountingProcess(RefusedGrammar("asked again"))
    compiler = GrammarCompiler(make_vocabulary, check_process=process)
    compiled = compiler.compile(spec, GrammarChecker().check(spec))
    assert accepts(compiled.start(), '{"a": 1}')
    assert not accepts(compiled.start(), '{"b": 1}')
    assert compiler.compile(spec) is compiled
    assert process.num_questions == 0


def test_checker_warm_up_starts_the_process_and_hides_its_errors() -> None:
    process = CheckProcess()
    checker = GrammarChecker(process)
    checker.warm_up()
    child = process._process
    assert child is not None
    checker.check(regex(1))
    assert process._process is child
    checker.close()
    assert child.poll() is not None
    GrammarChecker(CountingProcess(RefusedGrammar("does not work"))).warm_up()


# --- Reasoning before the text ----------------------------------------------------------------

SPAN = ReasoningSpan(start="<r>", end="</r>", is_open=True, budget=3)


def test_grammar_is_checked_once_with_and_without_reasoning() -> None:
    process = CountingProcess()
    compiler, checker = GrammarCompiler(make_vocabulary, check_process=process), GrammarChecker(process)
    plain = StructuredOutputsParams(regex="ab")
    with_reasoning = StructuredOutputsParams(regex="ab", reasoning=SPAN)
    assert checker.check(plain) == checker.check(with_reasoning)
    assert process.num_questions == 1
    held = compiler.compile(with_reasoning)
    assert compiler.compile(plain) is compiler.compile(plain)
    assert process.num_questions == 2
    assert held.start().allowed() is None
    for text in ("ab", "why</r>ab"):
        matcher = (compiler.compile(plain) if text == "ab" else held).start()
        for byte in text.encode():
            matcher.append(byte)
        assert matcher.failure is None
        assert matcher.allowed() is not None


def test_reasoning_alone_is_no_grammar_to_check() -> None:
    process = CountingProcess(RefusedGrammar("not asked"))
    compiler, checker = GrammarCompiler(make_vocabulary, check_process=process), GrammarChecker(process)
    spec = StructuredOutputsParams(reasoning=SPAN)
    checked = checker.check(spec)
    for compiled in (compiler.compile(spec), compiler.compile(spec, checked)):
        matcher = compiled.start()
        for byte in b"why":
            assert matcher.allowed() is None
            matcher.append(byte)
        assert matcher.allowed() == [ord("<")]
    assert process.num_questions == 0


def test_refused_grammar_is_named_with_reasoning_too() -> None:
    compiler = GrammarCompiler(make_vocabulary, check_process=CountingProcess())
    with pytest.raises(InvalidParameterError, match="unclosed") as caught:
        compiler.compile(StructuredOutputsParams(regex="(a", reasoning=SPAN))
    assert caught.value.field == "structured_outputs.regex"
