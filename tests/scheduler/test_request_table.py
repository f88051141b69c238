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
        sibling = request.siblings[0]
        assert table.leave(request) == [request, sibling]
        assert sibling.request_id not in table.by_id
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
