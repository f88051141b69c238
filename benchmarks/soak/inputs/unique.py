"""B9: what clients can make unique must not pile up: schemas, salts, request ids, with paths and user agents.

Next to read: `processes.py`.
"""

import asyncio
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import httpx2

from benchmarks.soak.client import get
from benchmarks.soak.inputs.processes import MIB, NUM_CLIENTS, Work, growth_of, share
from benchmarks.soak.row import Row
from benchmarks.soak.server import Server

MAX_GROWTH_MIB = 128
TEXT = "the river runs to the sea and the wind carries the rain over the hills again and again"
"""More than one block, so that each salt has something in the prefix cache."""
NUM_WARM_UP = 1000
PIPELINED = 10


async def unique_values(server: Server, *, num_ids: int = 1_000_000) -> Row:
    """B9. A tenth as many salts; and of schemas, each of which is compiled in a process of its own, a hundredth."""
    url, num_salts, num_schemas = server.url, max(1, num_ids // 10), max(1, num_ids // 100)
    row = Row("B9", f"{num_schemas} unique schemas, {num_salts} cache salts, {num_ids} request ids")
    failed: list[int] = []
    schemas, salts = _asking(_schema_body, failed), _asking(_salt_body, failed)
    await share(url, range(-min(NUM_WARM_UP, num_schemas), 0), schemas)
    await share(url, range(-min(NUM_WARM_UP, num_salts), 0), salts)
    await _send_ids(url, range(-min(NUM_WARM_UP, num_ids), 0))
    labels = await _num_labels(url)
    # A line of the log each: they are not what is measured here.
    forgetting = asyncio.create_task(_forget_lines(server))
    before_bytes = server.resident_bytes()
    with growth_of(server) as growth:
        await share(url, range(num_schemas), schemas)
        row.note("after the schemas +MiB", (server.resident_bytes() - before_bytes) / MIB)
        await share(url, range(num_salts), salts)
        row.note("after the salts +MiB", (server.resident_bytes() - before_bytes) / MIB)
        num_answers = await _send_ids(url, range(num_ids))
        row.note("after the ids +MiB", (server.resident_bytes() - before_bytes) / MIB)
    forgetting.cancel()
    row.check(f"peak RSS +MiB (≤ {MAX_GROWTH_MIB})", growth.mib, passes=growth.mib <= MAX_GROWTH_MIB)
    row.check("failed", len(failed), passes=not failed)
    row.check("ids answered", num_answers, passes=num_answers == num_ids)
    num_more = await _num_labels(url) - labels
    row.check("more lines of metrics", num_more, passes=not num_more)
    idle_s = await server.seconds_until_idle(30)
    row.check("idle after s", idle_s, passes=idle_s < 30)
    return row


def _schema_body(number: int) -> dict[str, object]:
    schema = {"type": "object", "properties": {f"name{number}": {"enum": [number, f"value{number}"]}}}
    return {"structured_outputs": {"json": schema}, "prompt": "hi"}


def _salt_body(number: int) -> dict[str, object]:
    return {"cache_salt": f"salt{number}" + "s" * 200, "prompt": TEXT, "request_id": f"mine{number}"}


def _asking(body: Callable[[int], dict[str, object]], failed: list[int]) -> Work[int]:
    async def ask(client: httpx2.AsyncClient, number: int) -> None:
        fields = {"model": "soak", "max_tokens": 1, **body(number)}
        answer = await client.post("/v1/completions", json=fields, headers={"User-Agent": f"agent-{number}"})
        if answer.status_code != 200:
            failed.append(answer.status_code)

    return ask


async def _send_ids(url: str, numbers: range) -> int:
    """Send requests with unique ids, paths and user agents, ten at once per connection; return the number answered."""
    parts = urlsplit(url)
    waiting = iter(range(numbers.start, numbers.stop, PIPELINED))

    async def work() -> int:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        num_answers = 0
        for start in waiting:
            batch = range(start, min(start + PIPELINED, numbers.stop))
            writer.write(b"".join(_id_requests(batch)))
            for _ in batch:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                num_answers += b"x-request-id: id-" in head
        writer.close()
        return num_answers

    return sum(await asyncio.gather(*(work() for _ in range(NUM_CLIENTS))))


def _id_requests(numbers: range) -> Iterator[bytes]:
    for number in numbers:
        path = "/version" if number % 2 else f"/nowhere/{number}"
        line = (
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: id-{number}\r\nUser-Agent: agent-{number}\r\n\r\n"
        )
        yield line.encode()


async def _forget_lines(server: Server) -> None:
    while True:
        server.lines.clear()
        await asyncio.sleep(1)


async def _num_labels(url: str) -> int:
    await get(url, "/metrics")  # its own route is a label
    page = await get(url, "/metrics")
    return page.text.count("\n")
