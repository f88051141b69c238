"""Lost steps: every request starts again, and requests can be made to run alone."""

from quire.types import RequestStatus
from tests.scheduler.builders import Driver, make_config, make_pooling_request, make_request, run_alone


def test_after_lost_step_requests_recompute_and_executor_forgets_all() -> None:
    driver = Driver(make_config())
    requests = [make_request(name, 8, 6) for name in "abc"]
    driver.add(*requests[:2])
    driver.step()
    driver.add(requests[2])
    driver.scheduler.abort(["b"])
    for is_executed in (True, False):
        assert driver.lose_steps(is_executed=is_executed) == []
        assert [request.status for request in requests] == [
            RequestStatus.PREEMPTED, RequestStatus.FINISHED_ABORTED, RequestStatus.PREEMPTED,
        ]  # fmt: skip
        assert requests[0].num_computed_tokens == 0
    driver.step()
    again = driver.outputs[-1]
    assert again.forgets_all
    assert (again.preempted_ids, again.finished_ids) == ((), ())
    assert {new.request_id for new in again.new_requests} == {"a", "c"}
    driver.run()
    assert not any(output.forgets_all for output in driver.outputs[-3:])
    assert [request.output_token_ids for request in requests[::2]] == [run_alone(requests[at], 256) for at in (0, 2)]
    assert driver.all_blocks_are_home


def test_the_prefix_cache_keeps_nothing_of_the_lost_step() -> None:
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(make_request("a", range(24)))
    driver.step()
    driver.lose_steps()
    driver.scheduler.abort(["a"])
    driver.add(make_request("next", range(24)))
    driver.step()
    assert driver.outputs[-1].scheduled[0].num_computed_tokens == 8


def test_request_at_fault_ends_with_the_siblings_in_it() -> None:
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(make_request("bad", range(20), n=3), make_request("good", 4))
    driver.step()
    updates = driver.lose_steps(["bad"])
    assert [update.request.request_id for update in updates] == ["bad", "bad.1", "bad.2"]
    assert {update.request.status for update in updates} == {RequestStatus.FINISHED_ERROR}
    assert {update.result.error for update in updates} == {"at fault"}
    # What it computed before that step is not trusted either.
    driver.add(make_request("next", range(20)))
    driver.run()
    assert driver.scheduler.get("next") is None
    assert all(item.num_computed_tokens < 8 for item in driver.outputs[2].scheduled)
    assert driver.all_blocks_are_home


def test_alone_no_other_request_runs_or_is_admitted() -> None:
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(make_request("a", 20, 9), make_request("b", 4, 9), make_pooling_request("c", 20))
    for name, shares in (("c", 8), ("c", 8), ("a", 8), ("c", 4), ("a", 8), ("a", 4), ("a", 1), ("b", 4)):
        driver.step(alone=name)
        assert {item.request_id: item.num_tokens for item in driver.outputs[-1].scheduled} == {name: shares}
    driver.run()
    assert driver.all_blocks_are_home
