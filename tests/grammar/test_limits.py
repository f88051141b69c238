import json
from collections.abc import Iterator

import llguidance
import pytest

from quire.grammar.check_process import CheckProcess, Refused
from quire.grammar.limits import MAX_GRAMMAR_SYMBOLS, MAX_LEXER_FUEL, MAX_LEXER_STATES, MAX_ROW_ITEMS, parser_limits
from quire.structured_outputs import MAX_TEXT_BYTES, StructuredOutputsParams
from tests.grammar.builders import make_vocabulary


def test_the_library_gets_the_limits() -> None:
    limits = parser_limits()
    assert limits.max_lexer_states == MAX_LEXER_STATES
    assert limits.max_grammar_size == MAX_GRAMMAR_SYMBOLS
    assert limits.initial_lexer_fuel == MAX_LEXER_FUEL
    assert limits.max_items_in_row == MAX_ROW_ITEMS
    assert not limits.verbose_errors


def test_what_a_text_must_begin_with_is_bounded() -> None:
    """All of it is kept from the first mask on: 0.4 KB a byte."""
    grammar = llguidance.LLMatcher.grammar_from_regex("(ab){1000000000}")
    matcher = llguidance.LLMatcher(make_vocabulary().library_tokenizer, grammar, log_level=0, limits=parser_limits())
    matcher.compute_bitmask()
    assert not matcher.is_error()
    assert 0 < len(matcher.compute_ff_bytes()) <= 100_000


@pytest.fixture(scope="module")
def process() -> Iterator[CheckProcess]:
    process = CheckProcess(deadline_s=30)
    yield process
    process.close()


def test_the_largest_schema_of_usual_properties_is_compiled(process: CheckProcess) -> None:
    schema = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    number = 0
    while len(json.dumps(schema)) < MAX_TEXT_BYTES - 100:
        schema["properties"][f"property{number}"] = {"type": "string", "maxLength": 20}
        number += 1
    assert number > 1000
    assert isinstance(process.check(StructuredOutputsParams(json=schema)), str)


def test_the_largest_enum_is_compiled(process: CheckProcess) -> None:
    words = [f"value{number}" for number in range(4000)]
    assert isinstance(process.check(StructuredOutputsParams(json={"enum": words})), str)
    assert isinstance(process.check(StructuredOutputsParams(choice=words[:1000])), str)


def test_more_symbols_than_compile_in_time_are_refused(process: CheckProcess) -> None:
    schema = {"type": "object", "properties": {f"p{number}": {} for number in range(5000)}}
    answer = process.check(StructuredOutputsParams(json=schema))
    assert isinstance(answer, Refused)
    assert f"number of symbols) too big (limit for this grammar: {MAX_GRAMMAR_SYMBOLS})" in answer.reason
