"""Reasoning before an answer: where it begins and ends in tokens, what may follow, the budget."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from quire.errors import InvalidParameterError
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.matcher import Vocabulary
from quire.grammar.reasoning import ReasoningMatcher
from quire.structured_outputs import ReasoningSpan, StructuredOutputsParams

PIECES = [
    "</", "think", ">", "\n\n", ">\n", ">\n\n", ">\n\n\n", ">{", "think>", "x</think>", "x</think>\n", "x</think>1",
    "<think>so", "12", "ab", "<t",
]  # fmt: skip
TOKENS = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in PIECES), b"<eos>", b"<think>",
          b"</think>", b"<call>", b""]  # fmt: skip
EOS, START, END, CALL, EMPTY = range(len(TOKENS) - 5, len(TOKENS))
SPECIAL = {b"<eos>": EOS, b"<think>": START, b"</think>": END, b"<call>": CALL}
PLAIN = ReasoningSpan(start="[r]", end="[/r]", is_open=True)
THINK = ReasoningSpan(start="<think>", end="</think>", is_open=True)
CLOSED = ReasoningSpan(start="<think>", end="</think>", is_open=False)


def encode(text: str) -> list[int]:
    """Special tokens and bytes."""
    ids, raw = [], text.encode()
    while raw:
        special = next((name for name in SPECIAL if raw.startswith(name)), None)
        ids.append(raw[0] if special is None else SPECIAL[special])
        raw = raw[1 if special is None else len(special) :]
    return ids


VOCABULARY = Vocabulary(TOKENS, frozenset(SPECIAL.values()), (EOS,), encode)
COMPILER = GrammarCompiler(lambda: VOCABULARY)


def start(span: ReasoningSpan, **fields: Any) -> ReasoningMatcher:
    matcher = COMPILER.compile(StructuredOutputsParams(reasoning=span, **fields)).start()
    assert isinstance(matcher, ReasoningMatcher)
    return matcher


def budget(num_tokens: int, closing: str = "", span: ReasoningSpan = THINK) -> ReasoningSpan:
    return ReasoningSpan(start=span.start, end=span.end, is_open=span.is_open, budget=num_tokens, closing=closing)


def may_follow(matcher: ReasoningMatcher) -> set[int]:
    allowed = matcher.allowed()
    return set(range(len(TOKENS)) if allowed is None else allowed.tolist()) - matcher.banned


def shown(token_ids: set[int]) -> set[bytes]:
    return {TOKENS[token_id] for token_id in token_ids}


def ids(*pieces: str) -> list[int]:
    """The tokens of pieces; a piece that is no token is spelled."""
    found: list[int] = []
    for piece in pieces:
        raw = piece.encode()
        found += [TOKENS.index(raw)] if raw in TOKENS else list(raw)
    return found


def feed(matcher: ReasoningMatcher, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        assert token_id in may_follow(matcher), (TOKENS[token_id], matcher.failure)
        matcher.append(token_id)


def free_ids(matcher: ReasoningMatcher, draws: random.Random, most: int) -> list[int]:
    """Draw tokens until a stop token."""
    found: list[int] = []
    while len(found) < most and (not found or found[-1] != EOS):
        found.append(draws.choice(sorted(may_follow(matcher) - {EMPTY})))
        matcher.append(found[-1])
    return found


# --- Markers in tokens ------------------------------------------------------------------------

ENDS = {
    "one special token": ["</think>"],
    "several tokens": ["</", "think", ">"],
    "bytes": list("</think>"),
    "behind text in a larger token": ["x</think>"],
    "with a line break in the same token": ["</", "think", ">\n"],
    "behind text and before a line break": ["x</think>\n"],
    "after a false beginning": ["</", "</", "think", "</think>"],
}


@pytest.mark.parametrize("pieces", ENDS.values(), ids=ENDS)
def test_constraint_begins_after_the_end_marker(pieces: list[str]) -> None:
    matcher = start(THINK, regex="[12]b")
    feed(matcher, ids("any ", "12", "{", *pieces))
    assert shown(may_follow(matcher)) - {b"\n", b"\n\n"} == {b"1", b"2"}
    feed(matcher, ids("2", "b"))
    assert may_follow(matcher) == {EOS}


@pytest.mark.parametrize("text", ["1b", "<think>1b", "</think", "</thin k>", "<think>"])
def test_constraint_does_not_begin_without_the_end_marker(text: str) -> None:
    matcher = start(THINK, regex="[12]b")
    feed(matcher, encode(text))
    assert may_follow(matcher) >= {CALL, END, *ids("z", "\n")}


def test_marker_of_plain_text_is_found_in_any_tokens() -> None:
    matcher = start(PLAIN, choice=["yes"])
    feed(matcher, encode("[[/r[/r]"))
    assert shown(may_follow(matcher)) == {b"y", b"\n", b"\n\n"}


def test_stop_tokens_are_not_allowed_in_reasoning_before_a_constrained_answer() -> None:
    constrained, free = start(THINK, regex="a"), start(THINK)
    for matcher in (constrained, free):
        feed(matcher, ids("so"))
        assert matcher.allowed() is None
    assert (constrained.banned >= {EOS}, free.banned) == (True, frozenset())
    feed(constrained, [END, ord("a")])
    assert may_follow(constrained) == {EOS}


@pytest.mark.parametrize("begun", [[], ["</", "think"], ["</", "</", "think"]])
def test_token_must_not_end_in_the_middle_of_the_answer(begun: list[str]) -> None:
    matcher = start(THINK, regex="1")
    feed(matcher, ids(*begun))
    expected = ids(">{", ">\n\n\n") if begun else []
    assert {token_id for token_id in matcher.banned if token_id != EOS} == {*ids("x</think>1"), *expected}
    assert start(THINK).banned == frozenset(), "any answer may follow"


def test_line_breaks_may_come_before_a_constrained_answer() -> None:
    for gap in ("\n", "\n\n"):
        for pieces in ([gap], list(gap)):
            matcher = start(THINK, regex="a+")
            feed(matcher, [END, *ids(*pieces)])
            assert (ord("\n") in may_follow(matcher)) == (gap == "\n")
            feed(matcher, ids("a"))
            assert shown(may_follow(matcher)) == {b"a", b"<eos>"}


def test_line_break_that_the_constraint_accepts_belongs_to_it() -> None:
    matcher = start(THINK, regex=r"\na")
    feed(matcher, [END, *ids("\n")])
    assert shown(may_follow(matcher)) == {b"a"}
    matcher = start(THINK, regex=r"\na")
    feed(matcher, [END, *ids("\n\n", "\n", "a")])
    assert may_follow(matcher) == {EOS}


# --- Without an open marker in the prompt -----------------------------------------------------


def test_text_begins_with_the_start_marker_or_with_the_answer() -> None:
    assert shown(may_follow(start(CLOSED, regex="[12]b"))) == {b"1", b"2", b"<think>"}
    direct = start(CLOSED, regex="[12]b")
    feed(direct, ids("1"))
    assert shown(may_follow(direct)) == {b"b"}
    feed(direct, ids("b"))
    assert may_follow(direct) == {EOS}
    matcher = start(CLOSED, regex="[12]b")
    feed(matcher, [START, *ids("1b{"), END, *ids("2")])
    assert shown(may_follow(matcher)) == {b"b"}


def test_start_marker_of_plain_text_and_an_answer_that_begins_alike() -> None:
    span = ReasoningSpan(start="<r>", end="</r>", is_open=False)
    assert shown(may_follow(start(span, regex="<t|<rs"))) == {b"<", b"<t"}
    matcher = start(span, regex="<t|<rs")
    feed(matcher, ids("<"))
    assert shown(may_follow(matcher)) == {b"t", b"r"}
    feed(matcher, ids("r"))
    assert shown(may_follow(matcher)) == {b"s", *(raw for raw in TOKENS if raw.startswith(b">"))}
    feed(matcher, ids(">", "why", "</", "r", ">", "<"))
    assert shown(may_follow(matcher)) == {b"t", b"r"}, "the answer begins anew"
    feed(matcher, ids("r", "s"))
    assert may_follow(matcher) == {EOS}
    matcher = start(span, regex="ok")
    feed(matcher, ids("<", "r"))
    assert shown(may_follow(matcher)) >= {b">"}
    assert ord("o") not in may_follow(matcher)


def test_special_start_marker_is_not_spelled_but_found_if_the_answer_spells_it() -> None:
    matcher = start(CLOSED, regex="<.*")
    feed(matcher, ids("<t"))
    assert START not in may_follow(matcher)
    feed(matcher, ids("h", "i", "n", "k", ">"))
    assert matcher.allowed() is None
    feed(matcher, [END, *ids("<", "a")])
    assert EOS in may_follow(matcher)


def test_free_answer_is_never_restricted() -> None:
    for text in ("", "<thin", "<think>a", "<think>a</think>b", "  <think>", "hello <think>"):
        matcher = start(CLOSED)
        feed(matcher, encode(text))
        assert (matcher.allowed(), matcher.banned, matcher.may_ban) == (None, frozenset(), False)


def test_forbidden_token_fails_as_with_the_constraint_alone() -> None:
    for before in ([], [START, END]):
        matcher = start(CLOSED, regex="ab")
        feed(matcher, before)
        matcher.append(ord("x"))
        assert matcher.failure is not None
        assert not matcher.failure.is_client_error
        assert matcher.allowed() is not None
        assert may_follow(matcher) == set()


# --- Budget -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("fields", [{}, {"regex": "[12]b"}])
@pytest.mark.parametrize("is_open", [True, False])
def test_closing_words_are_forced_at_the_budget(num_tokens: int, fields: dict[str, Any], is_open: bool) -> None:
    closing = "\nEnough.\n</think>\n\n"
    matcher = start(budget(num_tokens, closing, THINK if is_open else CLOSED), **fields)
    feed(matcher, [] if is_open else [START])
    for _ in range(num_tokens):
        assert matcher.allowed() is None
        matcher.append(ord("z"))
    for token_id in encode(closing):
        assert may_follow(matcher) == {token_id}
        matcher.append(token_id)
    assert shown(may_follow(matcher)) == ({b"1", b"2"} if fields else set(TOKENS))


def test_marker_alone_is_forced_without_closing_words() -> None:
    matcher = start(budget(2), regex="[12]b")
    feed(matcher, ids("a", "b"))
    assert may_follow(matcher) == {END}
    matcher.append(END)
    assert shown(may_follow(matcher)) == {b"1", b"2", b"\n", b"\n\n"}


@pytest.mark.parametrize("num_tokens", [None, 2])
def test_opening_of_a_constrained_answer_is_forced(num_tokens: int | None) -> None:
    span = ReasoningSpan(
        start="<think>", end="</think>", is_open=True, budget=num_tokens, closing="</think>\n", opening="<call>A"
    )
    matcher = start(span, regex="[12]b")
    feed(matcher, ids("a", "b"))
    closing = [END, ord("\n")] if num_tokens else [END]
    for token_id in [*closing, CALL, ord("A")]:
        assert (may_follow(matcher) == {token_id}) or token_id == closing[0]
        matcher.append(token_id)
    assert {b"1", b"2"} <= shown(may_follow(matcher))
    free = start(span)
    feed(free, [ord("a"), END])
    assert free.allowed() is None


def test_reasoning_that_ends_within_the_budget_is_not_touched() -> None:
    matcher = start(budget(3), regex="ab")
    feed(matcher, [*ids("x", "y"), END, *ids("a", "b")])
    assert may_follow(matcher) == {EOS}


def test_text_that_began_with_the_answer_has_no_budget() -> None:
    matcher = start(budget(1, span=CLOSED))
    feed(matcher, ids("hello <think> and more"))
    assert matcher.allowed() is None


def test_end_marker_that_the_model_has_begun_is_completed() -> None:
    span = ReasoningSpan(start="<r>", end="[/r]", is_open=True, budget=3, closing="Enough. [/r]\n")
    matcher = start(span)
    feed(matcher, encode("a[/"))
    for token_id in encode("r]\n"):
        assert may_follow(matcher) == {token_id}
        matcher.append(token_id)
    assert matcher.allowed() is None
    special = start(budget(2))
    feed(special, ids("a", "<"))
    assert may_follow(special) == {END}, "a special token is not begun with a letter"


def test_character_is_completed_within_four_tokens_of_the_budget() -> None:
    matcher = start(budget(2))
    feed(matcher, list("a😀".encode()))
    assert may_follow(matcher) == {END}
    endless = start(budget(2))
    for token_id in [ord("a"), 0xF0]:
        endless.append(token_id)
    for _ in range(4):
        assert endless.allowed() is None
        endless.append(0xF0)
    assert may_follow(endless) == {END}


def test_closing_words_that_no_token_spells_are_refused() -> None:
    vocabulary = Vocabulary([b"a", b"<", b">", b"<eos>"], frozenset({3}), (3,), lambda text: [])
    compiler = GrammarCompiler(lambda: vocabulary)
    good = ReasoningSpan(start="<", end=">", is_open=True, budget=1, closing="a>")
    matcher = compiler.compile(StructuredOutputsParams(reasoning=good)).start()
    matcher.append(0)
    assert [matcher.allowed()] == [[0]]
    bad = ReasoningSpan(start="<", end=">", is_open=True, budget=1, closing="b>")
    with pytest.raises(InvalidParameterError, match=r"reasoning\.closing") as caught:
        compiler.compile(StructuredOutputsParams(reasoning=bad))
    assert caught.value.field == "structured_outputs.reasoning.closing"


# --- Any text ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("end", ["</think>", "[/r]", "aab", "1"])
def test_drawn_texts_follow_the_rules_and_read_again_the_same(is_open: bool, end: str) -> None:
    """A text in its whole, by simple string operations, is the oracle."""
    answers, num_complete = {"1b", "2b"}, 0
    for seed in range(80):
        draws = random.Random(seed)
        limit = draws.choice([None, 0, 3, 8])
        closing = draws.choice(["", f"Stop.{end}\n"])
        span = ReasoningSpan(start="<think>", end=end, is_open=is_open, budget=limit, closing=closing)
        matcher = start(span, regex="[12]b")
        found = free_ids(matcher, draws, 60)
        assert matcher.failure is None
        again = start(span, regex="[12]b")
        for token_id in found:
            assert token_id in may_follow(again)
            again.append(token_id)
        assert may_follow(again) == may_follow(matcher)
        text = b"".join(TOKENS[token_id] for token_id in found)
        answer = text
        if is_open or text.startswith(b"<think>"):
            reasoning, is_ended, answer = text.removeprefix(b"" if is_open else b"<think>").partition(end.encode())
            assert b"<eos>" not in reasoning
            texts = (b"".join(TOKENS[token_id] for token_id in found[:count]) for count in range(len(found) + 1))
            num_tokens = sum(end.encode() not in so_far.removeprefix(b"<think>") for so_far in texts)
            assert limit is None or num_tokens <= 1 + limit + 4 + len(encode(closing or end))
            if not is_ended:
                continue
            answer = answer[min(2, len(answer) - len(answer.lstrip(b"\n"))) :]
        if found[-1] == EOS:
            assert answer.removesuffix(b"<eos>").decode() in answers
            num_complete += 1
    assert num_complete > 5
