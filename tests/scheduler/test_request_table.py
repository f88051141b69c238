import pytest

from quire.errors import EngineError
from quire.scheduler.request_table import RequestTable
from quire.types import Request
from tests.scheduler.builders import make_config, make_request, pop_first


def table_with(*requests: Request, seats: int = 8) -> RequestTable:
    table = RequestTable(make_config(max_num_seqs=seats))
    for request in requests:
        table.enter(request)
    return table


def run_first(table: RequestTable) -> Request:
    request = pop_first(table.waiting)
    table.running.append(request)
    return request


def test_a_request_leaves_from_wherever_it_is() -> None:
    requests = [make_request(name, n=2) for name in "abc"]
    table = table_with(*requests)
    run_first(table)
    parked = pop_first(table.waiting)
    table.parked[parked.request_id] = parked
    for request in requests:
        table.check({item.request_id for item in table.running})
        sibling = request.siblings[0]
        assert table.leave(request) == [request, sibling]
        assert sibling.request_id not in table.by_id
    table.check(set())
    assert table.by_id == {}
    assert (len(table.waiting), table.running, table.parked) == (0, [], {})


def test_a_fork_queues_where_its_parent_would() -> None:
    first, second = make_request("a"), make_request("b")
    table = table_with(first, second)
    run_first(table)
    child = make_request("a+")
    table.enter_fork(first, child)
    table.waiting.push(child)
    assert pop_first(table.waiting) is child
    assert pop_first(table.waiting) is second


def test_the_check_finds_the_lost_and_the_doubled() -> None:
    table = table_with(make_request("a"), make_request("b"))
    lost = pop_first(table.waiting)
    with pytest.raises(EngineError, match=r"'a' \(WAITING\) is in 0 places"):
        table.check(set())
    table.running += [lost, table.waiting.first()]
    with pytest.raises(EngineError, match=r"'b' \(WAITING\) is in 2 places"):
        table.check({"a", "b"})
    pop_first(table.waiting)
    table.check({"a", "b"})
    with pytest.raises(EngineError, match="blocks are owned by"):
        table.check({"a"})
    table.running.append(make_request("ghost"))
    with pytest.raises(EngineError, match="'ghost' has a place but is gone"):
        table.check({"a", "b", "ghost"})


def test_the_check_counts_seats() -> None:
    table = table_with(make_request("a", n=3), seats=2)
    run_first(table)
    with pytest.raises(EngineError, match="1 sequences more than max_num_seqs=2"):
        table.check({"a"})
