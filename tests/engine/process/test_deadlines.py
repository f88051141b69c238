from quire.engine.process.deadlines import QueueDeadlines


def test_what_was_scheduled_does_not_expire() -> None:
    deadlines = QueueDeadlines()
    for number in range(5):
        deadlines.add(f"r{number}", 10.0 + number)
    deadlines.forget(["r1", "unknown"])
    assert deadlines.expired(9.9) == []
    assert deadlines.expired(12.0) == ["r0", "r2"]
    assert deadlines.expired(12.0) == []
    assert deadlines.expired(100.0) == ["r3", "r4"]
    assert len(deadlines) == 0


def test_the_order_of_deadlines_does_not_matter() -> None:
    deadlines = QueueDeadlines()
    deadlines.add("late", 50.0)
    deadlines.add("early", 5.0)
    assert deadlines.expired(6.0) == ["early"]
    assert deadlines.expired(49.0) == []
    assert deadlines.expired(50.0) == ["late"]
