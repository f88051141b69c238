"""Positions at which prompts break the prefix of earlier ones: exact, per caller, within bounded memory."""

import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server import prefix_breaks
from quire.server.prefix_breaks import PrefixBreaks, _num_shared

CALLER = ("ann", "")


def tokens(name: str, count: int) -> list[int]:
    """Return ids that other names do not have."""
    rng = random.Random(name)
    return [rng.randrange(150_000) for _ in range(count)]


SYSTEM = tokens("system", 1000)


def note_all(breaks: PrefixBreaks, prompts: Sequence[list[int]], caller: tuple[str, ...] = CALLER) -> list[int | None]:
    async def note() -> list[int | None]:
        return [await breaks.note(caller, prompt) for prompt in prompts]

    return asyncio.run(note())


def session(name: str, num_turns: int, system: list[int] = SYSTEM) -> list[list[int]]:
    """Return the prompts of its turns."""
    return [system + tokens(name, 90 * turn) for turn in range(1, num_turns + 1)]


def test_session_that_only_grows_has_no_breaks() -> None:
    breaks = PrefixBreaks()
    assert note_all(breaks, session("a", 6)) == [None] * 6
    assert (breaks.num_breaks, breaks.num_lost_tokens, breaks.last_at) == (0, 0, None)


@pytest.mark.parametrize("at", [0, 14, 400, 1000])
def test_changed_token_is_the_position_of_the_break(at: int) -> None:
    first, second = session("a", 2)
    breaks = PrefixBreaks()
    changed = [*second[:at], 777_777, *second[at + 1 :]]
    assert note_all(breaks, [first, changed]) == [None, at]
    assert (breaks.num_breaks, breaks.num_lost_tokens, breaks.last_at) == (1, len(first) - at, at)


def test_inserted_and_left_out_tokens_are_breaks() -> None:
    first, second = session("a", 2)
    assert note_all(PrefixBreaks(), [first, [*second[:50], 1, 2, 3, *second[50:]]]) == [None, 50]
    assert note_all(PrefixBreaks(), [first, second[:50] + second[60:]]) == [None, 50]


def test_dropped_old_messages_break_behind_the_system_text() -> None:
    *_, sixth, _ = turns = session("a", 7)
    kept = SYSTEM + sixth[len(SYSTEM) + 180 :] + tokens("next", 40)
    assert note_all(PrefixBreaks(), [*turns[:6], kept])[-1] == len(SYSTEM)


def test_other_conversation_with_the_same_system_text_is_no_break() -> None:
    assert note_all(PrefixBreaks(), [*session("a", 5), *session("b", 5)]) == [None] * 10


def test_repeated_shortened_and_edited_prompts_are_no_breaks() -> None:
    first, second, third = session("a", 3)
    edited = second + tokens("other question", 90)
    assert note_all(PrefixBreaks(), [first, second, third, third, second, edited]) == [None] * 6


def test_opening_of_an_answer_that_later_turns_leave_out_is_no_break() -> None:
    opening = tokens("think", 3)
    turns = session("a", 4)
    breaks = PrefixBreaks()
    assert note_all(breaks, [prompt + opening for prompt in turns[:3]]) == [None] * 3
    assert note_all(breaks, [[8, *turns[3], *opening]]) == [0]
    # The cache has this prompt from before the break.
    assert note_all(breaks, [turns[3] + opening]) == [None]


def test_prompts_of_other_callers_and_salts_are_not_compared() -> None:
    first, second = session("a", 2)
    breaks = PrefixBreaks()
    for caller in (("ann", ""), ("bob", ""), ("ann", "salt")):
        assert note_all(breaks, [first], caller) == [None]
        first = [*first[:20], first[20] + 1, *first[21:]]
    assert note_all(breaks, [[7, *second[1:]]]) == [0]


def test_sessions_side_by_side_are_told_apart() -> None:
    breaks = PrefixBreaks()
    sessions = [session(name, 4) for name in "abcdef"]
    for turn in range(3):
        assert note_all(breaks, [prompts[turn] for prompts in sessions]) == [None] * 6
    changed = [[*prompts[3][:30], 5 + at, *prompts[3][31:]] for at, prompts in enumerate(sessions)]
    assert note_all(breaks, changed) == [30] * 6


def test_header_that_changes_every_turn_takes_one_place() -> None:
    breaks = PrefixBreaks()
    other = session("b", 2)
    note_all(breaks, [[0, *prompt] for prompt in other[:1]])
    changing = [[turn, *prompt] for turn, prompt in enumerate(session("a", 40), 1)]
    assert note_all(breaks, changing) == [0] * 40
    assert note_all(breaks, [[0, *other[1]]]) == [None]


def test_memory_is_bounded_and_the_oldest_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_breaks, "MAX_TOKENS", 20_000)
    breaks = PrefixBreaks()
    for number in range(200):
        note_all(breaks, [tokens(f"{number}", 100 + number)], (f"{number % 50}",))
        held = [prompt for prompts in breaks._prompts.values() for prompt in prompts]
        assert sum(map(len, held)) == breaks._num_bytes <= 4 * 20_000
    assert all(breaks._prompts.values())
    note_all(breaks, [tokens(f"long {number}", 90) for number in range(100)], ("50",))
    assert len(breaks._prompts["50",]) == prefix_breaks.MAX_PROMPTS
    note_all(breaks, [tokens("longer than all", 30_000)], ("51",))
    assert breaks._num_bytes == 0


def test_long_prompts_are_compared_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_breaks, "LONG_PROMPT", 500)
    used: list[object] = []
    to_thread = asyncio.to_thread

    async def watched(function, *args):  # type: ignore[no-untyped-def]
        used.append(function)
        return await to_thread(function, *args)

    monkeypatch.setattr(asyncio, "to_thread", watched)
    first, second = session("a", 2)
    assert note_all(PrefixBreaks(), [first, [3, *second[1:]]]) == [None, 0]
    assert len(used) == 2


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_shared_tokens_are_counted_exactly(a: list[int], b: list[int]) -> None:
    expected = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    packed = [b"".join(item.to_bytes(4, "little") for item in ids) for ids in (a, b)]
    assert _num_shared(*packed) == expected
