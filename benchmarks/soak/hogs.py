"""F9 of the fault table: the heaviest things a client may ask for beside other people's streams.

Each is sent again and again by two clients while four streams run: a text of 1 MiB, a grammar that takes its whole
deadline, and a chat template that takes its whole budget. Next to read: `src/quire/server/front_end.py`.
"""

import asyncio
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.soak.client import Seen, ask, chat_body
from benchmarks.soak.hostile_forms import ENDLESS
from benchmarks.soak.loads import HELLO, background
from benchmarks.soak.row import Row
from benchmarks.soak.server import Server, probes, serving

MAX_LAG_MS = 100.0
MAX_GAP_RATIO = 2.0
NUM_STREAMS = 4
PROBE_EVERY_S = 0.02
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if messages|length > 1 %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{{ (a * b)|string|upper|length }}{% endfor %}{% endfor %}{% endif %}"
)
"""SmolLM2's, with a loop that never ends for conversations of two messages."""


def hogs() -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Return path and body by name. Two of them are refused, after as much work as is allowed."""
    text = "The quick brown fox jumps over the lazy dog. " * ((1 << 20) // 45)
    two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    return {
        "1 MiB text": (
            "/v1/completions", {"model": "soak", "prompt": text, "max_tokens": 1, "truncate_prompt_tokens": 1},
        ),
        "worst form": (
            "/v1/chat/completions",
            {**chat_body("x", 1, stream=False), "structured_outputs": {"grammar": ENDLESS.grammar}},
        ),
        "worst template": ("/v1/chat/completions", {**chat_body("x", 1, stream=False), "messages": two}),
    }  # fmt: skip


async def beside_hogs(model: str | Server, *, duration_s: float = 8.0, num_clients: int = 2) -> Row:
    """F9: lag of the event loop, and the distance of other streams' tokens, with each hog and without."""
    if isinstance(model, str):
        with tempfile.TemporaryDirectory() as directory:
            template = Path(directory) / "template.jinja"
            template.write_text(TEMPLATE)
            with serving(model, "--max-num-seqs", "8", "--chat-template", str(template)) as server:
                return await beside_hogs(server, duration_s=duration_s, num_clients=num_clients)
    server = model
    row = Row("F9", f"beside {NUM_STREAMS} streams, {num_clients} clients with each hog for {duration_s:g} s")
    await ask(server.url, HELLO)
    for path, body in hogs().values():
        await ask(server.url, body, path=path)  # what is made once is made
    calm_ms, calm_lag_ms, _ = await _measure(server, duration_s, None, 0)
    row.check("undisturbed p99 ms", calm_ms, passes=calm_ms > 0)
    row.check("undisturbed lag ms", calm_lag_ms, passes=True)
    for name, hog in hogs().items():
        gap_ms, lag_ms, statuses = await _measure(server, duration_s, hog, num_clients)
        answered = len(statuses) > 0 and not any(status in (0, 500) for status in statuses)
        row.check(f"{name} × {len(statuses)}, {sorted(set(statuses))}: lag ms (≤ {MAX_LAG_MS:g})", lag_ms,
                  passes=lag_ms <= MAX_LAG_MS and answered)  # fmt: skip
        ratio = gap_ms / calm_ms
        row.check(f"p99 {gap_ms:.0f} ms, × undisturbed (≤ {MAX_GAP_RATIO:g})", ratio, passes=ratio <= MAX_GAP_RATIO)
    return row


async def _measure(
    server: Server, duration_s: float, hog: tuple[str, Mapping[str, Any]] | None, num_clients: int
) -> tuple[float, float, list[int]]:
    """The p99 of the distance of tokens, the longest answer of a probe, both in ms, and the hogs' statuses."""
    end_s = time.perf_counter() + duration_s
    streams: list[Seen] = []
    looks: list[Seen] = []
    statuses: list[int] = []

    async def stream(index: int) -> None:
        while time.perf_counter() < end_s:
            streams.append(await ask(server.url, chat_body(f"Tell me a story. {index}", 100)))

    async def be_a_hog(path: str, body: Mapping[str, Any]) -> None:
        while time.perf_counter() < end_s:
            statuses.append((await ask(server.url, body, path=path)).status)

    async with background(probes(server, "/health/live", PROBE_EVERY_S, looks)):
        await asyncio.gather(
            *(stream(index) for index in range(NUM_STREAMS)), *(be_a_hog(*hog) for _ in range(num_clients) if hog)
        )
    gaps = sorted(gap for item in streams for gap in item.gaps_s)
    if not all(item.is_good for item in streams) or not gaps or not looks:
        raise RuntimeError("a stream failed beside the hogs")
    return gaps[int(0.99 * (len(gaps) - 1))] * 1e3, max(item.took_s for item in looks) * 1e3, statuses
