"""Grammars among the other options of a row, by both samplers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.errors import QueueFullError
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.matcher import TokenMatcher
from quire.sampling.reference import ReferenceRowSampler
from quire.sampling.sampler import NO_GRAMMARS, Sampler
from quire.sampling.state import NO_CHOICE, NOT_ALLOWED
from quire.structured_outputs import STRUCTURED_OUTPUTS_FAILED, ReasoningSpan, StructuredOutputsParams
from tests.grammar.builders import EOS, TOKENS, VOCAB_SIZE, make_vocabulary
from tests.sampling.builders import CPU, ById, new_request, params

COMPILER = GrammarCompiler(make_vocabulary)
GREEDY = {"temperature": 0}
DIGITS = set(range(ord("0"), ord("9") + 1))


def form(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


@pytest.fixture(params=["native", "torch"])
def make(request: pytest.FixtureRequest) -> Callable[[], ById]:
    def make_sampler() -> ById:
        sampler = Sampler(VOCAB_SIZE, CPU, grammars=COMPILER)
        if request.param == "torch":
            rows: Any = ReferenceRowSampler()
            sampler.rows = rows
        return ById(sampler)

    return make_sampler


def logits(*rows: dict[int, float]) -> torch.Tensor:
    found = torch.zeros(len(rows), VOCAB_SIZE)
    for row, values in enumerate(rows):
        for token_id, value in values.items():
            found[row, token_id] = value
    return found


def generate(sampler: ById, new: Any, num_tokens: int, values: torch.Tensor | None = None) -> list[int | None]:
    """Tokens of one request from the same row of logits each time, until there is none."""
    sampler.add_request(new)
    found: list[int | None] = []
    for _ in range(num_tokens):
        row = torch.zeros(1, VOCAB_SIZE) if values is None else values.clone()
        ((token_id, _),) = sampler.sample(row, [new.request_id])
        found.append(token_id)
        if token_id is None:
            break
        sampler.append_tokens(new.request_id, [token_id])
    return found


def test_greedy_takes_the_best_of_what_is_allowed(make: Callable[[], ById]) -> None:
    new = new_request(sampling=params(structured_outputs=form(regex="[ab]c"), **GREEDY), eos=[EOS])
    found = generate(make(), new, 3, logits({ord("x"): 9, ord("b"): 2, ord("a"): 1, ord("c"): 5}))
    assert found == [ord("b"), ord("c"), EOS]


def test_only_rows_with_a_grammar_are_masked(make: Callable[[], ById]) -> None:
    sampler = make()
    sampler.add_request(new_request("plain", params(**GREEDY)))
    sampler.add_request(new_request("form", params(structured_outputs=form(regex="[0-9]+"), **GREEDY), eos=[EOS]))
    values = logits({ord("x"): 1}, {ord("x"): 1})
    (plain, _), (formed, _) = sampler.sample(values, ["plain", "form"])
    assert plain == ord("x")
    assert formed in DIGITS
    states = [sampler.states[name] for name in ("plain", "form")]
    assert [state.num_tokens >= state.greedy_from for state in states] == [True, False]


def test_min_tokens_hold_the_end_back_while_there_is_anything_else(make: Callable[[], ById]) -> None:
    values = logits({EOS: 9, ord("a"): 1})
    long = params(structured_outputs=form(regex="a+"), min_tokens=4, **GREEDY)
    assert generate(make(), new_request(sampling=long, eos=[EOS]), 5, values) == [ord("a")] * 4 + [EOS]
    short = params(structured_outputs=form(regex="aa"), min_tokens=4, **GREEDY)
    assert generate(make(), new_request(sampling=short, eos=[EOS]), 5, values) == [ord("a")] * 2 + [EOS] * 3


def test_bad_words_give_way_to_the_grammar(make: Callable[[], ById]) -> None:
    values = logits({ord("a"): 2, ord("b"): 1})
    either = params(structured_outputs=form(regex="[ab]"), **GREEDY)
    banned = [[ord("a")], [TOKENS.index(b"ab")]]
    assert generate(make(), new_request(sampling=either, bad_words=banned, eos=[EOS]), 1, values) == [ord("b")]
    only = params(structured_outputs=form(regex="a"), **GREEDY)
    assert generate(make(), new_request(sampling=only, bad_words=banned, eos=[EOS]), 1, values) == [ord("a")]


def test_allowed_token_ids_and_the_grammar_must_agree(make: Callable[[], ById]) -> None:
    sampler = make()
    sampling = params(structured_outputs=form(regex="[abc]x"), allowed_token_ids=[ord("b"), ord("z")], **GREEDY)
    assert generate(sampler, new_request(sampling=sampling), 2) == [ord("b"), None]
    assert sampler.failure("a") == (NOT_ALLOWED, STRUCTURED_OUTPUTS_FAILED)


def test_broken_row_says_why_and_leaves_the_others_alone(make: Callable[[], ById]) -> None:
    sampler = make()
    sampler.add_request(new_request("good", params(structured_outputs=form(regex="a+"), **GREEDY)))
    wrong = new_request("wrong", params(structured_outputs=form(regex="a+"), **GREEDY), output=[ord("x")])
    sampler.add_request(wrong)
    sampler.add_request(new_request("nan", params(**GREEDY)))
    values = logits({}, {}, {0: float("nan")})
    tokens = [token_id for token_id, _ in sampler.sample(values, ["good", "wrong", "nan"])]
    assert TOKENS[tokens[0] or 0] == b"a"
    assert tokens[1:] == [None, None]
    assert "the library for structured outputs failed" in sampler.failure("wrong")[0]
    assert sampler.failure("wrong")[1] is None, "no form asked for a token that it does not allow"
    assert sampler.failure("nan") == (NO_CHOICE, None)


@pytest.mark.parametrize("grammars", [None, COMPILER], ids=["no tokenizer", "a grammar that cannot be compiled"])
def test_grammar_that_cannot_be_had_is_the_requests_failure(
    make: Callable[[], ById], grammars: GrammarCompiler | None
) -> None:
    sampler = make()
    sampler.sampler._grammars = grammars
    spec = form(regex="a" if grammars is None else "(a")
    sampler.add_request(new_request("a", params(structured_outputs=spec, **GREEDY)))
    sampler.add_request(new_request("b", params(**GREEDY)))
    (bad, _), (good, _) = sampler.sample(logits({1: 1}, {1: 1}), ["a", "b"])
    assert (bad, good) == (None, 1)
    error, code = sampler.failure("a")
    assert error == NO_GRAMMARS if grammars is None else "unclosed" in error
    assert code == STRUCTURED_OUTPUTS_FAILED


class Broken:
    """A library that fails as soon as it is asked: at once, or for the first token."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def start(self, sequence_id: str, spec: StructuredOutputsParams) -> TokenMatcher:
        if self.error is not None:
            raise type(self.error)(*self.error.args)  # parameters live on, and a raised one holds its frames
        return TokenMatcher(self, VOCAB_SIZE, (EOS,))  # type: ignore[arg-type]

    def compute_bitmask(self) -> bytes:
        return bytes(VOCAB_SIZE // 8 + 1)

    def is_error(self) -> bool:
        return True

    def get_error(self) -> str:
        return "panic: index out of bounds\n<state>"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (None, "panic: index"),
        (ValueError("panic: at start"), "at start"),
        (QueueFullError("try later"), "try later"),
        (TypeError("odd"), "TypeError('odd')"),
    ],
)
def test_failure_of_the_library_is_not_the_forms_and_is_logged(
    make: Callable[[], ById], error: Exception | None, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = make()
    sampler.sampler._grammars = Broken(error)  # type: ignore[assignment]
    assert generate(sampler, new_request(sampling=params(structured_outputs=form(regex="a"), **GREEDY)), 3) == [None]
    reason, code = sampler.failure("a")
    assert says in reason
    assert code is None
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.getMessage() == f"request 'a' fails: {reason}"


# --- Reasoning --------------------------------------------------------------------------------

THINKING = ReasoningSpan(start="<r>", end="</r>", is_open=True)
SHORT = ReasoningSpan(start="<r>", end="</r>", is_open=True, budget=2, closing="!</r>")
NO_GAP = ReasoningSpan(start="<r>", end="</r>", is_open=True, budget=2, closing="!</r>\n\n")
"""No more line breaks may come before the answer."""
LIKES_X = {ord("x"): 3, ord("a"): 2}


def text(token_ids: list[int | None]) -> bytes:
    return b"".join(TOKENS[token_id] for token_id in token_ids if token_id is not None)


def test_budget_of_reasoning_holds_beside_rows_without_one(make: Callable[[], ById]) -> None:
    sampler = make()
    for name, spec in {"a": form(regex="a+", reasoning=SHORT), "b": form(reasoning=SHORT), "c": None}.items():
        sampler.add_request(new_request(name, params(structured_outputs=spec, **GREEDY), eos=[EOS]))
    found: dict[str, list[int | None]] = {"a": [], "b": [], "c": []}
    for _ in range(9):
        for name, (token_id, _) in zip(found, sampler.sample(logits(*[LIKES_X] * 3), list(found)), strict=True):
            assert token_id is not None
            found[name].append(token_id)
            sampler.append_tokens(name, [token_id])
    assert [text(tokens) for tokens in found.values()] == [b"xx!</r>aa", b"xx!</r>xx", b"x" * 9]


def test_request_goes_on_in_its_reasoning_after_a_preemption(make: Callable[[], ById]) -> None:
    sampling = params(structured_outputs=form(regex="ab", reasoning=NO_GAP), temperature=1.0)
    whole = generate(make(), new_request(sampling=sampling, eos=[EOS], seed=5), 12)
    assert text(whole[2:]) == b"!</r>\n\nab<eos>"
    for count in range(12):
        output = [token_id for token_id in whole[:count] if token_id is not None]
        again = new_request(sampling=sampling, eos=[EOS], seed=5, output=output)
        assert output + generate(make(), again, 12 - count) == whole


@pytest.mark.parametrize("values", [{EOS: 9, ord("x"): 1}, {TOKENS.index(b"<tool>"): 9, EOS: 8, ord("x"): 1}])
def test_reply_does_not_end_within_reasoning_before_a_constrained_answer(
    make: Callable[[], ById], values: dict[int, float]
) -> None:
    constrained = params(structured_outputs=form(regex="a", reasoning=THINKING), **GREEDY)
    assert EOS not in generate(make(), new_request(sampling=constrained, eos=[EOS]), 4, logits(values))
    free = params(structured_outputs=form(reasoning=THINKING), **GREEDY)
    best = max(values, key=values.__getitem__)
    assert generate(make(), new_request(sampling=free, eos=[EOS]), 2, logits(values)) == [best] * 2


def test_bans_hold_together_in_reasoning(make: Callable[[], ById]) -> None:
    """The end is banned for the answer's sake, x as a bad word, and both come back where the answer needs them."""
    spec = form(regex="x", reasoning=NO_GAP)
    banned = params(structured_outputs=spec, **GREEDY)
    new = new_request(sampling=banned, eos=[EOS], bad_words=[[ord("x")]])
    found = generate(make(), new, 10, logits({EOS: 9, **LIKES_X}))
    assert text(found) == b"aa!</r>\n\nx"
    longer = params(structured_outputs=form(reasoning=SHORT), min_tokens=8, **GREEDY)
    found = generate(make(), new_request(sampling=longer, eos=[EOS]), 9, logits({EOS: 9, **LIKES_X}))
    assert text(found) == b"xx!</r>x<eos>"


def test_allowed_token_ids_and_the_end_of_reasoning_must_agree(make: Callable[[], ById]) -> None:
    sampler = make()
    only = params(structured_outputs=form(reasoning=SHORT), allowed_token_ids=[ord("x"), EOS], **GREEDY)
    assert generate(sampler, new_request(sampling=only), 4) == [ord("x"), ord("x"), None]
    assert sampler.failure("a") == (NOT_ALLOWED, STRUCTURED_OUTPUTS_FAILED)
    sampler = make()
    ends = params(structured_outputs=form(regex="a", reasoning=THINKING), allowed_token_ids=[EOS], **GREEDY)
    assert generate(sampler, new_request(sampling=ends), 2) == [None]
    assert sampler.failure("a") == (NOT_ALLOWED, STRUCTURED_OUTPUTS_FAILED)
