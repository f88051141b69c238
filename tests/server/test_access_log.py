import asyncio
import io
import itertools
import json
import logging
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quire.events import EventKind, EventLog
from quire.server import gate
from quire.server.keys import KeyRing
from quire.server.logs import JsonFormatter, TextFormatter
from tests.server.fake_engine import in_loop
from tests.server.served import CHAT, Answer, chat_body, quick, serving

SECRET = "sk-the-secret-key"
PATHS = (
    "/a%0d%0aINFO%20quire.access:%20forged",
    "/%1b%5b31m%1b%5d0;owned%07",
    "/%e2%80%ae%e2%80%a8",
    "/%00%7f",
    "/" + "a" * 5000,
    "/%22%20status=200",
    "/%ff%fe",
    f"/v1/models?key={SECRET}",
    f"/v1/models/{SECRET}",
    f"/v1/models?token=Bearer%20{SECRET}",
)
HEADERS = ("User-Agent", "X-Request-Id", "Referer", "traceparent")
VALUES = ("a\tb", SECRET, "\x9b31m", "i" * 20_000, "status=200 key=root")
MAX_LINE_CHARACTERS = 1000
BEARER = {"Authorization": f"Bearer {SECRET}"}


@pytest.fixture
def log(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """Capture the server's log at INFO."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if getattr(request, "param", "text") == "json" else TextFormatter())
    logger = logging.getLogger("quire")
    level, handlers = logger.level, logger.handlers[:]
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    yield stream
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.mark.parametrize("log", ["text", "json"], indirect=True)
@in_loop
async def test_log_has_one_line_per_request_with_counts_and_names(log: io.StringIO) -> None:
    async with serving(keys=KeyRing({SECRET: "ann"})) as served:
        await served.chat(headers=BEARER | {"X-Request-Id": "id-7"}, text="the prompt")
        await served.answer("GET", f"{CHAT}?api_key={SECRET}", headers=BEARER)
    lines = log.getvalue().splitlines()
    assert len(lines) == 2
    for word in ("POST", CHAT, "200", "ann", "id-7"):
        assert word in lines[0]
    if lines[0].startswith("{"):
        found = json.loads(lines[0])
        assert (found["status"], found["generated_tokens"], found["key"]) == (200, 4, "ann")
        assert found["prompt_tokens"] > 10
    assert "405" in lines[1]


@in_loop
async def test_id_of_a_log_line_is_that_of_the_engines_events(
    log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EventLog, "forget", lambda self: None)
    async with serving() as served:
        await served.chat()
        await served.chat(headers={"X-Request-Id": "mine"})
        await served.chat(headers={"X-Request-Id": "mine"})
        answer = await served.answer(
            "POST", "/v1/completions", body={"model": "scripted", "prompt": ["a", "b"], "max_tokens": 2}
        )
        events = served.supervisor.the_client.engine.events
        submitted = [event.request_id for event in events.of(EventKind.ARRIVE)]
    plain, first, second, several = (dict(re.findall(r"(\w+)=(\S+)", line)) for line in log.getvalue().splitlines())
    assert plain["request_id"] == submitted[0]
    assert "engine_id" not in plain
    assert (first["request_id"], second["request_id"]) == ("mine", "mine")
    assert [first["engine_id"], second["engine_id"]] == submitted[1:3]
    assert all(re.fullmatch(r"mine\.[0-9a-f]{8}", name) for name in submitted[1:3])
    assert len(set(submitted)) == 5, "the engine never sees an id twice"
    assert submitted[3:] == [f"{several['request_id']}-{index}" for index in (0, 1)]
    assert answer.json["id"] == several["request_id"].replace("req-", "cmpl-")


@pytest.mark.parametrize("log", ["text", "json"], indirect=True)
def test_paths_and_headers_of_clients_forge_no_log_lines(log: io.StringIO) -> None:
    async def main() -> int:
        num_requests = 0
        async with serving(keys=KeyRing({SECRET: "ann"})) as served:
            for path, header, value in itertools.product(PATHS, HEADERS, VALUES):
                await served.answer("GET", path, headers=BEARER | {header: value})
                num_requests += 1
            await served.chat(headers=BEARER, text="a secret prompt \x1b[31m")
            return num_requests + 1

    num_requests = asyncio.run(main())
    text = log.getvalue()
    assert len(text.splitlines()) == num_requests
    assert SECRET not in text
    assert "secret prompt" not in text
    assert all(character == "\n" or character.isprintable() for character in text)
    assert max(map(len, text.splitlines())) < MAX_LINE_CHARACTERS


@in_loop
async def test_errors_contain_no_keys_and_no_prompts(log: io.StringIO) -> None:
    async with serving(keys=KeyRing({SECRET: "ann"})) as served:
        for body in (b"{", b'{"model": 1}', b'{"model": "scripted", "messages": "a secret prompt"}'):
            answer = await served.answer("POST", CHAT, headers=BEARER, body=body)
            assert SECRET.encode() not in answer.body
            assert answer.status == 400
    assert SECRET not in log.getvalue()
    assert "secret prompt" not in log.getvalue()


@in_loop
async def test_client_that_leaves_is_counted_as_499_and_its_request_aborted() -> None:
    async with serving() as served:
        served.executor.in_step = lambda step: time.sleep(0.02)
        body = json.dumps(chat_body(max_tokens=100, ignore_eos=True)).encode()
        _, writer = await served.connect()
        writer.write(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" % CHAT.encode())
        writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        async with asyncio.timeout(20):
            while not served.executor.num_steps:
                await asyncio.sleep(0.005)
        assert served.server_requests() == 1
        writer.close()
        await served.until_idle()
        page = (await served.answer("GET", "/metrics")).body.decode()
        assert re.search(r'quire_http_requests_total{.*status="499"} 1', page)
        assert 'quire_requests_total{finish_reason="abort"} 1' in page


REFUSED = {
    400: (
        b"NONSENSE\r\n\r\n",
        b"GET /a?key=sk-the-secret-key HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /%0d%0aINFO%20forged HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /v1/models/sk-the-secret-key HTTP/1.1\r\nX: \x00\x1b[31m\r\nAuthorization: Bearer sk-\r\n\r\n",
        b"GET /v1/models/sk-the-secret-key HTTP/1.1\r\nAuthorization: Bearer sk-the-secret-key\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ),
    414: (b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",),
    431: (b"GET /v1/models/sk-the-secret-key HTTP/1.1\r\nX-Request-Id: " + b"i" * 40_000 + b"\r\n\r\n",),
}


@in_loop
async def test_invalid_request_has_an_id_and_a_log_line_and_is_counted(log: io.StringIO) -> None:
    async with serving() as served:
        for status, requests in REFUSED.items():
            for data in requests:
                before = len(log.getvalue().splitlines())
                answer = Answer(await served.raw(data))
                assert answer.status == status
                (line,) = log.getvalue().splitlines()[before:]
                assert answer.headers["x-request-id"] in line
                assert str(status) in line
        page = (await served.answer("GET", "/metrics")).body.decode()
        for status, requests in REFUSED.items():
            counted = re.findall(rf'quire_http_requests_total{{.*status="{status}"}} (\d+)', page)
            assert sum(map(int, counted)) == len(requests)
    text = log.getvalue()
    assert SECRET not in text
    assert all(character == "\n" or character.isprintable() for character in text)
    assert max(map(len, text.splitlines())) < MAX_LINE_CHARACTERS


@in_loop
async def test_timeouts_of_requests_and_silent_connections_are_logged(log: io.StringIO) -> None:
    async with serving(connection=quick(READ_TIMEOUT_S=0.1, LINGER_S=0.1)) as served:
        assert b" 408 " in await served.raw(b"")
        assert b" 408 " in await served.raw(b"GET /version HTTP/1.1\r\nHost: a\r\n")
        assert b" 408 " in await served.raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                                            b"Content-Length: 10\r\n\r\n{")  # fmt: skip
    lines = log.getvalue().splitlines()
    assert len(lines) == 3
    assert all("408" in line for line in lines)
    assert "/v1/completions" in lines[2]


@in_loop
async def test_repeated_429s_of_a_key_are_logged_as_one_line_and_a_number(
    log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "REPEATS_S", 0.5)

    def logged() -> tuple[list[str], list[int]]:
        """Lines of 429s, and the numbers of those that stand for several."""
        # Not merely "429": the random id of another request may have these digits.
        lines = [line for line in log.getvalue().splitlines() if re.search(r'status"?(?:=|: )429', line)]
        return lines, [int(found[1]) for line in lines if (found := re.search(r'"?requests"?(?:=|: )(\d+)', line))]

    async with serving(requests_per_minute=1) as served:
        assert (await served.chat()).status == 200
        refused = await asyncio.gather(*(served.chat() for _ in range(6)))
        assert {answer.status for answer in refused} == {429}
        assert len({answer.headers["x-request-id"] for answer in refused}) == 6
        async with asyncio.timeout(20):
            while sum("req-" in line for line in logged()[0]) + sum(logged()[1]) < 6:
                await asyncio.sleep(0.01)
        page = (await served.answer("GET", "/metrics")).body.decode()
        assert re.search(r'quire_http_requests_total{.*status="429"} 6', page)
    lines, numbers = logged()
    own = [line for line in lines if "req-" in line]
    assert own
    assert numbers
    assert len(own) + sum(numbers) == 6
    assert len(lines) == len(own) + len(numbers) < 6


@in_loop
async def test_429s_of_one_key_do_not_hide_those_of_another(log: io.StringIO) -> None:
    async with serving(requests_per_minute=1, keys=KeyRing({"a": "ann", "b": "bob"})) as served:
        for key in "aabb":
            await served.chat(headers={"Authorization": f"Bearer {key}"})
    refused = [line for line in log.getvalue().splitlines() if "status=429" in line]
    assert [name for line in refused for name in ("ann", "bob") if name in line] == ["ann", "bob"]


def dated(date: str, *texts: str) -> dict[str, Any]:
    """Return a chat body whose system text begins with a date."""
    system = f"You are an assistant. Today is {date}. " + "Answer in one sentence and name your source. " * 6
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"messages": [{"role": "system", "content": system}, *messages]}


@pytest.mark.parametrize("log", ["text", "json"], indirect=True)
@in_loop
async def test_log_tells_cached_tokens_and_where_a_prefix_broke(log: io.StringIO) -> None:
    async with serving(scheduler={"max_model_len": 1024}) as served:
        bodies = (dated("Monday", "hi"), dated("Monday", "hi", "ho", "and?"), dated("Tuesday", "hi", "ho", "and?"),
                  dated("Tuesday", "hi", "ho", "and?", "ha", "so?"), dated("Tuesday", "another one"))  # fmt: skip
        usage = [(await served.chat(**body)).json["usage"] for body in bodies]
        page = (await served.answer("GET", "/metrics")).body.decode()
    lines = log.getvalue().splitlines()[:5]
    broke = [re.search(r'"?prefix_broke_at"?(?:=|: )(\d+)', line) for line in lines]
    cached = [re.search(r'"?cached_tokens"?(?:=|: )(\d+)', line) for line in lines]
    prompts = [re.search(r'"?prompt_tokens"?(?:=|: )(\d+)', line) for line in lines]
    assert [int(found[1]) for found in cached if found] == [
        item["prompt_tokens_details"]["cached_tokens"] for item in usage
    ]
    assert [int(found[1]) for found in prompts if found] == [item["prompt_tokens"] for item in usage]
    # Every byte is a token, and the template's first one is the role's.
    at = len("You are an assistant. Today is ") + 1
    assert [found and int(found[1]) for found in broke] == [None, None, at, None, None]
    # The cache gives what stands before, down to a block of 4.
    assert usage[2]["prompt_tokens_details"]["cached_tokens"] == at // 4 * 4
    assert "Tuesday" not in log.getvalue()
    assert "quire_prefix_breaks_total 1.0" in page
    assert f"quire_prefix_break_tokens_total {usage[1]['prompt_tokens'] - at}.0" in page
    assert f"quire_prefix_last_break {at}.0" in page


@in_loop
async def test_prefixes_are_not_compared_without_a_prefix_cache(log: io.StringIO) -> None:
    async with serving(scheduler={"max_model_len": 1024, "enable_prefix_caching": False}) as served:
        for date in ("Monday", "Tuesday"):
            await served.chat(**dated(date, "hi"))
        page = (await served.answer("GET", "/metrics")).body.decode()
    assert "prefix_broke_at" not in log.getvalue()
    assert "quire_prefix_breaks_total 0.0" in page
    assert "quire_prefix_last_break" not in page
