from hypothesis import given
from hypothesis import strategies as st

from quire.server.admission import Bucket


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_amount_above_the_capacity_waits_for_a_full_bucket() -> None:
    clock = Clock()
    bucket = Bucket(10, clock)
    assert bucket.wait_s(1000) == 0
    bucket.take(1000)
    assert bucket.wait_s(1) == 60 * 991 / 10


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 30)), max_size=100))
def test_no_minute_lets_more_through_than_two_buckets(uses: list[tuple[float, int]]) -> None:
    clock = Clock()
    bucket = Bucket(20, clock)
    taken: list[tuple[float, int]] = []
    for pause_s, amount in uses:
        clock.now_s += pause_s
        if bucket.wait_s(amount) == 0 and amount <= 20:
            bucket.take(amount)
            taken.append((clock.now_s, amount))
    for start_s, _ in taken:
        assert sum(amount for at_s, amount in taken if start_s <= at_s < start_s + 60) <= 40
