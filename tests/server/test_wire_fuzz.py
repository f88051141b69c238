"""Bytes that no client should send, thrown at a running server (B2): it answers or hangs up, and lives on.

`QUIRE_FUZZ_CASES=100000 pytest tests/server/test_wire_fuzz.py` tries more than the suite does.
"""

import asyncio
import json
import os
import random
import re

import psutil

from tests.server.served import CHAT, Served, chat_body, quick, serving

NUM_CASES = int(os.environ.get("QUIRE_FUZZ_CASES", "2500"))
AT_ONCE = 100
MAX_GROWTH_BYTES = 64 << 20
BODIES: tuple[bytes, ...] = (
    json.dumps(chat_body()).encode(),
    b"",
    b"{",
    b"null",
    b"\xff\xfe{}",
    b'{"model": "scripted", "messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 2}',
    b'{"model": "scripted", "model": "other", "messages": []}',
    b'{"model": "scripted", "messages": [{"role": "user", "content": "a"}], "temperature": 1e400}',
    b'{"model": "scripted", "messages": [{"role": "user", "content": "a"}], "max_tokens": NaN}',
    b'{"model": "scripted", "messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 5000 + b"}",
    b"[" * 20_000,
    b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    b'{"model": "\\u0000", "messages": "\\u202e"}',
    b"\x1f\x8b\x08\x00" + bytes(range(256)),
)
HEADERS: tuple[bytes, ...] = (
    b"Content-Type: application/json",
    b"Content-Type: text/plain; charset=utf-7",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: chunked, identity",
    b"Transfer-Encoding:\tchunked",
    b"Content-Length: 5",
    b"Content-Length: 18446744073709551616",
    b"Content-Length: +5",
    b"Content-Encoding: gzip",
    b"Expect: 100-continue",
    b"Connection: close",
    b"Connection: keep-alive, upgrade",
    b"Upgrade: h2c",
    b"Host: localhost/v1/models?",
    b"Host: evil.example",
    b"Host: [::1",
    b"Authorization: Bearer " + b"\xff" * 40,
    b"Authorization: " + b"B" * 3000,
    b"Cookie: " + b"a=b; " * 500,
    b"X-Request-Id: a\tb\x1b[31m",
    b"X-Request-Id: " + b"i" * 5000,
    b"Range: bytes=0-,0-,0-",
    b"Origin: null",
    b": no name",
    b"no colon",
    b" folded: line",
    b"X-Nul: \x00",
    b"traceparent: 00-" + b"0" * 500,
)
TARGETS: tuple[bytes, ...] = (
    CHAT.encode(), b"/health/live", b"/version", b"/metrics", b"/", b"*", b"//evil.example/version", b"/%00",
    b"/%ff%fe", b"/..%2f..%2fetc/passwd", b"http://evil.example/v1/models", b"/v1/models?" + b"a=1&" * 500,
    b"/\xc3\xa9", b"/#a", b"evil:80",
)  # fmt: skip
METHODS = (b"GET", b"POST", b"HEAD", b"OPTIONS", b"DELETE", b"CONNECT", b"TRACE", b"PRI", b"get", b"M-SEARCH")
VERSIONS = (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.1 ", b"")


def make_case(random_: random.Random) -> bytes:
    """One conversation: usually one odd request, sometimes several, often damaged."""
    requests = b"".join(make_request(random_) for _ in range(random_.choice((1, 1, 1, 2, 4))))
    data = bytearray(requests)
    for _ in range(random_.choice((0, 0, 1, 3, 20))):
        at = random_.randrange(len(data))
        kind = random_.randrange(4)
        if kind == 0:
            data[at] = random_.randrange(256)
        elif kind == 1:
            del data[at : at + random_.randrange(1, 40)]
        elif kind == 2:
            data[at:at] = data[at : at + random_.randrange(1, 200)]
        else:
            data[at:at] = random_.choice((b"\r\n", b"\r", b"\n", b"\x00", b"\r\n\r\n", b"\xe2\x80\xa8"))
        if not data:
            break
    return bytes(data)


def make_request(random_: random.Random) -> bytes:
    body = random_.choice(BODIES)
    target = random_.choice(TARGETS) if random_.random() < 0.6 else CHAT.encode()
    lines = [b" ".join((random_.choice(METHODS[:2] if random_.random() < 0.7 else METHODS), target,
                        b"HTTP/1.1" if random_.random() < 0.9 else random_.choice(VERSIONS)))]  # fmt: skip
    if random_.random() < 0.9:
        lines.append(b"Host: localhost")
    framing = random_.random()
    if framing < 0.6:
        lines.append(b"Content-Length: %d" % len(body))
    elif framing < 0.85:
        lines.append(b"Transfer-Encoding: chunked")
        size = random_.choice((1, 3, 1000))
        pieces = [body[at : at + size] for at in range(0, min(len(body), size * 3000), size)]
        body = b"".join(
            b"%x%s\r\n%s\r\n" % (len(piece), random_.choice((b"", b"", b";a=b")), piece) for piece in pieces
        )
        body += random_.choice((b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"-1\r\n", b"ffffffffffffffff\r\n", b""))
    lines += random_.sample(HEADERS, random_.choice((0, 0, 1, 2, 5)))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def throw(served: Served, data: bytes, *, hangs_up: bool) -> bytes:
    """Send a case in pieces, then wait for the server to hang up, or hang up first."""
    reader, writer = await served.connect()
    received = b""
    try:
        for at in range(0, len(data), 1 + len(data) // 3):
            writer.write(data[at : at + 1 + len(data) // 3])
            await writer.drain()
        if hangs_up:
            writer.write_eof()
        async with asyncio.timeout(60):  # the limits of the connection end it long before
            received = await reader.read()
    except ConnectionError:
        pass
    finally:
        writer.close()
    return received


def test_nothing_on_the_wire_breaks_the_server() -> None:
    random_ = random.Random(20_261)

    async def main() -> None:
        with quick(READ_TIMEOUT_S=0.4, KEEP_ALIVE_S=0.2) as connection:
            async with serving(connection=connection) as served:
                statuses: set[int] = set()
                before = 0
                for start in range(0, NUM_CASES, AT_ONCE):
                    cases = [make_case(random_) for _ in range(min(AT_ONCE, NUM_CASES - start))]
                    answers = await asyncio.gather(
                        *(throw(served, case, hangs_up=random_.random() < 0.2) for case in cases)
                    )
                    for case, answer in zip(cases, answers, strict=True):
                        found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", answer)]
                        assert not [status for status in found if status >= 500], (case, answer)
                        statuses |= set(found)
                    if start == AT_ONCE * 5:
                        before = psutil.Process().memory_info().rss
                assert {200, 400, 403, 404, 405} <= statuses
                assert psutil.Process().memory_info().rss - before < MAX_GROWTH_BYTES
                await served.until_idle()
                assert (await served.chat()).status == 200
                assert served.server_requests() == 0

    asyncio.run(main())
