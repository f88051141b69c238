"""B10: what clients can write into the server's log. Next to read: `log_cases.py`."""

import asyncio
import itertools
import json
import time
from collections.abc import Iterator

from benchmarks.soak.inputs.log_cases import HEADERS, LONGEST, PATHS, SECRET, VALUES
from benchmarks.soak.inputs.plain_http import connected
from benchmarks.soak.row import Row
from benchmarks.soak.server import Server, serving
from quire.server.keys import VARIABLE

PROMPT = "a prompt that nobody may read"
WAIT_S = 5.0


def requests(num_chats: int = 10) -> Iterator[tuple[str, dict[str, str], bytes | None]]:
    """Path, headers and body of each; what is within the limits of headers, and what is above them."""
    for path, header, value in itertools.product(PATHS, HEADERS, VALUES):
        yield path, {header: value}, None
    for path in PATHS:
        yield path, {"X-Request-Id": "i" * (1 << 20)}, None
        yield path, {"X-Request-Id": "a\r\nINFO quire.access: forged"}, None
        yield path, {"User-Agent": "a\r\n\x1b[31m folded"}, None
    for number in range(num_chats):
        text = f"{PROMPT} \x1b[31m\r\n{SECRET} {number}"
        body = {"model": "soak", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
        wrong = {**body, "messages": text, "user": SECRET}
        yield "/v1/chat/completions", {}, json.dumps(body).encode()
        yield "/v1/chat/completions", {}, json.dumps(wrong).encode()
        yield f"/v1/completions?key={SECRET}", {}, text.encode()


async def log_injection(model: str, *, log_formats: tuple[str, ...] = ("text", "json")) -> Row:
    """B10: at the log level `INFO`, with each format of the log."""
    cases = list(requests())
    row = Row("B10", f"{len(cases)} injections into log and headers, log as {' and '.join(log_formats)}")
    for log_format in log_formats:
        with serving(model, "--log-format", log_format, environment={VARIABLE: SECRET}) as server:
            await _measure(server, row, cases, log_format)
    return row


async def _measure(
    server: Server, row: Row, cases: list[tuple[str, dict[str, str], bytes | None]], log_format: str
) -> None:
    start = len(server.lines)
    num_named = num_cut_off = num_leaks = 0
    for path, headers, body in cases:
        async with connected(server.url, SECRET) as client:
            method = "GET" if body is None else "POST"
            answer = await client.ask(method, path, body, {"Connection": "close", **headers})
        num_named += "x-request-id" in answer.headers
        # A client that goes on sending after it was refused may be reset before it reads why.
        num_cut_off += answer.status == 0
        num_leaks += SECRET in str(answer.headers)
    deadline_s = time.monotonic() + WAIT_S
    while len(server.lines) - start < len(cases) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)
    lines = [line.removesuffix("\n") for line in server.lines[start:]]
    text = "\n".join(lines)
    bad = [line for line in lines if not line.isprintable() or not line.isascii() or len(line) > LONGEST]
    is_own = [_is_a_line(line, log_format) for line in lines]
    row.note(f"{log_format}: cut off", num_cut_off)
    row.check("lines, requests", f"{len(lines)}, {len(cases)}", passes=len(lines) == len(cases))
    row.check("answers with an id, or cut off", num_named + num_cut_off, passes=num_named + num_cut_off == len(cases))
    row.check("lines not escaped, not the server's own, or long", len(bad) + is_own.count(False),
              passes=not bad and all(is_own))  # fmt: skip
    hidden = text.count(SECRET) + text.count(PROMPT)
    row.check("keys and prompts in the log", hidden, passes=not hidden)
    row.check("keys in headers of answers", num_leaks, passes=not num_leaks)


def _is_a_line(line: str, log_format: str) -> bool:
    if log_format == "text":
        return line.startswith("INFO quire.access: request method=") and line.count("quire.access:") <= 2
    try:
        return json.loads(line)["logger"] == "quire.access"
    except (ValueError, KeyError, TypeError):
        return False
