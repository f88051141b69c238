"""`--scheduling-policy fair`: tokens are shared among clients, with the scheduler alone."""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable

import pytest

from quire.scheduler.request import MAX_IDLE_CLIENTS, FairQueue, Request
from tests.scheduler.builders import Driver, make_config, make_request


def fair(**changes: object) -> Driver:
    return Driver(make_config(policy="fair", **{"max_num_seqs": 2, "enable_prefix_caching": False, **changes}))


def of(client_id: str, number: int, prompt: int = 8, max_tokens: int = 4) -> Request:
    params = {"ignore_eos": True}
    return make_request(f"{client_id}{number}", prompt, max_tokens, params=params, client_id=client_id)


def tokens_while_all_wait(driver: Driver, requests: list[Request], num_steps: int) -> Counter[str]:
    """Return the computed and generated tokens of each client in the steps before some client has none waiting."""
    driver.add(*requests)
    by_id = {request.request_id: request for request in requests}
    clients = {request.spec.client_id for request in requests}
    for _ in range(num_steps):
        if {request.spec.client_id for request in driver.scheduler.requests.waiting} != clients:
            break
        driver.step()
    taken: Counter[str] = Counter()
    for request in by_id.values():
        taken[request.spec.client_id] += request.num_computed_tokens
    return taken


@pytest.mark.parametrize("places", [1, 3, 8])
def test_clients_that_wait_get_equal_tokens_whatever_number_of_requests_they_have(places: int) -> None:
    driver = fair(max_num_seqs=places)
    many = [of("many", number) for number in range(100)]
    few = [of("few", number, prompt=20, max_tokens=10) for number in range(30)]
    taken = tokens_while_all_wait(driver, many + few, 2000)
    # Up to the requests that run at the end: they are charged for prompts that they have not computed yet.
    assert abs(taken["many"] - taken["few"]) <= (30 + 12) * places + 30
    assert min(taken.values()) > 500
    driver.run(3000)


def test_one_running_request_gets_a_token_in_each_step_beside_fifty_of_another_client() -> None:
    driver = fair(max_num_seqs=51, num_blocks=1001)
    driver.add(*[of("many", number, max_tokens=60) for number in range(50)], of("few", 0, max_tokens=60))
    while len(driver.scheduler.requests.running) < 51:
        driver.step()
    for _ in range(20):
        driver.step()
        assert [item.num_tokens for item in driver.outputs[-1].scheduled] == [1] * 51


@pytest.mark.parametrize("partial", [1, 4])
def test_long_prompts_of_one_client_take_no_more_steps_than_those_of_another(partial: int) -> None:
    """Each prompt takes several steps, and `partial` ones are computed at once."""
    driver = fair(max_num_seqs=6, max_num_partial_prefills=partial, num_blocks=1001)
    many = [of("many", number, prompt=200, max_tokens=2) for number in range(60)]
    few = [of("few", number, prompt=200, max_tokens=2) for number in range(30)]
    taken = tokens_while_all_wait(driver, many + few, 2000)
    assert abs(taken["many"] - taken["few"]) <= 202 * 6
    assert min(taken.values()) > 3000


def test_fcfs_gives_the_tokens_to_the_client_that_came_first() -> None:
    driver = Driver(make_config(max_num_seqs=2, enable_prefix_caching=False))
    taken = tokens_while_all_wait(driver, [of("many", n) for n in range(100)] + [of("few", n) for n in range(20)], 100)
    assert taken["few"] == 0


def test_one_request_of_a_new_client_overtakes_the_queue_of_another() -> None:
    driver = fair()
    driver.add(*[of("many", number) for number in range(100)])
    for _ in range(40):
        driver.step()
    driver.add(of("one", 0))
    num_admitted = len(announced(driver))
    while driver.scheduler.get("one0"):
        driver.step()
    assert announced(driver)[num_admitted] == "one0"


def announced(driver: Driver) -> list[str]:
    return [new.request_id for output in driver.outputs for new in output.new_requests]


def test_client_does_not_save_up_tokens_while_it_is_idle() -> None:
    driver = fair(max_num_seqs=1)
    driver.add(of("idle", 0))
    driver.add(*[of("busy", number) for number in range(60)])
    for _ in range(100):
        driver.step()
    before = len(announced(driver))
    driver.add(*[of("idle", number) for number in range(1, 11)])
    for _ in range(60):
        driver.step()
    after = announced(driver)[before : before + 10]
    assert {"idle", "busy"} == {name.rstrip("0123456789") for name in after}
    for first, second in itertools.pairwise(after):
        assert first.rstrip("0123456789") != second.rstrip("0123456789"), "they take turns, with requests of one size"


def test_client_that_is_away_for_a_moment_keeps_what_it_was_given() -> None:
    driver = fair(max_num_seqs=1)
    driver.add(of("big", 0, prompt=200, max_tokens=20))
    driver.add(*[of("small", number) for number in range(40)])
    while driver.scheduler.get("big0"):
        driver.step()
    driver.add(of("big", 1))
    driver.run()
    order = announced(driver)
    # 220 tokens are those of 18 requests of 12 tokens.
    assert 15 <= order.index("big1") - order.index("big0") <= 20


def test_requests_of_one_client_come_in_the_order_of_arrival() -> None:
    driver = fair(max_num_seqs=1)
    driver.add(*[of("a", number) for number in range(5)])
    driver.run()
    assert announced(driver) == ["a0", "a1", "a2", "a3", "a4"]


def test_preempted_request_returns_first_of_its_client_and_is_not_charged_twice() -> None:
    driver = fair(max_num_seqs=4, num_blocks=13, max_model_len=40)
    requests = [of(client, number, prompt=8, max_tokens=20) for number in range(3) for client in "ab"]
    driver.add(*requests)
    driver.run(2000)
    assert any(request.num_preemptions for request in requests)
    assert driver.all_blocks_are_home
    # Equal clients stay equal, although one of them was preempted more often.
    queue = driver.scheduler.requests.waiting
    assert isinstance(queue, FairQueue)
    assert not queue._num_tokens


def test_abort_of_waiting_and_running_requests_leaves_nothing_behind() -> None:
    driver = fair()
    driver.add(*[of(client, number) for client in "abc" for number in range(4)])
    driver.step()
    driver.scheduler.abort([f"{client}{number}" for client in "abc" for number in range(4)])
    queue = driver.scheduler.requests.waiting
    assert isinstance(queue, FairQueue)
    assert not any((queue._num_tokens, queue._heap, queue._listed, queue._queues, queue._num_unfinished))
    driver.add(of("a", 9))
    driver.run()


def test_tokens_of_clients_without_requests_are_bounded() -> None:
    queue = FairQueue()
    stays = of("stays", 0)
    queue.arrive(stays)
    for number in range(3 * MAX_IDLE_CLIENTS):
        request = of(f"client {number}", 0)
        queue.arrive(request)
        queue.charge(request, 10)
        queue.depart(request)
    assert len(queue._num_tokens) <= MAX_IDLE_CLIENTS + 2
    assert "stays" in queue._num_tokens


def test_steps_of_admission_do_not_grow_with_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the queue corrects the place of few clients, of a thousand that wait."""
    moves = 0

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            nonlocal moves
            moves += 1
            return function(*arguments)

        return call

    queue = FairQueue()
    for client in range(1000):
        for number in range(2):
            request = of(f"c{client}-", number)
            request.serial = request.sort_key = (client, number)
            queue.arrive(request)
            queue.push(request)
    monkeypatch.setattr(heapq, "heapreplace", counted(heapq.heapreplace))
    monkeypatch.setattr(heapq, "heappop", counted(heapq.heappop))
    for _ in range(2000):
        request = queue.first()
        assert queue.remove(request)
        queue.charge(request, 12)
    assert not queue
    assert moves <= 2 * 2000


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "fair"])
def test_request_of_the_latest_deadline_is_preempted(policy: str) -> None:
    """All have the same time: the last arrival ends last, though it was admitted first (it is the shortest)."""
    driver = Driver(make_config(policy=policy, num_blocks=11, max_num_seqs=3, enable_prefix_caching=False))
    late = make_request("late", 4, 30, arrival_time_s=2.0, params={"ignore_eos": True})
    early = make_request("early", 12, 24, arrival_time_s=1.0, params={"ignore_eos": True})
    driver.add(*([early, late] if policy != "sjf" else [late, early]))
    driver.run()
    assert (late.num_preemptions > 0, early.num_preemptions) == (True, 0)
