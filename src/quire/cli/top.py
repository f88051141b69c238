"""`quire top`: tokens per second, requests and latency of a server, every second, from its `/metrics`.

On a terminal one view that is redrawn, elsewhere one line per interval. Next to read: `top_metrics.py`.
"""

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

import click

from quire.byte_sizes import format_bytes
from quire.cli.command import option, output_of, verb
from quire.cli.output import Output, format_seconds, is_capable_terminal
from quire.cli.server_client import ServerAnswerError, ServerClient, find_url, url_option
from quire.cli.top_metrics import MetricsPage, ServerLoad, engines_between, load_between
from quire.cli.typed_keys import END, ReadKey, typed_keys
from quire.errors import escaped

EXAMPLES = ("quire top", "quire top --url http://127.0.0.1:8000 --once --json")
BAR_CELLS = 20
NOTHING = "–"
CLEAR = "\x1b[H\x1b[2J"
"""Escape sequences: the cursor to the first line, clear the screen."""


@verb("top", EXAMPLES)
@url_option
@option(
    "--interval-s", type=click.FloatRange(0.05, 3600), default=1.0, metavar="S", help="time between two readings  [1]"
)
@option("--once", is_flag=True, help="show one interval, then end")
def top_command(url: str | None, interval_s: float, once: bool) -> None:
    """Watch a server: tokens per second, requests, KV cache, cache hits, latency, preemptions, engine deaths.

    Prompts that break the prefix of an earlier one are counted since the server's start, with the token of the last.
    Of several engines it shows the sums, and then each of them.
    Each view compares two readings of /metrics; "–" stands for a value without samples. q or Ctrl-C leaves.
    """
    output = output_of()
    with ServerClient(find_url(url), read_s=10.0) as client, typed_keys() as read_key:
        before = read_metrics(client)
        while not _is_left(read_key, interval_s):
            after = read_metrics(client)
            load, engines = load_between(before, after), engines_between(before, after)
            _show(load, engines, output, client.url, live=not once)
            before = after
            if once:
                return


def read_metrics(client: ServerClient) -> MetricsPage:
    """Read the page once. Raises: ServerUnreachableError, ServerAnswerError."""
    text = client.get_text("/metrics")
    with contextlib.suppress(ValueError):
        metrics = MetricsPage(text, time.monotonic())
        if "quire_requests_running" in metrics:
            return metrics
    raise ServerAnswerError(200, f"{client.url}/metrics has none of Quire's metrics: is it another server?", "metrics")


def _is_left(read_key: ReadKey, seconds: float) -> bool:
    """Wait; return True as soon as "q" is typed."""
    end_s = time.monotonic() + seconds
    while (key := read_key(max(0.0, end_s - time.monotonic()))) is not None:
        if key in ("q", END):
            return True
    return False


def _show(load: ServerLoad, engines: Sequence[ServerLoad], output: Output, url: str, *, live: bool) -> None:
    if output.json:
        each = {"engines": [asdict(engine) for engine in engines]} if engines else {}
        output.result_json("quire.top/1", {"url": url, **asdict(load), **each})
    elif live and not is_capable_terminal(sys.stdout):
        output.result(summary(load))
    else:
        output.stream(CLEAR if live else "")
        lines = [*view_lines(load, url), *(f"{f'engine {rank}':<10}  {summary(it)}" for rank, it in enumerate(engines))]
        output.result("\n".join(map(escaped, lines)))


def view_lines(load: ServerLoad, url: str) -> list[str]:
    """Return the view of one interval."""
    num_full = max(0, min(BAR_CELLS, round(BAR_CELLS * load.kv_usage_ratio)))
    bar = "▓" * num_full + "░" * (BAR_CELLS - num_full)
    order = f" ({load.policy})" if load.policy else ""
    rows = {
        "requests": f"{load.running} running · {load.waiting} waiting{order} · {load.requests_per_s:.1f}/s ended",
        "generation": f"{load.generation_tokens_per_s:.1f} tok/s",
        "prompts": f"{load.prompt_tokens_per_s:.1f} tok/s · cache hit {_percent(load.cache_hit_ratio)}",
        **({"drafts": _drafts(load)} if load.drafts_per_s else {}),
        **({"prefixes": _breaks(load)} if load.prefix_breaks else {}),
        "KV cache": f"{bar} {_percent(load.kv_usage_ratio)} · {load.preemptions} preemptions",
        **({"weights": _weights(load)} if load.weights_mapped_bytes else {}),
        "TTFT": f"p50 {_seconds(load.ttft_p50_s)} · p95 {_seconds(load.ttft_p95_s)}",
        "ITL": f"p50 {_seconds(load.itl_p50_s)} · p95 {_seconds(load.itl_p95_s)}",
        "engine": f"{load.engine_deaths} deaths since the server's start",
    }
    return [f"{load.model} at {url}", *(f"{name:<10}  {text}" for name, text in rows.items())]


def summary(load: ServerLoad) -> str:
    """Return one interval as one line."""
    breaks = [f"prefixes {_breaks(load)}"] if load.prefix_breaks else []
    weights = [f"weights {_weights(load)}"] if load.weights_mapped_bytes else []
    drafts = [f"drafts {_drafts(load)}"] if load.drafts_per_s else []
    return " · ".join(
        (
            f"{load.generation_tokens_per_s:.1f} tok/s",
            f"{load.running} running",
            f"{load.waiting} waiting",
            f"KV {_percent(load.kv_usage_ratio)}",
            f"hit {_percent(load.cache_hit_ratio)}",
            f"TTFT {_seconds(load.ttft_p50_s)}",
            f"ITL {_seconds(load.itl_p50_s)}",
            f"{load.preemptions} preemptions",
            f"{load.engine_deaths} engine deaths",
            *weights,
            *drafts,
            *breaks,
        )
    )


def _weights(load: ServerLoad) -> str:
    mapped, resident, limit = (
        format_bytes(size)
        for size in (load.weights_mapped_bytes, load.weights_resident_bytes, load.weights_limit_bytes)
    )
    read = _percent(load.expert_read_ratio)
    return f"{mapped} on disk · {resident} of at most {limit} in memory · {read} of the experts used read from disk"


def _drafts(load: ServerLoad) -> str:
    gain = NOTHING if load.draft_gain is None else f"{load.draft_gain:.2f}"
    return f"{load.drafts_per_s:.1f} tok/s verified · {_percent(load.draft_accept_ratio)} right · tokens × {gain}"


def _breaks(load: ServerLoad) -> str:
    last = "" if load.last_prefix_break is None else f", the last at token {load.last_prefix_break}"
    return f"{load.prefix_breaks} broken{last}; {load.prefix_break_tokens} tokens computed again"


def _percent(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"{100 * ratio:.0f}%"


def _seconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else format_seconds(seconds)
