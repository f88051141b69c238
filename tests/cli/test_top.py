"""`quire top` against a server whose numbers are known."""

import itertools
from typing import Any

import pytest

from quire.cli import top
from quire.cli.main import cli
from quire.cli.top import summary, view_lines
from quire.cli.top_metrics import Load, Metrics, load_between
from tests.cli.command_line import Terminal, call, parsed
from tests.cli.metrics_page import page
from tests.cli.stub_server import Answer, Handler, stub_server


def serving_pages(pages: Any) -> Answer:
    pages = iter(pages)

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        text = next(pages, None)
        if text is None:
            return handler.send_json(503, {"error": {"message": "over", "code": "draining"}})
        data = text.encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)
        return None

    return answer


def load() -> Load:
    after = page(tokens=50, requests=4, hits=3, queries=4, running=2, waiting=1, kv=0.5)
    return load_between(Metrics(page(), 0.0), Metrics(after, 2.0))


def test_once_as_json() -> None:
    with stub_server(serving_pages([page(tokens=10), page(tokens=30, running=2)])) as server:
        value = parsed(call("top", "--url", server.url, "--once", "--json", "--interval-s", "0.1"))
        assert [path for path, _, _ in server.requests] == ["/metrics"] * 2
    assert (value["schema"], value["model"], value["running"]) == ("quire.top/1", 'ti"ny', 2)
    assert value["generation_tokens_per_s"] == pytest.approx(20 / value["seconds"])
    assert 0.1 <= value["seconds"] < 30


def test_once_for_people() -> None:
    with stub_server(serving_pages([page(), page(kv=0.25)])) as server:
        result = call("top", "--url", server.url, "--once", "--interval-s", "0.05")
    assert result.exit_code == 0
    assert "KV cache    ▓▓▓▓▓░░░░░░░░░░░░░░░ 25%" in result.stdout


def test_without_a_terminal_it_writes_lines_until_the_server_ends() -> None:
    with stub_server(serving_pages([page()] * 4)) as server:
        result = call("top", "--url", server.url, "--interval-s", "0.05")
    assert result.exit_code == 5
    assert result.stdout == "0.0 tok/s · 0 running · 0 waiting · KV 0% · hit – · TTFT – · ITL –\n" * 3
    assert "error[draining]" in result.stderr


def test_the_view() -> None:
    assert view_lines(load(), "http://x") == [
        'ti"ny at http://x',
        "requests    2 running · 1 waiting · 2.0/s ended",
        "generation  25.0 tok/s",
        "prompts     50.0 tok/s · cache hit 75%",
        "KV cache    ▓▓▓▓▓▓▓▓▓▓░░░░░░░░░░ 50%",
        "TTFT        p50 50 ms · p95 95 ms",
        "ITL         p50 – · p95 –",
    ]
    assert summary(load()).startswith("25.0 tok/s · 2 running · 1 waiting · KV 50% · hit 75% · TTFT 50 ms")


def test_on_a_terminal_the_view_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(top.sys, "stdout", terminal)
    pages = itertools.chain([page(), page(tokens=7)], itertools.repeat(page(tokens=7), 2))
    with stub_server(serving_pages(pages)) as server, pytest.raises(SystemExit) as ended:
        cli.main(["top", "--url", server.url, "--interval-s", "0.05"])
    assert ended.value.code == 5
    assert terminal.getvalue().count("requests    0 running") >= 3
    assert "\x1b[" in terminal.getvalue()


def test_another_server_is_no_quire() -> None:
    with stub_server(serving_pages(["up 1\n"])) as server:
        result = call("top", "--url", server.url)
    assert result.exit_code == 5
    assert "has none of Quire's metrics" in result.stderr
