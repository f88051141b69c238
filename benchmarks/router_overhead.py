"""Cost of the router: CPU time of its process per request and per streamed chunk, and the time that it adds.

    python -m benchmarks.router_overhead [--clients 1,8,32] [--seconds 4]

The replica is a stand-in that computes nothing: it sends the chunks of a stream at fixed times. Clients ask it
directly and through `quire route`, by turns. CPU time per request comes from streams of one chunk, that of a chunk from
what streams of 50 chunks cost more; what the router uses while it is idle is subtracted. CPU time hardly depends on
other load; the times do, because client, router and stand-in share the machine's cores. Results: `README.md`.
"""

import asyncio
import contextlib
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

from benchmarks.command_line import Table, make_parser
from benchmarks.server_process import ServerProcess

MANY_CHUNKS, CHUNK_DELAY_S = 50, 0.02
IDLE_S = 2.0
CHUNK = b"data: " + json.dumps({
    "id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 0, "model": "stand-in",
    "choices": [{"index": 0, "delta": {"content": " token"}, "finish_reason": None}],
}).encode() + b"\n\n"  # fmt: skip
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
ANSWERS = {"/health/ready": {"status": "ready"}, "/v1/models": {"object": "list", "data": [{"id": "stand-in"}]}}


def run_stand_in(to_parent: Connection) -> None:
    """Serve until killed; tell the port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await answer_all(reader, writer)
        writer.close()

    async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            lines = head.lower().split(b"\r\n")
            length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
            body = await reader.readexactly(length)
            path = head.split(b" ")[1].decode()
            if path == "/v1/chat/completions":
                writer.write(HEAD)
                for index in range(json.loads(body)["max_tokens"]):
                    await asyncio.sleep(CHUNK_DELAY_S if index else 0)
                    writer.write(b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK))
                writer.write(END)
            else:
                data = json.dumps(ANSWERS.get(path)).encode()
                status = 200 if path in ANSWERS else 404
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        to_parent.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


async def put_load(url: str, num_clients: int, num_chunks: int, seconds: float) -> list[float]:
    """Send streams over kept connections for a time. Returns: seconds to the end of each."""
    body = json.dumps({"model": "stand-in", "max_tokens": num_chunks, "stream": True,
                       "messages": [{"role": "user", "content": "hi"}]}).encode()  # fmt: skip
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    end_s = time.perf_counter() + seconds
    taken: list[float] = []

    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        while (began_s := time.perf_counter()) < end_s:
            writer.write(request)
            answer = await reader.readuntil(b"\r\n" + END)
            assert answer.count(b"data: ") == num_chunks, answer
            taken.append(time.perf_counter() - began_s)
        writer.close()

    await asyncio.gather(*(work() for _ in range(num_clients)))
    return taken


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process's threads, in seconds: the clock that clock_getcpuclockid(3) names, in ns."""
    return time.clock_gettime((~pid << 3) | 2)


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = make_parser(__doc__, "json")
    parser.add_argument("--clients", default="1,8,32", help="at once  [%(default)s]")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement  [%(default)s]")
    arguments = parser.parse_args(words)
    from_stand_in, to_parent = multiprocessing.Pipe()
    stand_in = multiprocessing.Process(target=run_stand_in, args=(to_parent,), daemon=True)
    stand_in.start()
    direct = f"http://127.0.0.1:{from_stand_in.recv()}"
    router = ServerProcess([sys.executable, "-m", "quire", "route", direct, "--port", "0"])
    pid = router.process.pid
    try:
        time.sleep(0.5)
        before = cpu_s(pid)
        time.sleep(IDLE_S)
        idle_share = (cpu_s(pid) - before) / IDLE_S
        print(f"idle router: {idle_share:.1%} of a core, subtracted below")
        table = Table({
            "clients": "d", "CPU µs per request": ".0f", "per chunk": ".1f", "one chunk, ms direct": ".2f",
            "routed": ".2f", "requests/s direct": ".0f", "requests/s routed": ".0f",
        }, as_json=arguments.json)  # fmt: skip
        for num_clients in map(int, arguments.clients.split(",")):
            cost_us = {}
            for num_chunks in (MANY_CHUNKS, 1):
                asyncio.run(put_load(router.url, num_clients, num_chunks, 0.5))
                before, began_s = cpu_s(pid), time.perf_counter()
                routed = asyncio.run(put_load(router.url, num_clients, num_chunks, arguments.seconds))
                used_s = cpu_s(pid) - before - idle_share * (time.perf_counter() - began_s)
                cost_us[num_chunks] = used_s / len(routed) * 1e6
            alone = asyncio.run(put_load(direct, num_clients, 1, arguments.seconds))
            per_chunk = (cost_us[MANY_CHUNKS] - cost_us[1]) / (MANY_CHUNKS - 1)
            times_ms = (1000 * statistics.median(times) for times in (alone, routed))
            rates = (len(times) / arguments.seconds for times in (alone, routed))
            table.row(num_clients, cost_us[1], per_chunk, *times_ms, *rates)
    finally:
        router.kill()
        stand_in.kill()


if __name__ == "__main__":
    main()
