import math
import threading
import time
from typing import Any

import pytest

from quire.cli.load_client import Answer, Endpoint
from quire.cli.load_run import Load, LoadResult, highest_rate, percentile, put_load
from tests.cli.stub_server import Handler, chunks, stub_server


def bodies(count: int) -> list[dict[str, Any]]:
    return [{"index": index} for index in range(count)]


def test_a_closed_loop_keeps_so_many_clients_busy_and_sends_each_body_once() -> None:
    lock, running, most = threading.Lock(), 0, 0

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        handler.send_events(chunks("a", "b"))

    with stub_server(answer) as server:
        result = put_load(Endpoint.parse(server.url, "/v1/chat/completions"), Load(concurrency=4), bodies(12))
    assert most == 4
    assert sorted(body["index"] for _, _, body in server.requests) == list(range(12))
    assert len(result.good) == 12
    assert result.tokens_per_s == pytest.approx(24 / result.duration_s)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    release = threading.Event()
    arrived = threading.Semaphore(0)

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        arrived.release()
        release.wait(30)
        handler.send_events(chunks("a"))

    def let_go() -> None:
        for _ in range(5):
            arrived.acquire(timeout=30)
        release.set()

    with stub_server(answer) as server:
        threading.Thread(target=let_go).start()
        result = put_load(Endpoint.parse(server.url, "/v1/chat/completions"), Load(rate=200), bodies(5))
    assert len(result.good) == 5


def test_the_gaps_come_from_the_seed() -> None:
    with stub_server(lambda handler, body: handler.send_events(chunks("a"))) as server:
        endpoint = Endpoint.parse(server.url, "/v1/chat/completions")
        starts = []
        for _ in range(2):
            result = put_load(endpoint, Load(rate=20), bodies(6), seed=3)
            times = sorted(answer.started_s for answer in result.answers)
            starts.append([later - times[0] for later in times])
    # A busy machine may be late, never early: the same gaps within a few of their mean of 50 ms.
    assert starts[0] == pytest.approx(starts[1], abs=0.2)
    assert starts[0][-1] > 0.02


def result_of(*answers: Answer) -> LoadResult:
    return LoadResult(Load(concurrency=1), answers, 2.0)


def test_what_clients_saw() -> None:
    first = Answer(0.0, 200, [0.1, 0.2, 0.4], 0.5, num_tokens=3)
    second = Answer(1.0, 200, [1.3], 1.4, num_tokens=1)
    failed = Answer(2.0, error="full")
    result = result_of(first, second, failed)
    assert result.good == [first, second]
    assert result.tokens_per_s == 2.0
    assert result.values_ms("ttft") == pytest.approx([100, 300])
    assert result.values_ms("itl") == pytest.approx([100, 200])
    assert result.values_ms("e2e") == pytest.approx([500, 400])
    assert math.isnan(result_of(failed).percentile_ms("ttft", 50))


@pytest.mark.parametrize(("percent", "expected"), [(1, 1), (50, 5), (90, 9), (91, 10), (99, 10)])
def test_percentiles_are_values_that_occurred(percent: int, expected: float) -> None:
    assert percentile([7, 1, 2, 10, 9, 8, 3, 4, 5, 6], percent) == expected


@pytest.mark.parametrize("capacity", [0.2, 1.0, 5.5, 37.0])
def test_the_highest_rate_is_found_from_below(capacity: float) -> None:
    found = highest_rate(lambda rate: rate <= capacity, 1.0)
    assert found <= capacity < found * 1.2


def test_no_rate_holds() -> None:
    assert highest_rate(lambda rate: False, 1.0) == 0.0
