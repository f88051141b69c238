"""`quire bench serve` against a stub server."""

import asyncio
import json
from functools import partial
from typing import Any

import pytest

from tests.cli.command_line import call, parsed
from tests.cli.stub_server import Handler, chunks, stub_server

serving = partial(stub_server, models=("tiny",))


def answer(handler: Handler, body: dict[str, Any]) -> None:
    handler.send_events(chunks("a", "b", "c"), gap_s=0.002)


def test_prompts_differ_and_have_the_asked_length() -> None:
    with serving(answer) as server:
        call("bench", "serve", "--url", server.url, "-c", "2", "--requests", "6", "--prompt", "5", "--model", "m")
    bodies = [body for _, _, body in server.requests]
    assert len(bodies) == 7  # one warms up
    assert len({json.dumps(body) for body in bodies}) == 7
    for body in bodies:
        assert (body["model"], body["stream"], body["max_tokens"], body["ignore_eos"]) == ("m", True, 128, True)
        assert len(body["messages"][0]["content"].split()) == 6


def test_json_has_every_figure() -> None:
    with serving(answer) as server:
        result = call("bench", "serve", "--url", server.url, "--rate", "500", "--requests", "10", "--json")
    value = parsed(result)
    assert value["schema"] == "quire.bench-serve/1"
    (row,) = value["rows"]
    assert (row["rate"], row["num_answers"], row["num_failed"], row["prompt_tokens"]) == (500, 10, 0, 7)
    assert row["tokens_per_s"] == pytest.approx(30 / row["duration_s"])
    for metric in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert 0 < row[metric]["p50"] <= row[metric]["p95"] <= row[metric]["p99"]


def test_slow_or_refused_answers_exceed_the_limit_and_exit_6() -> None:
    num_asked = 0

    def sometimes(handler: Handler, body: dict[str, Any]) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked % 2:
            handler.send_events(chunks("a"))
        else:
            handler.send_json(429, {"error": {"message": "full"}})

    for limit, code in (("e2e_p50<60s", 0), ("e2e_p50<0.001ms", 6)):
        with serving(answer) as server:
            result = call("bench", "serve", "--url", server.url, "-c", "1", "--requests", "2", "--slo", limit)
        assert result.exit_code == code
    with serving(sometimes) as server:
        arguments = ("--url", server.url, "-c", "1", "--requests", "4", "--slo", "ttft_p50<60s", "--json")
        result = call("bench", "serve", *arguments)
    assert result.exit_code == 6
    (row,) = parsed(result)["rows"]
    assert (row["num_answers"], row["num_failed"], row["holds_slo"]) == (2, 2, False)
    assert list(row["errors"].values()) == [2]


def test_sweep_finds_the_highest_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr("quire_workshop.load_client.asyncio.sleep", lambda seconds: sleep(0))  # 16 s at the lowest rate
    with serving(answer) as server:
        arguments = ("--url", server.url, "--sweep", "--slo", "ttft_p50<0.000001ms", "--requests", "2", "--json")
        result = call("bench", "serve", *arguments)
    value = parsed(result)
    assert value["highest_rate"] == 0
    assert {row["rate"] for row in value["rows"]} == {1, 0.5, 0.25, 0.125, 0.0625}


def test_server_without_text_is_an_error() -> None:
    with serving(lambda handler, body: handler.send_events(chunks())) as server:
        result = call("bench", "serve", "--url", server.url)
    assert (result.exit_code, "it sent no text" in result.stderr) == (5, True)
