"""The client of the load tests: what it sees of good answers, bad ones and none, and how it misbehaves."""

import asyncio
import time
from typing import Any

import pytest

from benchmarks.soak.client import Manners, Seen, ask, chat_body, get
from tests.cli.stub_server import Answer, Handler, chunks, stub_server


def seen_of(answer: Answer, manners: Manners = Manners()) -> Seen:  # noqa: B008
    with stub_server(answer) as server:
        return asyncio.run(ask(server.url, chat_body("hi", 3), manners))


@pytest.mark.parametrize("cut", [0, 1, 50])
def test_a_stream(cut: int) -> None:
    seen = seen_of(lambda handler, body: handler.send_events(chunks("a", "b", "c"), cut=cut))
    assert (seen.is_good, seen.status, seen.text, seen.num_tokens) == (True, 200, "abc", 3)
    assert len(seen.piece_times) == 3
    assert len(seen.gaps_s) == 2
    assert seen.started_s <= seen.piece_times[0] <= seen.ended_s


def test_a_whole_answer() -> None:
    value = {"choices": [{"message": {"content": "abc"}}], "usage": {"completion_tokens": 3}}
    seen = seen_of(lambda handler, body: handler.send_json(200, value))
    assert (seen.is_good, seen.text, seen.num_tokens) == (True, "abc", 3)


def test_a_refusal() -> None:
    error = {"error": {"message": "busy", "code": "queue_full"}}
    seen = seen_of(lambda handler, body: handler.send_json(429, error, Retry_After="3"))
    assert (seen.is_good, seen.status, seen.error, seen.retry_after_s) == (False, 429, "queue_full", 3.0)


def test_an_error_within_a_stream() -> None:
    events = [*chunks("a")[:2], {"error": {"code": "engine_dead"}}, "[DONE]"]
    seen = seen_of(lambda handler, body: handler.send_events(events))
    assert (seen.is_good, seen.is_complete, seen.text, seen.error) == (False, True, "a", "engine_dead")


def cut_off(handler: Handler, body: dict[str, Any]) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b"{}")
    handler.close_connection = True


def test_an_answer_that_is_cut_off_and_none_at_all() -> None:
    seen = seen_of(cut_off)
    assert (seen.is_good, seen.error) == (False, "the answer was cut off")
    with stub_server(cut_off) as server:
        url = server.url
    gone = asyncio.run(get(url, "/"))
    assert gone.status == 0
    assert (gone.error or "").startswith("connect")


@pytest.mark.parametrize("manners", [Manners(hang_up_after_s=0.1), Manners(hang_up_after_received=300, resets=True)])
def test_leaving_early(manners: Manners) -> None:
    started_s = time.perf_counter()
    seen = seen_of(lambda handler, body: handler.send_events(chunks(*["a"] * 1000), gap_s=0.01), manners)
    assert seen.hung_up
    assert not seen.is_good
    assert seen.error is None
    assert time.perf_counter() - started_s < 9
    assert manners.hang_up_after_received in (None, seen.num_bytes)


def test_half_a_request() -> None:
    asked = []
    seen = seen_of(lambda handler, body: asked.append(body), Manners(hang_up_after_sent=40))
    assert (seen.hung_up, seen.num_bytes, asked) == (True, 0, [])


def test_reading_slowly() -> None:
    manners = Manners(bytes_per_s=100, receive_buffer_bytes=2048)
    started_s = time.perf_counter()
    seen = seen_of(lambda handler, body: handler.send_json(200, {"text": "a" * 100}), manners)
    assert seen.is_good
    assert time.perf_counter() - started_s >= 2
