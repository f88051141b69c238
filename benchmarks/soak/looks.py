"""Looks that take more than they show (A8), beside normal streams: pictures of other sites, comparisons, adapter names.

Next to read: `beside.py`, `src/quire_lessons/compare/rig.py`.
"""

import asyncio
import contextlib
import tempfile
from pathlib import Path

import httpx2
import psutil

from benchmarks.soak.beside import ATTACKER, beside, serving_two
from benchmarks.soak.row import Row
from benchmarks.soak.server import Server
from quire.runtime.adapter_layout import linear_shapes
from quire.weights.checkpoint import open_checkpoint
from quire.weights.sources import resolve_source
from quire_lessons.compare.adapters import write_random_adapter
from quire_lessons.compare.rig import SHARE

LOOKS = ("/xray/explain?again=1", "/xray/ranks", "/xray/events", "/metrics", "/v1/models", "/version")
COMPARISONS = (
    {"name": "attention", "settings": {"context": 131_072}},
    {"name": "kv", "settings": {"requests": 10_000, "context": 131_072}},
    {"name": "batching", "settings": {"requests": 10_000, "context": 131_072, "slots": 1024}},
    {"name": "cache", "settings": {"requests": 1000, "context": 65_536}},
    {"name": "adapters", "settings": {"requests": 2000, "rank": 256}},
)
NUM_NAMES, MAX_NAMES = 10_000, 1024
MAX_GROWTH_BYTES = 32 << 20
"""Of the server, by all the names."""
LOOK_S = 6.0


async def looks(model: str, *, duration_s: float) -> Row:
    """A8: each kind in turn."""
    row = Row("A8", "looks of other sites, comparisons of any size, 10,000 adapter names")
    shapes = linear_shapes(open_checkpoint(resolve_source(model)).hf_config)
    with tempfile.TemporaryDirectory() as folder, serving_two(
        model, "--enable-lora", "--any-client-is-admin"
    ) as server:  # fmt: skip
        adapter = str(write_random_adapter(Path(folder) / "adapter", shapes, 1, 0))
        key = {"Authorization": f"Bearer {ATTACKER}"}
        async with httpx2.AsyncClient(base_url=server.url, headers=key, timeout=120) as client:
            await _foreign_looks(row, client)
            await _comparisons(row, server, client, duration_s)
            await _names(row, server, client, adapter, duration_s)
    return row


async def _foreign_looks(row: Row, client: httpx2.AsyncClient) -> None:
    """A picture in a web page: the browser names the page's site, and no origin."""
    answers = [await client.get(path, headers={"Sec-Fetch-Site": "cross-site"}) for path in LOOKS * 5]
    num_answered = sum(answer.status_code != 403 for answer in answers)
    row.check(f"looks of other sites answered, of {len(answers)}", num_answered, passes=not num_answered)


async def _comparisons(row: Row, server: Server, client: httpx2.AsyncClient, duration_s: float) -> None:
    """Each comparison for `LOOK_S` at most; the largest memory of its process."""
    available, most, told = psutil.virtual_memory().available, 0, set[int]()

    async def watch() -> None:
        nonlocal most
        while True:
            for process in server.processes():
                with contextlib.suppress(psutil.Error):
                    if "compare" in process.cmdline():
                        most = max(most, process.memory_info().rss)
            await asyncio.sleep(0.05)

    async def attack(server: Server) -> None:
        for body in COMPARISONS:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    told.add((await client.post("/lab/compare", json=body)).status_code)

    watching = asyncio.create_task(watch())
    try:
        await beside(row, server, attack, name="comparisons", duration_s=max(duration_s, LOOK_S * len(COMPARISONS)))
    finally:
        watching.cancel()
    share = most / available
    row.check(f"memory of a comparison, of what was free (≤ {SHARE})", share, passes=0 < share <= SHARE)
    row.check("statuses of those that ended", sorted(told), passes=told <= {429, 501})


async def _names(row: Row, server: Server, client: httpx2.AsyncClient, adapter: str, duration_s: float) -> None:
    """Load one adapter under `NUM_NAMES` names."""
    before, number = server.resident_bytes(), iter(range(NUM_NAMES))

    async def attack(server: Server) -> None:
        if (name := next(number, None)) is None:
            await asyncio.sleep(1)
            return
        await client.post("/v1/load_lora_adapter", json={"lora_name": f"name {name}", "lora_path": adapter})

    await beside(row, server, attack, name="adapter names", duration_s=duration_s)
    for _ in number:
        await attack(server)
    listed = len((await client.get("/v1/models")).json()["data"]) - 1
    row.check(f"names listed (≤ {MAX_NAMES})", listed, passes=0 < listed <= MAX_NAMES)
    growth = server.resident_bytes() - before
    row.check("growth of RSS in MiB (≤ 32)", round(growth / 2**20, 1), passes=growth <= MAX_GROWTH_BYTES)
