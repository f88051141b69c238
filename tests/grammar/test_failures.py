"""What the library says when a text cannot go on: its own words, provoked, and whose fault they are."""

import llguidance
import pytest
from llguidance import LLMatcher, LLParserLimits

from quire.grammar.check_child import ByteTokens
from quire.grammar.failures import Failure, failure_of

EXPLODES = "start: /(.*a.{12}b)+/"


def error_of(grammar: str, text: str, **limits: int) -> str:
    """What the library says after some of these characters."""
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTokens()), eos_token=[256])
    taken = LLParserLimits(verbose_errors=False, **limits)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=taken)
    assert not matcher.is_error()
    for character in text.encode():
        matcher.compute_bitmask()
        if matcher.is_error() or not matcher.consume_token(character):
            break
    return matcher.get_error()


@pytest.mark.parametrize(
    ("grammar", "limits"),
    [
        (EXPLODES, {"max_lexer_states": 50, "initial_lexer_fuel": 1_000_000}),
        (EXPLODES, {"step_lexer_fuel": 20, "initial_lexer_fuel": 1_000_000}),
        ('start: s\ns: s s | "a" | ""', {"max_items_in_row": 10}),
        ('start: s\ns: s s | "a" | "b" s', {"step_max_items": 5}),
        ('start: "a" x\nx: "b" x', {}),
        ('start: "a" x\nx: x "b"', {}),
    ],
)
def test_a_limit_that_a_form_breaks_is_the_forms_fault(grammar: str, limits: dict[str, int]) -> None:
    message = error_of(grammar, "abab" * 50 if grammar == EXPLODES else "a" * 50, **limits)
    assert message
    failure = failure_of(message)
    assert failure.is_of_form, message
    assert "the grammar of structured_outputs cannot be followed any further" in failure.reason


def test_a_token_that_the_library_forbade_is_not() -> None:
    failure = failure_of(error_of('start: "ab"', "x"))
    assert not failure.is_of_form
    assert "doesn't satisfy the grammar" in failure.reason


@pytest.mark.parametrize(
    "message", ["panic: explicit panic\n  at lib.rs", "token id 300 out of range", "", "\n", "x" * 999]
)
def test_what_nobody_knows_is_the_librarys_own(message: str) -> None:
    failure = failure_of(message)
    assert not failure.is_of_form
    assert failure.reason.isprintable()
    assert len(failure.reason) < 300


def test_what_leads_to_nothing_says_so() -> None:
    assert "nothing may come next" in failure_of("NoExtensionBias\n<non-verbose/>").reason
    assert Failure("x").is_of_form
