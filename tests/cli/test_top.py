"""`quire top` and `quire ps` against a server whose metrics are known; reading its page."""

from typing import Any

import pytest

from quire.cli.top import MetricsPage, load_between, summary, view_lines
from quire.server.registration import registered
from tests.cli.command_line import call, parsed
from tests.cli.stub_server import Answer, Handler, stub_server


def page(*, tokens: int = 0, requests: int = 0, hits: int = 0, queries: int = 0, slow: int = 0, **gauges: Any) -> str:
    """`requests` had their first token within 0.1 s, but `slow` of them between 0.1 and 0.5 s."""
    fast = requests - slow
    lines = [
        "# HELP quire_build_info Version and model",
        'quire_build_info{model="ti\\"ny",scheduling_policy="fair",version="0.1"} 1.0',
        f"quire_requests_running {gauges.get('running', 0)}",
        f"quire_requests_waiting {gauges.get('waiting', 0)}",
        f"quire_kv_usage_ratio {gauges.get('kv', 0.0)}",
        f"quire_generation_tokens_total {tokens}",
        f"quire_prompt_tokens_total {2 * tokens}",
        f'quire_requests_total{{finish_reason="stop"}} {fast}',
        f'quire_requests_total{{finish_reason="length"}} {slow}',
        f"quire_prefix_cache_queries_total {queries}",
        f"quire_prefix_cache_hits_total {hits}",
        f'quire_time_to_first_token_seconds_bucket{{le="0.1"}} {fast}',
        f'quire_time_to_first_token_seconds_bucket{{le="0.5"}} {requests}',
        f'quire_time_to_first_token_seconds_bucket{{le="+Inf"}} {requests}',
        f"quire_preemptions_total {gauges.get('preemptions', 0)}",
        f"quire_engine_deaths_total {gauges.get('deaths', 0)}",
    ]
    return "\n".join(lines) + "\n"


def send_text(handler: Handler, text: str) -> None:
    data = text.encode()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def serving_pages(pages: Any) -> Answer:
    pages = iter(pages)

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        text = next(pages, None)
        if text is None:
            return handler.send_json(503, {"error": {"message": "over", "code": "draining"}})
        send_text(handler, text)
        return None

    return answer


def test_lines_are_written_without_a_terminal() -> None:
    with stub_server(serving_pages([page()] * 4)) as server:
        result = call("top", "--url", server.url, "--interval-s", "0.05")
    assert result.exit_code == 5
    assert (
        result.stdout
        == "0.0 tok/s · 0 running · 0 waiting · KV 0% · hit – · TTFT – · ITL – · 0 preemptions · 0 engine deaths\n" * 3
    )
    assert "error[draining]" in result.stderr


@pytest.mark.parametrize("text", ["up 1\n", "broken{"])
def test_page_of_another_server_is_an_error(text: str) -> None:
    with stub_server(serving_pages([text])) as server:
        result = call("top", "--url", server.url)
    assert result.exit_code == 5
    assert "has none of Quire's metrics" in result.stderr


def test_registered_server_is_watched_without_an_address() -> None:
    with stub_server(serving_pages([page(), page(kv=0.25)])) as server, registered(server.url, "tiny"):
        result = call("top", "--once", "--interval-s", "0.05")
    assert result.exit_code == 0
    assert "KV cache    ▓▓▓▓▓░░░░░░░░░░░░░░░ 25%" in result.stdout
    assert f"at {server.url}" in result.stdout


def test_view_of_an_interval() -> None:
    before = page(tokens=100, requests=4, hits=10, queries=20, preemptions=1)
    gauges = {"running": 2, "waiting": 1, "kv": 0.5, "preemptions": 3, "deaths": 1}
    after = page(tokens=150, requests=14, slow=5, hits=25, queries=40, **gauges)
    load = load_between(MetricsPage(before, 10.0), MetricsPage(after, 12.0))
    assert (load.seconds, load.requests_per_s, load.cache_hit_ratio, load.itl_p50_s) == (2.0, 5.0, 0.75, None)
    assert (load.ttft_p50_s, load.ttft_p95_s) == (pytest.approx(0.1), pytest.approx(0.1 + 0.4 * 0.9))
    assert view_lines(load, "http://x") == [
        'ti"ny at http://x',
        "requests    2 running · 1 waiting (fair) · 5.0/s ended",
        "generation  25.0 tok/s",
        "prompts     50.0 tok/s · cache hit 75%",
        "KV cache    ▓▓▓▓▓▓▓▓▓▓░░░░░░░░░░ 50% · 2 preemptions",
        "TTFT        p50 100 ms · p95 460 ms",
        "ITL         p50 – · p95 –",
        "engine      1 deaths since the server's start",
    ]
    assert summary(load).startswith("25.0 tok/s · 2 running · 1 waiting · KV 50% · hit 75% · TTFT 100 ms")


def test_view_tells_how_much_of_the_weights_is_in_memory_and_read() -> None:
    gauges = ("quire_weights_mapped_bytes 12000000000.0", "quire_weights_resident_bytes 6000000000.0",
              "quire_weights_limit_bytes 8000000000.0")  # fmt: skip
    counters = [
        "\n".join((*gauges, f"quire_weights_read_bytes_total {read}", f"quire_experts_chosen_bytes_total {chosen}\n"))
        for read, chosen in ((5e9, 2e9), (6e9, 6e9))
    ]
    load = load_between(
        *(MetricsPage(page() + text, time_s) for text, time_s in zip(counters, (10.0, 12.0), strict=True))
    )
    shown = "11.2 GiB on disk · 5.59 GiB of at most 7.45 GiB in memory · 25% of the experts used read from disk"
    assert f"weights     {shown}" in view_lines(load, "http://x")
    assert summary(load).endswith(f" · weights {shown}")
    without = load_between(MetricsPage(page(), 10.0), MetricsPage(page(), 12.0))
    assert "weights" not in "".join((*view_lines(without, "http://x"), summary(without)))


def test_view_tells_where_prefixes_broke_and_what_that_cost() -> None:
    broken = "quire_prefix_breaks_total 3.0\nquire_prefix_break_tokens_total 24000.0\nquire_prefix_last_break 14.0\n"
    load = load_between(MetricsPage(page(), 10.0), MetricsPage(page() + broken, 12.0))
    assert (load.prefix_breaks, load.prefix_break_tokens, load.last_prefix_break) == (3, 24000, 14)
    assert "prefixes    3 broken, the last at token 14; 24000 tokens computed again" in view_lines(load, "http://x")
    assert summary(load).endswith(" · prefixes 3 broken, the last at token 14; 24000 tokens computed again")
    without = load_between(MetricsPage(page(), 10.0), MetricsPage(page() + "quire_prefix_breaks_total 0.0\n", 12.0))
    assert without.last_prefix_break is None
    assert "prefixes" not in "".join((*view_lines(without, "http://x"), summary(without)))


def test_view_tells_which_drafts_were_right_and_what_they_gained() -> None:
    counted = "quire_draft_tokens_total 40.0\nquire_accepted_tokens_total 25.0\n"
    load = load_between(MetricsPage(page(tokens=100), 10.0), MetricsPage(page(tokens=150) + counted, 12.0))
    assert (load.drafts_per_s, load.draft_accept_ratio, load.draft_gain) == (20.0, 0.625, 2.0)
    assert "drafts      20.0 tok/s verified · 62% right · tokens × 2.00" in view_lines(load, "http://x")
    assert summary(load).endswith(" · drafts 20.0 tok/s verified · 62% right · tokens × 2.00")
    without = load_between(MetricsPage(page(), 10.0), MetricsPage(page(), 12.0))
    assert "drafts" not in "".join((*view_lines(without, "http://x"), summary(without)))


def engines_page(*engines: dict[str, int]) -> str:
    """Counters and gauges of each engine."""
    lines = ['quire_build_info{version="1",model="tiny"} 1']
    for rank, values in enumerate(engines):
        lines += [f'quire_{name}{{engine="{rank}"}} {value}' for name, value in values.items()]
    return "\n".join(lines) + "\n"


def test_view_of_several_engines_has_the_sums_and_each_of_them() -> None:
    idle = {"engine_up": 1, "requests_running": 0, "kv_usage_ratio": 0, "generation_tokens_total": 100}
    busy = {"engine_up": 1, "requests_running": 2, "kv_usage_ratio": 1, "generation_tokens_total": 140}
    again = {**busy, "generation_tokens_total": 20}  # another process, which counts from 0
    before, after = engines_page(idle, idle), engines_page(again, busy)
    with stub_server(serving_pages([before, after] * 3)) as server:
        value = parsed(call("top", "--url", server.url, "--once", "--interval-s", "0.05", "--json"))
        title, *rows = call("top", "--url", server.url, "--once", "--interval-s", "0.05").stdout.splitlines()
    assert value["schema"] == "quire.top/1"
    assert (value["running"], value["kv_usage_ratio"]) == (4, 1)
    first, second = value["engines"]
    assert (first["running"], second["running"]) == (2, 2)
    assert second["generation_tokens_per_s"] == 2 * first["generation_tokens_per_s"] > 0
    assert value["generation_tokens_per_s"] == pytest.approx(3 * first["generation_tokens_per_s"])
    assert title == f"tiny at {server.url}"
    assert [row.split()[:2] for row in rows[-2:]] == [["engine", "0"], ["engine", "1"]]
    assert "2 running" in rows[-1]
