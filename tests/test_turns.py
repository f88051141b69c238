from hypothesis import given
from hypothesis import strategies as st

from quire.turns import Turns

CALLERS = st.sampled_from("abc")


@given(st.lists(CALLERS, max_size=30))
def test_every_item_is_taken_once_in_its_callers_order_and_callers_alternate(added: list[str]) -> None:
    turns = Turns[int]()
    for number, caller in enumerate(added):
        turns.add(caller, number)
    taken = []
    while turns:
        found = turns.take()
        assert found is not None
        taken.append(found)
    assert turns.take() is None
    for caller in set(added):
        assert [item for name, item in taken if name == caller] == [i for i, name in enumerate(added) if name == caller]
    for place in range(len(taken)):
        # Each caller that waits is served once before one is served twice.
        waiting = {name for name, _ in taken[place:]}
        assert {name for name, _ in taken[place : place + len(waiting)]} == waiting


def test_busy_callers_are_left_out_and_a_caller_that_ends_is_behind_others() -> None:
    turns = Turns[int]()
    for caller, item in (("a", 1), ("a", 2), ("b", 3)):
        turns.add(caller, item)
    assert turns.take() == ("a", 1)
    assert turns.take(busy={"b"}) == ("a", 2)
    assert turns.take(busy={"b"}) is None
    turns.add("a", 4)
    turns.end("b")
    assert turns.take() == ("a", 4)
    turns.end("another")
    assert turns.remove(lambda item: item == 3) == 3
    assert turns.remove(lambda item: item == 3) is None
    assert not turns
