from hypothesis import given
from hypothesis import strategies as st

from quire.text.detokenizer import Released, StopStringMatcher

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


def test_text_after_a_match_is_dropped() -> None:
    matcher = StopStringMatcher((".",), include_in_output=True)
    assert matcher.append("a.b") == Released("a.", ".")
    assert matcher.append("c") == Released("")
    assert matcher.finish() == ""
