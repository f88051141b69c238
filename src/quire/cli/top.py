"""`quire top`: tokens per second, requests and latency of a server from its `/metrics`; `quire ps`: the servers of this
user on this machine.

`top` is one view that is redrawn on a terminal, elsewhere one line per interval. Next to read: `server_client.py`,
`../server/registration.py`.
"""

import contextlib
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click
from prometheus_client.parser import text_string_to_metric_families

from quire.byte_sizes import format_bytes
from quire.cli.command import option, output_of, verb
from quire.cli.server_client import ServerAnswerError, ServerClient, ServerUnreachableError, find_url, url_option
from quire.cli.terminal import END, Output, ReadKey, format_seconds, is_capable_terminal, typed_keys
from quire.errors import escaped

if TYPE_CHECKING:
    from quire.server.registration import ServerNote

# --- A page of `/metrics`, and the changes between two; knows no HTTP and no terminal -------------

Labels = frozenset[tuple[str, str]]
LAST_BREAK = "quire_prefix_last_break"


class MetricsPage:
    """The samples of one page, by name and labels. `time_s`: when they were read, of a monotonic clock."""

    def __init__(self, text: str, time_s: float) -> None:
        """Raises: ValueError if the page is not in Prometheus's text format."""
        self.time_s = time_s
        self._samples: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value

    def __contains__(self, name: str) -> bool:
        return name in self._samples

    def samples(self, name: str, **labels: str) -> dict[Labels, float]:
        """Return the samples of a name that have these labels."""
        wanted = labels.items()
        return {found: value for found, value in self._samples.get(name, {}).items() if wanted <= found}

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of a name that have these labels; 0 without any."""
        return sum(self.samples(name, **labels).values())

    def label(self, name: str, label: str) -> str:
        """Return a label of the first sample of a name; empty without one."""
        return next((dict(found).get(label, "") for found in self._samples.get(name, {})), "")

    def values_of(self, name: str, label: str) -> list[str]:
        """Return the values of a label among the samples of a name, in the page's order."""
        return [dict(found).get(label, "") for found in self._samples.get(name, {})]

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return a histogram's cumulative counts by upper bound, smallest first."""
        found: dict[float, float] = {}
        for sample, count in self.samples(f"{name}_bucket", **labels).items():
            bound = float(dict(sample).get("le", "nan"))
            found[bound] = found.get(bound, 0.0) + count
        return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """A server between two pages. None: no sample, or the server does not tell.

    `drafts_per_s`: draft tokens that steps verified; `draft_gain`: generated tokens by those that were no drafts.
    `prefix_breaks`: prompts that differ early from an earlier one that they repeat, since the server's start;
    `prefix_break_tokens`: what was computed again behind such differences; `last_prefix_break`: token of the last one.
    `weights_mapped_bytes`: weights on disk, 0 if all are in memory; `expert_read_ratio`: bytes read from disk per byte
    of the experts that steps used.
    """

    model: str
    seconds: float
    running: int
    waiting: int
    kv_usage_ratio: float
    cache_hit_ratio: float | None
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    requests_per_s: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    itl_p50_s: float | None
    itl_p95_s: float | None
    preemptions: int
    engine_deaths: int
    drafts_per_s: float = 0.0
    draft_accept_ratio: float | None = None
    draft_gain: float | None = None
    prefix_breaks: int = 0
    prefix_break_tokens: int = 0
    last_prefix_break: int | None = None
    weights_mapped_bytes: int = 0
    weights_resident_bytes: int = 0
    weights_limit_bytes: int = 0
    expert_read_ratio: float | None = None
    policy: str = ""


def change_between(before: MetricsPage, after: MetricsPage, name: str, **labels: str) -> float:
    """Return the change of a counter, summed over its samples. One that fell is of an engine that was restarted."""
    then = before.samples(name, **labels)
    return sum(
        now - then.get(found, 0.0) if now >= then.get(found, 0.0) else now
        for found, now in after.samples(name, **labels).items()
    )


def load_between(before: MetricsPage, after: MetricsPage, **labels: str) -> ServerLoad:
    """Return the changes between two pages, of the samples with these labels.

    Preemptions are those of the interval, engine deaths and broken prefixes those since the server's start.
    """
    seconds = max(after.time_s - before.time_s, 1e-9)

    def value(name: str) -> float:
        return after.value(name, **labels)

    def change(name: str) -> float:
        return change_between(before, after, name, **labels)

    queries, chosen = change("quire_prefix_cache_queries_total"), change("quire_experts_chosen_bytes_total")
    drafts, accepted = change("quire_draft_tokens_total"), change("quire_accepted_tokens_total")
    generated = change("quire_generation_tokens_total")
    return ServerLoad(
        model=after.label("quire_build_info", "model"),
        policy=after.label("quire_build_info", "scheduling_policy"),
        seconds=seconds,
        running=int(value("quire_requests_running")),
        waiting=int(value("quire_requests_waiting")),
        kv_usage_ratio=value("quire_kv_usage_ratio") / max(1, len(after.samples("quire_kv_usage_ratio", **labels))),
        cache_hit_ratio=change("quire_prefix_cache_hits_total") / queries if queries else None,
        prompt_tokens_per_s=change("quire_prompt_tokens_total") / seconds,
        generation_tokens_per_s=generated / seconds,
        requests_per_s=change("quire_requests_total") / seconds,
        ttft_p50_s=quantile(before, after, "quire_time_to_first_token_seconds", 0.5, **labels),
        ttft_p95_s=quantile(before, after, "quire_time_to_first_token_seconds", 0.95, **labels),
        itl_p50_s=quantile(before, after, "quire_inter_token_latency_seconds", 0.5, **labels),
        itl_p95_s=quantile(before, after, "quire_inter_token_latency_seconds", 0.95, **labels),
        preemptions=int(change("quire_preemptions_total")),
        engine_deaths=int(value("quire_engine_deaths_total")),
        drafts_per_s=drafts / seconds,
        draft_accept_ratio=accepted / drafts if drafts else None,
        draft_gain=generated / (generated - accepted) if drafts and generated > accepted else None,
        prefix_breaks=int(value("quire_prefix_breaks_total")),
        prefix_break_tokens=int(value("quire_prefix_break_tokens_total")),
        last_prefix_break=int(after.value(LAST_BREAK)) if LAST_BREAK in after else None,
        weights_mapped_bytes=int(value("quire_weights_mapped_bytes")),
        weights_resident_bytes=int(value("quire_weights_resident_bytes")),
        weights_limit_bytes=int(value("quire_weights_limit_bytes")),
        expert_read_ratio=change("quire_weights_read_bytes_total") / chosen if chosen else None,
    )


def engines_between(before: MetricsPage, after: MetricsPage) -> list[ServerLoad]:
    """Return the changes of each engine of a server; none of a server of one engine or of several models."""
    ranks = after.values_of("quire_engine_up", "engine")
    return [load_between(before, after, engine=rank) for rank in ranks if rank]


def quantile(before: MetricsPage, after: MetricsPage, name: str, share: float, **labels: str) -> float | None:
    """Return a quantile of the samples between two pages, interpolated in its bucket; None without samples.

    In the last bucket, which has no upper bound, its lower bound is the answer.
    """
    then, now = before.buckets(name, **labels), after.buckets(name, **labels)
    if any(count < then.get(bound, 0.0) for bound, count in now.items()):
        then = {}
    counts = {bound: count - then.get(bound, 0.0) for bound, count in now.items()}
    total = max(counts.values(), default=0.0)
    if total <= 0:
        return None
    lower, below = 0.0, 0.0
    for bound, count in counts.items():
        if count >= share * total and count > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (share * total - below) / (count - below)
        lower, below = bound, count
    return None


# --- `quire top` ----------------------------------------------------------------------------------

TOP_EXAMPLES = ("quire top", "quire top --url http://127.0.0.1:8000 --once --json")
BAR_CELLS = 20
NOTHING = "–"
CLEAR = "\x1b[H\x1b[2J"
"""Escape sequences: the cursor to the first line, clear the screen."""


@verb("top", TOP_EXAMPLES)
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


# --- `quire ps` -----------------------------------------------------------------------------------

PROBE_S = 2.0
PS_HEADER = ("PID", "MODEL", "URL", "STATE", "RUNNING", "WAITING", "MEMORY", "UP")


@verb("ps", ("quire ps", "quire ps --json"))
def ps_command() -> None:
    """List your servers on this machine.

    State is "ready", the reason why the server is not ready, or "no answer". Memory is that of all processes of a
    server. Requests are shown where /metrics can be read; the key is that of QUIRE_API_KEY.
    """
    from quire.server.registration import find

    output = output_of()
    rows = [look_at(note) for note in find()]
    if output.json:
        output.result_json("quire.ps/1", {"servers": rows})
    elif not rows:
        output.note("no server runs here; start one with `quire serve`")
    else:
        output.table(PS_HEADER, [_cells(row) for row in rows], right=frozenset({0, 4, 5, 6, 7}))


def look_at(note: "ServerNote") -> dict[str, Any]:
    """Ask a server for its state and metrics. `running` and `waiting` are None where its metrics cannot be read."""
    running = waiting = None
    state = "ready"
    with ServerClient(note.url, read_s=PROBE_S) as client:
        try:
            client.get_text("/health/ready")
        except ServerAnswerError as error:
            state = error.code
        except ServerUnreachableError:
            state = "no answer"
        with contextlib.suppress(ServerUnreachableError, ServerAnswerError, ValueError):
            metrics = MetricsPage(client.get_text("/metrics"), time.monotonic())
            if "quire_requests_running" in metrics:
                running = int(metrics.value("quire_requests_running"))
                waiting = int(metrics.value("quire_requests_waiting"))
    return {
        "pid": note.pid,
        "model": note.model,
        "url": note.url,
        "state": state,
        "running": running,
        "waiting": waiting,
        "memory_bytes": memory_bytes(note.pid),
        "up_s": max(0.0, time.time() - note.started_s),
        "version": note.version,
    }


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process and its children; shared pages count in each of them."""
    import psutil

    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for item in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has just ended
                total += item.memory_info().rss
    return total


def format_duration(seconds: float) -> str:
    """59 → "59s"; 3700 → "1h01m"; 90000 → "1d01h"."""
    whole = int(seconds)
    for size, unit, smaller_size, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // smaller_size:02}{smaller}"
    return f"{whole}s"


def _cells(row: dict[str, Any]) -> list[str]:
    texts = [
        "–" if row[name] is None else str(row[name]) for name in ("pid", "model", "url", "state", "running", "waiting")
    ]
    return [*texts, format_bytes(row["memory_bytes"]), format_duration(row["up_s"])]
