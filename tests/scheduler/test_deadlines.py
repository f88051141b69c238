"""Deadlines order preemption, under every policy but priority, and starve no request."""

import msgspec
import pytest

from quire.scheduler.request import Request
from quire.scheduler.request_table import LATEST_DEADLINE_S
from tests.scheduler.builders import Driver, make_config, make_request

POLICIES = ["fcfs", "sjf", "fair"]


def crowded(policy: str, requests: list[Request], num_blocks: int = 11) -> None:
    """Run requests that need more blocks together than there are."""
    driver = Driver(make_config(policy=policy, num_blocks=num_blocks, max_num_seqs=4, enable_prefix_caching=False))
    driver.add(*requests)
    driver.run()
    assert driver.all_blocks_are_home


def long(name: str, arrival_time_s: float, deadline_time_s: float | None) -> Request:
    times = {"arrival_time_s": arrival_time_s, "deadline_time_s": deadline_time_s}
    return make_request(name, 8, 24, params={"ignore_eos": True}, **times)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("first", "second"), [(None, 50.0), (60.0, 50.0), (None, LATEST_DEADLINE_S)])
def test_first_arrival_is_preempted_if_its_deadline_is_later(
    policy: str, first: float | None, second: float | None
) -> None:
    early, late = long("early", 1.0, first), long("late", 2.0, second)
    crowded(policy, [early, late])
    assert (early.num_preemptions > 0, late.num_preemptions) == (True, 0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("deadline", [None, 50.0, 10 * LATEST_DEADLINE_S])
def test_last_arrival_is_preempted_among_equal_deadlines(policy: str, deadline: float | None) -> None:
    early, late = long("early", 1.0, deadline), long("late", 2.0, deadline)
    crowded(policy, [early, late])
    assert (early.num_preemptions, late.num_preemptions > 0) == (0, True)


def test_deadlines_do_not_matter_under_the_priority_policy() -> None:
    urgent, soon = long("urgent", 1.0, None), long("soon", 2.0, 5.0)
    soon.spec = msgspec.structs.replace(soon.spec, priority=1)
    crowded("priority", [urgent, soon])
    assert (urgent.num_preemptions, soon.num_preemptions > 0) == (0, True)


@pytest.mark.parametrize("policy", POLICIES)
def test_request_of_the_earliest_deadline_is_never_preempted(policy: str) -> None:
    requests = [long(f"r{number}", 1.0 + number, 60.0 - 10 * number) for number in range(4)]
    crowded(policy, requests, num_blocks=17)
    assert requests[-1].num_preemptions == 0
    assert sum(request.num_preemptions for request in requests) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_request_without_a_deadline_ends_though_urgent_ones_keep_arriving(policy: str) -> None:
    """Its prompt takes 25 steps and almost all blocks: the decodes beside it preempt it before its first token."""
    limits = {"long_prefill_token_threshold": 4, "sjf_ageing_tokens_per_s": 2.0, "max_num_seqs": 4}
    driver = Driver(make_config(policy=policy, num_blocks=31, max_num_batched_tokens=8, **limits))
    patient = make_request("patient", 100, 4, arrival_time_s=1.0, reads_prefix_cache=False)
    driver.add(patient)
    for step in range(1, 2000):
        now_s = 1.0 + 5 * step
        if driver.scheduler.num_running + driver.scheduler.num_waiting < 6:
            times = {"arrival_time_s": now_s, "deadline_time_s": now_s + 30}
            driver.add(make_request(f"urgent{step}", 4, 24, params={"ignore_eos": True}, **times))
        driver.step()
        if driver.scheduler.get("patient") is None:
            break
    assert len(patient.output_token_ids) == 4
    assert patient.num_preemptions > 1
