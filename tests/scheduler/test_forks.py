"""`n > 1` and beams: blocks are shared, the first writer copies, and each sequence goes its own way."""

import pytest

from quire.errors import EngineError
from quire.events import EventKind, EventLog
from quire.scheduler.scheduler import Scheduler
from tests.fakes import chain_all, token_after
from tests.scheduler.builders import VOCAB_SIZE, Driver, make_beam, make_config, make_request, run_alone
from tests.scheduler.integrity import check_integrity


def test_siblings_are_forked_in_the_step_that_completes_the_prompt() -> None:
    driver = Driver(make_config(max_num_batched_tokens=8))
    leader = make_request("a", 10, 4, n=3)
    siblings = list(leader.siblings)
    driver.add(leader)
    assert driver.shares() == {"a": 8}
    assert driver.scheduler.num_running == 1
    updates = driver.step()
    output = driver.outputs[-1]
    assert [(item.request_id, item.num_tokens, item.logits_from) for item in output.scheduled] == [
        ("a", 2, None),
        ("a.1", 0, "a"),
        ("a.2", 0, "a"),
    ]
    assert [new.request_id for new in output.new_requests] == ["a.1", "a.2"]
    assert [update.request.request_id for update in updates] == ["a", "a.1", "a.2"]
    tables = [item.block_table_updates[0].block_ids for item in output.scheduled[1:]]
    assert tables[0] == tables[1]
    assert len(tables[0]) == 3
    driver.run()
    assert [request.output_token_ids for request in (leader, *siblings)] == [
        run_alone(request, 256) for request in (leader, *siblings)
    ]
    assert driver.all_blocks_are_home


def test_all_but_the_last_writer_copy_the_shared_block() -> None:
    config = make_config()
    events = EventLog()
    driver = Driver(config, Scheduler(config, events))
    driver.add(make_request("a", 10, 3, n=3))
    driver.step()
    driver.step()
    copies = driver.outputs[-1].transfers
    assert len(copies) == 2
    assert copies[0].source_ids == copies[1].source_ids
    assert len({copy.target_ids for copy in copies}) == 2
    assert [event.request_id for event in events.of(EventKind.COPY)] == ["a", "a.1"]
    driver.run()
    assert len(events.of(EventKind.COPY)) == 2


def test_full_blocks_are_shared_without_any_copy() -> None:
    driver = Driver(make_config())
    driver.add(make_request("a", 8, 3, n=4))
    driver.run()
    assert all(output.transfers == () for output in driver.outputs)


def test_leader_waits_until_all_its_siblings_may_run() -> None:
    driver = Driver(make_config(max_num_seqs=3, max_num_batched_tokens=6))
    driver.add(make_request("b", 4, 5), make_request("a", 8, 2, n=3), make_request("c", 4, 5))
    assert driver.shares() == {"b": 4}
    while driver.scheduler.get("b"):
        assert set(driver.shares()) == {"b"}
    assert driver.shares() == {"a": 6}
    # The places of the siblings are taken although they do not run yet.
    assert driver.shares() == {"a": 2, "a.1": 0, "a.2": 0}


def next_of(driver: Driver, request_id: str) -> int:
    """Step until the beam has sampled."""
    for _ in range(50):
        for update in driver.step():
            if update.request.request_id == request_id:
                return update.result.token_ids[0]
    raise AssertionError(f"{request_id} did not sample")


def test_beams_that_wait_for_tokens_give_way_to_beams_that_wait_for_blocks() -> None:
    # Each beam needs three of four blocks; all must sample before any gets its token.
    driver = Driver(make_config(num_blocks=5, enable_prefix_caching=False))
    beams = {name: make_beam(name, 12, 3) for name in "abc"}
    driver.add(*beams.values())
    for _ in range(2):
        sampled: dict[str, int | None] = dict.fromkeys(beams)
        for _ in range(20):
            for update in driver.step():
                assert sampled[update.request.request_id] is None
                sampled[update.request.request_id] = update.result.token_ids[0]
        for name, token_id in sampled.items():
            known = beams[name].prompt_token_ids + beams[name].output_token_ids
            assert token_id == token_after(chain_all(known), 0, VOCAB_SIZE)
            driver.scheduler.append_token(name, token_id)
            check_integrity(driver.scheduler)
    assert driver.scheduler.num_waiting > 0
    assert len(driver.scheduler.abort(beams)) == 3
    assert driver.all_blocks_are_home


def test_misuse_of_forks_is_named() -> None:
    driver = Driver(make_config())
    beam = make_beam("a", 6)
    driver.add(beam)
    with pytest.raises(EngineError, match="does not wait for a token"):
        driver.scheduler.append_token("a", 1)
    next_of(driver, "a")
    with pytest.raises(EngineError, match="'unknown': unknown"):
        driver.scheduler.fork("unknown", make_beam("b", 6))
    driver.scheduler.append_token("a", 1)
    driver.scheduler.schedule()
    with pytest.raises(EngineError, match="in flight"):
        driver.scheduler.fork("a", make_beam("b", beam.prompt_token_ids))


@pytest.mark.parametrize("prompt_len", [7, 8, 9, 10, 11])
def test_lookahead_blocks_are_not_shared(prompt_len: int) -> None:
    driver = Driver(make_config(multi_step_decode=12))
    driver.executor.num_iterations = lambda most: 1
    parent = make_request("parent", prompt_len, 20)
    driver.add(parent)
    for _ in range(3):
        driver.step()
    child = make_request("child", parent.prompt_token_ids, 20, seed=9)
    driver.scheduler.fork("parent", child)
    check_integrity(driver.scheduler)
    driver.run()
    assert parent.output_token_ids == run_alone(parent, 256)
    assert child.output_token_ids[:3] == parent.output_token_ids[:3]
    known = child.prompt_token_ids + child.output_token_ids
    for at in range(prompt_len + 3, len(known)):
        assert known[at] == token_after(chain_all(known[:at]), 9, VOCAB_SIZE)
    assert driver.all_blocks_are_home
