"""Requests that are refused, and what the refusal says."""

import pytest

from quire.errors import DuplicateRequestError, MemoryCapacityError, QueueFullError
from quire.scheduler.scheduler import Scheduler
from tests.scheduler.builders import Driver, make_config, make_pooling_request, make_request
from tests.scheduler.integrity import check_integrity


def test_duplicate_ids_are_refused_while_the_first_runs() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add_request(make_request("a", n=2))
    for name in ("a", "a.1"):
        with pytest.raises(DuplicateRequestError, match=f"'{name}' is already running"):
            scheduler.add_request(make_request(name))
    check_integrity(scheduler)


def test_full_queue_says_so() -> None:
    scheduler = Scheduler(make_config(max_num_waiting=2))
    scheduler.add_request(make_request("a"))
    scheduler.add_request(make_request("b"))
    with pytest.raises(QueueFullError, match="2 requests are waiting, max_num_waiting is 2"):
        scheduler.add_request(make_request("c"))
    scheduler.schedule()
    scheduler.add_request(make_request("c"))


def test_what_can_never_fit_is_refused_with_what_would() -> None:
    # Nine blocks of four: 36 tokens can be computed, so 37 known.
    config = make_config(num_blocks=10)
    scheduler = Scheduler(config)
    with pytest.raises(MemoryCapacityError, match=r"needs 10 KV blocks .* has 9, 1 too few; max_tokens=27 fits"):
        scheduler.add_request(make_request("a", 10, 28))
    driver = Driver(config)
    driver.add(make_request("a", 10, 27))
    driver.run()
    with pytest.raises(MemoryCapacityError, match="a prompt of 36 tokens fits"):
        scheduler.add_request(make_request("a", 50, 1))
    with pytest.raises(MemoryCapacityError, match="a prompt of 36 tokens fits"):
        scheduler.add_request(make_pooling_request("a", 37))
    driver.add(make_pooling_request("b", 36), make_request("c", 36, 1))
    driver.run()
    assert driver.all_blocks_are_home


def test_window_bounds_what_a_sequence_needs() -> None:
    driver = Driver(make_config(windows=(8,), num_blocks=8, max_num_batched_tokens=8))
    driver.add(make_request("a", 150, 100))
    driver.run()
    with pytest.raises(MemoryCapacityError):
        Scheduler(make_config(windows=(None,), num_blocks=8)).add_request(make_request("a", 150, 100))


def test_external_tokens_cannot_outgrow_the_cache() -> None:
    driver = Driver(make_config(num_blocks=4))
    driver.add(make_request("a", 8, 5, awaits_external_token=True))
    for token_id in range(4):
        driver.step()
        driver.scheduler.append_token("a", token_id)
    driver.step()
    with pytest.raises(MemoryCapacityError):
        driver.scheduler.append_token("a", 1)
