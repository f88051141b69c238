"""Admission: bounds of the queue, limits per key, deadlines; every place is given back."""

import asyncio
import contextlib
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.process.messages import RequestUpdate, Statistics
from quire.outputs import CompletionOutput
from quire.server.admission import Admission, Bucket
from quire.server.errors import ApiError
from quire.server.keys import KeyRing
from quire.server.options import ServerOptions
from quire.server.request_record import RequestRecord
from tests.scheduler.integrity import check_integrity
from tests.server.fake_engine import in_loop, record_of
from tests.server.served import CHAT, serving

ANONYMOUS = record_of()


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def make(
    *, max_num_seqs: int = 2, statistics: Statistics | None = None, **options: object
) -> tuple[Admission, SimpleNamespace, Clock]:
    """Admission in front of an engine that says what we want."""
    options_of_engines = SimpleNamespace(max_num_seqs=max_num_seqs)
    engines = SimpleNamespace(statistics=[statistics or Statistics()], options=options_of_engines)
    clock = Clock()
    return Admission(ServerOptions(**options), engines, clock), engines, clock


def refused(admission: Admission, record: RequestRecord = ANONYMOUS, tokens: int = 1, n: int = 1) -> ApiError:
    with pytest.raises(ApiError) as caught, admission.enter(record, tokens, n):
        pass
    return caught.value


def test_running_and_queued_requests_share_the_limit() -> None:
    admission, _, _ = make(max_num_seqs=2, max_queued_requests=3)
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(admission.enter(ANONYMOUS, 1, 1))
        error = refused(admission)
        assert (error.status, error.code) == (429, "queue_full")
        assert int(error.headers()["Retry-After"]) >= 1
        with pytest.raises(ApiError):
            admission.check_room(ANONYMOUS, 1)
    assert admission.num_requests == 0
    with admission.enter(ANONYMOUS, 1, 1):
        admission.check_room(ANONYMOUS, 1)


def test_refused_clients_get_the_time_of_the_work_left_and_increasing_times() -> None:
    statistics = Statistics(num_finished={"stop": 8, "length": 2}, busy_s=10.0)  # a second per completion
    admission, engines, clock = make(max_num_seqs=1, max_queued_requests=3)
    with admission.enter(ANONYMOUS, 1, 4):
        assert refused(admission).retry_after_s == 1, "nothing has finished"
        engines.statistics = [statistics]
        hints = [refused(admission).retry_after_s for _ in range(80)]
        assert hints[:3] == [4, 5, 6]
        assert hints[-1] == 60
        clock.now_s += 1000
        assert refused(admission).retry_after_s == 4


def test_n_completions_count_as_n() -> None:
    admission, _, _ = make(max_num_seqs=2, max_queued_requests=3)
    with admission.enter(ANONYMOUS, 1, 4):
        assert refused(admission, n=2).status == 429
        with admission.enter(ANONYMOUS, 1, 1):
            pass
    error = refused(admission, n=1_000_000)
    assert (error.status, error.param) == (400, "n"), "waiting would not help"


def test_queue_of_the_engine_leaves_no_room_to_run() -> None:
    admission, engines, _ = make(max_num_seqs=100, max_queued_requests=2)
    engines.statistics = [Statistics(num_running=1, num_waiting=2)]
    with admission.enter(ANONYMOUS, 1, 3):
        assert refused(admission).code == "queue_full"


def test_waiting_prompt_tokens_are_bounded() -> None:
    admission, engines, _ = make(max_num_seqs=100, max_queued_tokens=1000)
    with admission.enter(ANONYMOUS, 900, 1):
        assert refused(admission, tokens=101).code == "queue_full"
        engines.statistics = [Statistics(num_running=1, num_running_prompt_tokens=900)]
        with admission.enter(ANONYMOUS, 101, 1):
            assert refused(admission, tokens=900).code == "queue_full"


def test_single_long_prompt_may_exceed_the_bound_of_tokens() -> None:
    admission, _, _ = make(max_queued_tokens=10)
    with admission.enter(ANONYMOUS, 5000, 1):
        assert refused(admission).status == 429


def test_key_cannot_fill_the_queue_while_another_is_known() -> None:
    ann, bob = record_of("ann"), record_of("bob")
    admission, _, _ = make(max_num_seqs=2, max_queued_requests=10)
    with admission.enter(bob, 1, 1):
        pass
    with contextlib.ExitStack() as stack:
        for _ in range(9):
            stack.enter_context(admission.enter(ann, 1, 1))
        assert "this key" in refused(admission, ann).message
        with admission.enter(bob, 1, 3):
            pass


def test_requests_per_minute_are_per_key() -> None:
    ann, bob = record_of("ann"), record_of("bob")
    admission, _, clock = make(requests_per_minute=2)
    for _ in range(2):
        admission.begin(ann, is_queued=True)
    for _ in range(2):
        with pytest.raises(ApiError) as caught:
            admission.begin(ann, is_queued=False)
        error = caught.value
        assert (error.status, error.code, error.headers()) == (429, "rate_limit_exceeded", {"Retry-After": "30"})
    with admission.enter(ann, 1, 1):
        pass  # it has been counted
    admission.begin(bob, is_queued=True)
    clock.now_s += 30
    admission.begin(ann, is_queued=True)


def test_request_refused_by_a_full_queue_is_not_counted() -> None:
    admission, _, _ = make(max_num_seqs=1, max_queued_requests=1, requests_per_minute=1)
    with admission.enter(ANONYMOUS, 1, 2), pytest.raises(ApiError, match="busy"):
        admission.begin(ANONYMOUS, is_queued=True)
    admission.begin(ANONYMOUS, is_queued=True)


@in_loop
async def test_every_request_that_costs_work_counts_whatever_its_body_is() -> None:
    keys = KeyRing({"ann": "ann", "bob": "bob"})
    ann, bob = {"Authorization": "Bearer ann"}, {"Authorization": "Bearer bob"}
    async with serving(keys=keys, requests_per_minute=5) as served:
        assert (await served.answer("GET", "/v1/models", headers=ann)).status == 200
        assert (await served.answer("POST", "/health", body={})).status == 405
        for path, body, status in (
            (CHAT, {}, 400),
            ("/tokenize", b"{no JSON", 400),
            ("/detokenize", {"tokens": [97]}, 200),
            ("/v1/messages/count_tokens", {}, 400),
            ("/nowhere", {}, 404),
        ):
            assert (await served.answer("POST", path, headers=ann, body=body)).status == status
        for path in (CHAT, "/tokenize", "/nowhere"):
            # The body is neither complete nor JSON.
            answer = await served.answer("POST", path, headers={**ann, "Content-Length": "1000"}, body=b"{no")
            assert (answer.status, answer.code) == (429, "rate_limit_exceeded")
            assert int(answer.headers["retry-after"]) >= 1
        assert (await served.answer("GET", "/v1/models", headers=ann)).status == 200
        assert (await served.chat(headers=bob)).status == 200
        assert set(served.state.admission.rates._limits) == {"ann", "bob"}


@in_loop
async def test_computed_request_counts_once() -> None:
    async with serving(requests_per_minute=2) as served:
        assert [(await served.chat()).status for _ in range(3)] == [200, 200, 429]


def test_generated_tokens_count_towards_tokens_per_minute() -> None:
    admission, _, clock = make(tokens_per_minute=100)
    with admission.enter(ANONYMOUS, 40, 1) as place:
        place.note(RequestUpdate("a", [CompletionOutput(0, "", [1] * 50)]))
    assert refused(admission, tokens=11).code == "rate_limit_exceeded"
    with admission.enter(ANONYMOUS, 10, 1):
        pass
    clock.now_s += 12
    with admission.enter(ANONYMOUS, 20, 1):
        pass


@pytest.mark.parametrize("error", [ValueError, GeneratorExit, asyncio.CancelledError])
def test_place_is_given_back_after_any_exception(error: type[BaseException]) -> None:
    admission, _, _ = make()
    with pytest.raises(error), admission.enter(ANONYMOUS, 7, 2):
        raise error
    assert (admission.num_requests, admission._num_prompt_tokens) == (0, 0)


def slowly(step_s: float):
    """Return what makes a scripted engine's steps take this long."""
    return lambda step: time.sleep(step_s)


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_request_that_waits_too_long_is_answered_503(stream: bool) -> None:
    async with serving(scheduler={"max_num_seqs": 1}, queue_timeout_s=0.1) as served:
        served.executor.in_step = slowly(0.02)
        first = asyncio.create_task(served.chat(max_tokens=60, ignore_eos=True))
        while not served.executor.num_steps:
            await asyncio.sleep(0.005)
        answer = await served.chat(stream=stream)
        assert (answer.status, answer.code) == (503, "queue_timeout")
        served.executor.in_step = slowly(0)
        assert (await first).json["usage"]["completion_tokens"] == 60
        await served.until_idle()
        assert (await served.chat()).status == 200


@in_loop
async def test_request_over_its_deadline_frees_its_blocks() -> None:
    async with serving(request_timeout_s=0.2) as served:
        served.executor.in_step = slowly(0.02)
        answer, stream = await asyncio.gather(
            served.chat(max_tokens=100, ignore_eos=True), served.chat(max_tokens=100, ignore_eos=True, stream=True)
        )
        assert (answer.status, answer.code) == (504, "request_timeout")
        assert stream.status == 200
        assert b'"code":"request_timeout"' in stream.body
        await served.until_idle()
        check_integrity(served.supervisor.the_client.engine.scheduler)
        assert served.supervisor.the_client.engine.scheduler.num_running == 0


# --- Rate limits --------------------------------------------------------------------------------


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
