"""Blocks in host memory and on disk: fetches, the requests that wait for them, and failures."""

import random
from typing import Any

import pytest

from quire.events import EventKind, EventLog
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.transfers import Tier, TransferReport
from tests.scheduler.builders import Driver, make_config, make_request, run_alone
from tests.scheduler.integrity import check_integrity

PROMPT = list(range(17))
NUM_WORKLOADS = 40


def make_driver(**config: Any) -> Driver:
    config = make_config(**{"max_disk_bytes": 1, **config})
    return Driver(config, Scheduler(config, EventLog()))


def restarted(driver: Driver) -> Driver:
    """Return a driver that starts with what the other one has left on disk."""
    driver.executor.execute(driver.scheduler.schedule_last())
    fresh = make_driver(**{"num_blocks": driver.scheduler.config.num_blocks})
    fresh.executor.disk = driver.executor.disk
    fresh.scheduler.blocks.tiers.stored = set(driver.executor.disk)
    return fresh


def after_restart(prompt: list[int] = PROMPT) -> Driver:
    driver = make_driver()
    driver.add(make_request("first", prompt))
    driver.run()
    return restarted(driver)


def events(driver: Driver, kind: EventKind) -> list[dict[str, Any]]:
    log = driver.scheduler._events
    return [event.data for event in log.of(kind)]


def finish(driver: Driver, *requests: Request) -> None:
    """Run to the end; every request has its own tokens, and all blocks are home."""
    driver.run()
    for request in requests:
        assert request.output_token_ids == run_alone(request, 256)
    assert driver.all_blocks_are_home
    assert len(driver.scheduler.blocks.tiers.free_slots) == driver.scheduler.config.num_host_blocks


def test_prefix_goes_on_from_the_device_to_the_disk() -> None:
    driver = after_restart()
    driver.add(short := make_request("short", [*PROMPT[:9], 99]))
    driver.run()
    assert short.num_cached_tokens == 8
    driver.add(whole := make_request("whole", PROMPT))
    output = driver.submit()
    # Two blocks are on the device, two come.
    assert [(item.source_tier, len(item.digests), item.target_tier) for item in output.transfers] == [
        (Tier.DISK, 2, Tier.DEVICE)
    ]
    assert not output.scheduled
    assert output.awaits_transfers
    driver.collect()
    finish(driver, short, whole)
    assert whole.num_cached_tokens == 16
    assert [data["num_disk_tokens"] for data in events(driver, EventKind.FETCHED)] == [8, 8]


def test_other_requests_run_while_blocks_come() -> None:
    driver = after_restart()
    driver.executor.num_disk_steps = lambda: 4
    driver.add(slow := make_request("slow", PROMPT))
    driver.add(other := make_request("other", 9, 12))
    assert [driver.shares() for _ in range(5)] == [{"other": 9}, *[{"other": 1}] * 3, {"other": 1, "slow": 1}]
    assert slow.num_cached_tokens == 16
    finish(driver, slow, other)


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_blocks_that_do_not_come_are_computed(lost: int) -> None:
    driver = after_restart()
    lost_key = list(driver.executor.disk)[lost]  # written from the start of the prefix
    del driver.executor.disk[lost_key]
    driver.add(request := make_request("again", PROMPT))
    finish(driver, request)
    assert request.num_cached_tokens == 4 * lost
    assert lost_key not in driver.scheduler.blocks.tiers.stored
    # It is written again when it leaves.
    assert lost_key not in driver.executor.disk
    driver.add(make_request("once more", PROMPT))
    driver.run()
    assert lost_key in restarted(driver).executor.disk


@pytest.mark.parametrize("when", ["coming", "filled"])
def test_aborted_request_leaves_its_blocks_in_the_cache(when: str) -> None:
    driver = after_restart()
    driver.executor.num_disk_steps = lambda: 3
    driver.add(make_request("aborted", PROMPT))
    driver.step()
    if when == "filled":
        driver.step()
        driver.submit()
    driver.scheduler.abort(["aborted"])
    check_integrity(driver.scheduler)
    assert driver.scheduler.has_unfinished
    assert not driver.scheduler.reset_prefix_cache()
    if driver.in_flight:
        driver.collect()
    driver.run()
    driver.add(again := make_request("again", PROMPT))
    driver.step()
    assert again.num_cached_tokens == 16
    finish(driver, again)


def test_lost_step_ends_fetches_and_the_prefix_is_computed() -> None:
    driver = after_restart()
    driver.executor.num_disk_steps = lambda: 5
    driver.add(request := make_request("a", PROMPT))
    driver.step()
    driver.submit()
    driver.lose_steps()
    finish(driver, request)
    assert request.num_cached_tokens == 0


def test_request_that_reads_no_cache_fetches_nothing() -> None:
    driver = after_restart()
    driver.add(request := make_request("a", PROMPT, reads_prefix_cache=False))
    finish(driver, request)
    assert events(driver, EventKind.FETCH) == []


def test_block_on_disk_is_not_written_again() -> None:
    driver = after_restart()
    driver.add(make_request("a", PROMPT))
    driver.run()
    moved = driver.scheduler.schedule_last().transfers
    assert sum(len(item.digests) for item in moved) == 0


def test_blocks_of_a_failed_request_are_not_kept() -> None:
    driver = make_driver()
    driver.executor.fails = lambda request_id, num_tokens: num_tokens == len(PROMPT) + 2
    driver.add(make_request("bad", PROMPT))
    driver.run()
    assert driver.scheduler.schedule_last().transfers == ()


def test_preempted_requests_swap_at_random() -> None:
    num_tokens = {True: 0, False: 0}
    num_preempted = num_fetched = 0
    for seed in range(NUM_WORKLOADS):
        for swaps in (True, False):
            rng = random.Random(seed)
            windows = rng.choice([(None,), (None, 7)])
            driver = make_driver(
                num_blocks=rng.choice([17, 25]) * len(windows), windows=windows, max_disk_bytes=0, max_num_seqs=6,
                num_host_blocks=rng.choice([7, 60]) * swaps, max_in_flight=rng.choice([1, 2]),
            )  # fmt: skip
            requests = [make_request(f"{seed}-{at}", rng.randint(3, 14), rng.randint(5, 26)) for at in range(6)]
            driver.add(*requests)
            finish(driver, *requests)
            num_tokens[swaps] += sum(output.num_tokens for output in driver.outputs)
            num_preempted += sum(request.num_preemptions for request in requests)
            num_fetched += sum(data["num_host_tokens"] for data in events(driver, EventKind.FETCHED))
            assert bool(events(driver, EventKind.FETCH)) <= swaps
    assert num_preempted > NUM_WORKLOADS
    assert num_fetched > NUM_WORKLOADS
    assert num_tokens[True] < num_tokens[False]


@pytest.mark.parametrize(("host_bytes_per_s", "swaps"), [(1e9, True), (2.0, False)])
def test_auto_swaps_while_copies_are_faster_than_prefill(host_bytes_per_s: float, swaps: bool) -> None:
    driver = make_driver(num_blocks=9, max_disk_bytes=0, num_host_blocks=20, compares_swap=True)
    driver.scheduler.blocks.tiers.note(TransferReport(host_bytes_per_s=host_bytes_per_s))
    plain = driver.scheduler.schedule
    driver.scheduler.schedule = lambda alone=None: plain(alone, 0, 100.0)  # type: ignore[method-assign]
    requests = [make_request(name, 8, 16) for name in "abc"]
    driver.add(*requests)
    driver.run()
    assert sum(request.num_preemptions for request in requests) > 0
    assert bool(events(driver, EventKind.OFFLOAD)) == swaps
