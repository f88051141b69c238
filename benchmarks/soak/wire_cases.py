"""Bytes that no client should send. Shared by `wire.py` and the tests of the server; next to read: `wire.py`."""

import gzip
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

MODEL = "scripted"
CHAT = b"/v1/chat/completions"
GOOD: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
BODIES: tuple[bytes, ...] = (
    json.dumps(GOOD).encode(),
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
    CHAT, b"/health/live", b"/version", b"/metrics", b"/", b"*", b"//evil.example/version", b"/%00",
    b"/%ff%fe", b"/..%2f..%2fetc/passwd", b"http://evil.example/v1/models", b"/v1/models?" + b"a=1&" * 500,
    b"/\xc3\xa9", b"/#a", b"evil:80",
)  # fmt: skip
METHODS = (b"GET", b"POST", b"HEAD", b"OPTIONS", b"DELETE", b"CONNECT", b"TRACE", b"PRI", b"get", b"M-SEARCH")
VERSIONS = (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.1 ", b"")


def make_case(random_: random.Random) -> bytes:
    """Make a conversation: usually one odd request, sometimes several, often damaged."""
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
    """Make a request, usually odd in one place."""
    body = random_.choice(BODIES)
    target = random_.choice(TARGETS) if random_.random() < 0.6 else CHAT
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


def _posted(body: bytes, *headers: bytes) -> Iterator[bytes]:
    lines = (b"POST /v1/chat/completions HTTP/1.1", b"Host: localhost", b"Content-Type: application/json", *headers)
    yield b"\r\n".join(lines) + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
    for at in range(0, len(body), 1 << 16):
        yield body[at : at + (1 << 16)]


def _headers(line: bytes, piece: bytes, count: int) -> Iterator[bytes]:
    yield b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + line
    for _ in range(count):
        yield piece
    yield b"\r\n\r\n"


def _tiny_chunks(count: int) -> Iterator[bytes]:
    yield b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    yield b"Transfer-Encoding: chunked\r\n\r\n"
    for _ in range(count // 1000):
        yield b"1\r\n \r\n" * 1000
    yield b"0\r\n\r\n"


HUGE: dict[str, Callable[[], Iterator[bytes]]] = {
    "one header of 100 MiB": lambda: _headers(b"X-Long: ", b"a" * (1 << 20), 100),
    "a million headers": lambda: _headers(b"", b"X-More: a\r\n" * 1000, 1000),
    "a URL of 10 MiB": lambda: iter([b"GET /", *[b"a" * (1 << 20)] * 10, b" HTTP/1.1\r\nHost: localhost\r\n\r\n"]),
    "a body of 100 MiB": lambda: _posted(b" " * (100 << 20)),
    "10,000 chunks of a byte": lambda: _tiny_chunks(10_000),
    "a million chunks of a byte": lambda: _tiny_chunks(1_000_000),
    "100,000 arrays": lambda: _posted(b"[" * 100_000),
    "100,000 objects": lambda: _posted(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a number of a million digits": lambda: _posted(b'{"model": "scripted", "seed": ' + b"9" * 1_000_000 + b"}"),
    "a compressed gigabyte": lambda: _posted(gzip.compress(bytes(1 << 24), 9) * 64, b"Content-Encoding: gzip"),
    "3 MiB of one string": lambda: _posted(
        b'{"model": "scripted", "messages": [{"role": "user", "content": "' + b"a " * (3 << 19) + b'"}]}'
    ),
    "2,048 messages": lambda: _posted(json.dumps({**GOOD, "messages": [GOOD["messages"][0]] * 2048}).encode()),
    "10,000 pipelined requests": lambda: iter([b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000] * 10),
}
"""Conversations in pieces, made anew for each use."""
