import pytest

from quire.config import SchedulerConfig
from quire.scheduler.request import Request
from tests.scheduler.builders import Driver, make_config, make_request


def admission_order(config: SchedulerConfig, requests: list[Request]) -> list[str]:
    """Limit the scheduler to one request at a time: the order of admission is the order of the queue."""
    driver = Driver(config)
    driver.add(*requests)
    driver.run()
    return [new.request_id for output in driver.outputs for new in output.new_requests]


def test_fcfs_is_the_order_of_arrival() -> None:
    requests = [make_request(name, length) for name, length in (("c", 30), ("a", 2), ("b", 9))]
    assert admission_order(make_config(max_num_seqs=1), requests) == ["c", "a", "b"]


def test_priority_is_smaller_first_and_equals_by_arrival() -> None:
    requests = [make_request(name, 4, priority=value) for name, value in (("x", 1), ("y", 0), ("z", 1), ("w", 0))]
    assert admission_order(make_config(max_num_seqs=1, policy="priority"), requests) == ["y", "w", "x", "z"]


def test_sjf_is_the_shortest_prompt_first() -> None:
    requests = [make_request(name, length) for name, length in (("c", 30), ("a", 9), ("b", 2), ("d", 9))]
    assert admission_order(make_config(max_num_seqs=1, policy="sjf"), requests) == ["b", "a", "d", "c"]


def test_sjf_counts_waiting_as_shortness() -> None:
    config = make_config(max_num_seqs=1, policy="sjf", sjf_ageing_tokens_per_s=10.0)
    young, old = make_request("young", 20, arrival_time_s=5.0), make_request("old", 59, arrival_time_s=1.0)
    assert admission_order(config, [young, old]) == ["old", "young"]
    young, old = make_request("young", 20, arrival_time_s=5.0), make_request("old", 61, arrival_time_s=1.0)
    assert admission_order(config, [young, old]) == ["young", "old"]


def steps_until_done(config: SchedulerConfig, patient: Request, stream: object, limit: int) -> int:
    """Steps until `patient` ends while `stream(step)` adds a rival per step."""
    driver = Driver(config)
    driver.add(patient)
    for step in range(1, limit):
        driver.add(stream(step))  # type: ignore[operator]
        driver.step()
        if driver.scheduler.get(patient.request_id) is None:
            return step
    raise AssertionError(f"{patient.request_id} starved for {limit} steps")


@pytest.mark.parametrize("threshold", [0, 4])
def test_long_prompt_does_not_starve_under_sjf_with_ageing(threshold: int) -> None:
    config = make_config(
        max_num_seqs=1, policy="sjf", sjf_ageing_tokens_per_s=3.0, num_blocks=41, long_prefill_token_threshold=threshold
    )
    # A shorter rival arrives every second and each takes at least four steps: more than the engine can do.
    steps = steps_until_done(
        config,
        make_request("long", 100, 4, arrival_time_s=1.0),
        lambda step: make_request(f"s{step}", 30, 4, arrival_time_s=1.0 + step),
        limit=300,
    )
    assert steps > 50


def test_nothing_starves_among_equal_priorities() -> None:
    config = make_config(max_num_seqs=2, policy="priority", num_blocks=31)
    steps = steps_until_done(
        config,
        make_request("first", 100, 10, priority=1),
        lambda step: make_request(f"s{step}", 20, 5, priority=1, arrival_time_s=1.0 + step),
        limit=200,
    )
    assert steps < 60


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority", "fair"])
def test_big_request_gets_its_blocks_in_spite_of_small_ones(policy: str) -> None:
    config = make_config(policy=policy, num_blocks=21, max_num_batched_tokens=16, long_prefill_token_threshold=8)
    steps = steps_until_done(
        config,
        make_request("big", 70, 8),
        lambda step: make_request(f"s{step}", 6, 6, arrival_time_s=1.0 + step / 10),
        limit=600,
    )
    assert steps < 600


@pytest.mark.parametrize(("num_blocks", "is_beside"), [(195, True), (196, False)])
def test_a_few_blocks_stay_free_for_decodes(num_blocks: int, is_beside: bool) -> None:
    """Two of 200 blocks, beside the three it has: else its next tokens would preempt the request just admitted."""
    driver = Driver(make_config(num_blocks=201, max_num_batched_tokens=1024, max_model_len=1024))
    driver.add(make_request("generates", 8, 4))
    driver.step()
    driver.add(make_request("large", 4 * num_blocks, 1))
    assert ("large" in driver.shares()) == is_beside
    driver.run()
    # If no other request runs all blocks may be taken.
    driver.add(make_request("all", 4 * 200, 1))
    assert driver.shares() == {"all": 800}
