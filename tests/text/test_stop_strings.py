import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text.stop_strings import Released, StopStringMatcher

ALPHABET = "ab\né"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)
DELTAS = st.lists(st.text(ALPHABET, max_size=5), max_size=12)


def search_whole(text: str, stop: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Search the whole text: the match that ends first, then the first in the list."""
    for end in range(len(text) + 1):
        for pattern in stop:
            if text[:end].endswith(pattern):
                return text[: end if include else end - len(pattern)], pattern
    return text, None


def run(deltas: list[str], stop: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    matcher = StopStringMatcher(stop, include)
    text = ""
    for delta in deltas:
        released = matcher.append(delta)
        text += released.text
        if released.matched is not None:
            return text, released.matched
    return text + matcher.finish(), None


@given(DELTAS, STOPS, st.booleans())
def test_equals_searching_the_whole_text(deltas: list[str], stop: tuple[str, ...], include: bool) -> None:
    assert run(deltas, stop, include) == search_whole("".join(deltas), stop, include)


@given(DELTAS, STOPS)
def test_exactly_the_possible_beginning_of_a_stop_string_is_held_back(deltas: list[str], stop: tuple[str, ...]) -> None:
    matcher = StopStringMatcher(stop, include_in_output=False)
    seen = shown = ""
    for delta in deltas:
        seen += delta
        released = matcher.append(delta)
        shown += released.text
        if released.matched is not None:
            return
        held = next(
            (seen[-length:] for length in range(len(seen), 0, -1) if any(s.startswith(seen[-length:]) for s in stop)),
            "",
        )
        assert shown + held == seen


@pytest.mark.parametrize("include", [True, False])
def test_stop_string_is_found_across_any_cut(include: bool) -> None:
    text, stop = "one two STOP three", ("STOP",)
    expected = "one two STOP" if include else "one two "
    for first in range(len(text)):
        for second in range(first, len(text)):
            deltas = [text[:first], text[first:second], text[second:]]
            assert run(deltas, stop, include) == (expected, "STOP")


def test_first_in_list_wins_at_the_same_end() -> None:
    assert run(["xab"], ("b", "ab"), include=False) == ("xa", "b")
    assert run(["xab"], ("ab", "b"), include=False) == ("x", "ab")


def test_false_start_is_released() -> None:
    matcher = StopStringMatcher(("abac",), include_in_output=False)
    assert matcher.append("xaba") == Released("x")
    assert matcher.append("b") == Released("ab")
    assert matcher.append("!") == Released("ab!")


def test_text_after_a_match_is_dropped() -> None:
    matcher = StopStringMatcher((".",), include_in_output=True)
    assert matcher.append("a.b") == Released("a.", ".")
    assert matcher.append("c") == Released("")
    assert matcher.finish() == ""


def test_finish_releases_a_beginning_that_was_never_completed() -> None:
    matcher = StopStringMatcher(("###",), include_in_output=False)
    assert matcher.append("title ##").text == "title "
    assert matcher.finish() == "##"


def test_no_stop_strings() -> None:
    matcher = StopStringMatcher((), include_in_output=False)
    assert matcher.append("anything") == Released("anything")
    assert matcher.finish() == ""
