"""`quire ps`: the running servers of this user on this machine.

Next to read: `../server/registration.py`.
"""

import contextlib
import time
from typing import Any

import psutil

from quire.byte_sizes import format_bytes
from quire.cli.command import output_of, verb
from quire.cli.server_client import ServerAnswerError, ServerClient, ServerUnreachableError
from quire.cli.top_metrics import MetricsPage
from quire.server.registration import ServerNote, find

PROBE_S = 2.0
HEADER = ("PID", "MODEL", "URL", "STATE", "RUNNING", "WAITING", "MEMORY", "UP")


@verb("ps", ("quire ps", "quire ps --json"))
def ps_command() -> None:
    """List your servers on this machine.

    State is "ready", the reason why the server is not ready, or "no answer". Memory is that of all processes of a
    server. Requests are shown where /metrics can be read; the key is that of QUIRE_API_KEY.
    """
    output = output_of()
    rows = [look_at(note) for note in find()]
    if output.json:
        output.result_json("quire.ps/1", {"servers": rows})
    elif not rows:
        output.note("no server runs here; start one with `quire serve`")
    else:
        output.table(HEADER, [_cells(row) for row in rows], right=frozenset({0, 4, 5, 6, 7}))


def look_at(note: ServerNote) -> dict[str, Any]:
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
