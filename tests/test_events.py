from itertools import count

from quire.events import Event, EventKind, EventLog


def ticking_log(max_events: int = 100) -> EventLog:
    ticks = count()
    return EventLog(max_events, clock=lambda: float(next(ticks)))


def test_events_come_back_as_recorded_in_order() -> None:
    log = ticking_log()
    log.record(EventKind.ADMIT, "a", num_prompt_tokens=5, num_cached_tokens=0)
    log.record(EventKind.EVICT, block_id=3)
    assert list(log) == [
        Event(0.0, EventKind.ADMIT, "a", {"num_prompt_tokens": 5, "num_cached_tokens": 0}),
        Event(1.0, EventKind.EVICT, "", {"block_id": 3}),
    ]


def test_log_is_bounded_and_counts_what_fell_out() -> None:
    log = ticking_log(max_events=10)
    for number in range(25):
        log.record(EventKind.EVICT, block_id=number)
    assert len(log) == 10
    assert log.num_recorded == 25
    assert [event.data["block_id"] for event in log] == list(range(15, 25))


def test_reader_gets_what_is_new_and_what_is_lost_is_known() -> None:
    log = ticking_log(max_events=3)
    assert log.since(0) == []
    for number in range(2):
        log.record(EventKind.EVICT, block_id=number)
    assert [event.data["block_id"] for event in log.since(0)] == [0, 1]
    assert [event.data["block_id"] for event in log.since(1)] == [1]
    assert log.since(2) == []
    for number in range(2, 9):
        log.record(EventKind.EVICT, block_id=number)
    assert [event.data["block_id"] for event in log.since(2)] == [6, 7, 8]


def test_recording_while_reading_does_not_disturb_the_reader() -> None:
    log = ticking_log(max_events=4)
    for number in range(4):
        log.record(EventKind.EVICT, block_id=number)
    seen = []
    for event in log:
        log.record(EventKind.FINISH, "x")
        seen.append(event.data.get("block_id"))
    assert seen == [0, 1, 2, 3]
