"""The router over real sockets: placement by announced prefixes, retries, errors after the first byte, disconnects."""

import asyncio
import json
import threading
from contextlib import AsyncExitStack

import pytest

from quire.cli.top_metrics import MetricsPage, replicas_between
from quire.server.keys import ADMIN, ROUTER, KeyRing
from quire.server.router import replica
from tests.server.fake_engine import LIMIT_S, in_loop, record_of, until
from tests.server.router.routing import Routed, Script, failing, response, routing, url_of
from tests.server.served import CHAT, Served, chat_body, serving

EVENT = b'data: {"choices": []}\n\n'
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
GOOD = response(200, b'{"ok": true}', "Content-Type: application/json")
BUSY, TOO_LARGE = (
    response(503, json.dumps({"error": {"message": message, "code": code}}).encode(), "Content-Type: application/json")
    for message, code in (("the engine is restarting", "engine_not_ready"), ("too few KV blocks", "out_of_memory"))
)

UNAUTHORIZED = response(401, b'{"error": {"message": "unknown key", "code": "invalid_api_key"}}')


def writes(data: bytes) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return script


async def two(stack: AsyncExitStack, **options: object) -> tuple[Routed, list[Served]]:
    """Start a router in front of two servers."""
    servers = [await stack.enter_async_context(serving()) for _ in range(2)]
    return await stack.enter_async_context(routing(*map(url_of, servers), **options)), servers


def long_text(number: int) -> str:
    return f"{number} " * 40


@in_loop
async def test_request_goes_where_its_prefix_is_cached() -> None:
    async with AsyncExitStack() as stack:
        router, servers = await two(stack)
        for turn in range(3):
            for number in range(4):
                answer = await router.chat(text=long_text(number))
                cached = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert (cached > 50) == (turn > 0), "each prompt is computed once and found twice"
        requests = await router.counts("requests_total")
        assert sum(requests) == 12
        assert min(requests) > 0
        while sum(await router.counts("hit_tokens_total")) <= 8 * 50:
            await asyncio.sleep(0.01)
        cache = servers[0].supervisor.the_client.engine.scheduler.blocks.cache
        await until(lambda: len(router.fleet.replicas[0].digests) == len(cache))
        # Requests that come at once: the second follows the first, whose blocks are not cached yet.
        await asyncio.gather(*(router.chat(text=long_text(9)) for _ in range(2)))
        after = await router.counts("requests_total")
        assert sorted(now - before for now, before in zip(after, requests, strict=True)) == [0, 2]


@in_loop
async def test_metrics_of_a_router_give_the_load_of_each_replica() -> None:
    async with AsyncExitStack() as stack:
        router, _ = await two(stack, router_policy="round-robin")
        silent = await stack.enter_async_context(failing(writes(GOOD)))
        await router.answer("POST", f"/add_worker?url={silent}")
        await until(lambda: len(router.fleet.ready) == 3)

        async def page() -> MetricsPage:
            return MetricsPage((await router.answer("GET", "/metrics")).body.decode(), 0.0)

        before = await page()
        answers = [await router.chat(max_tokens=8) for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 200]
        await until(lambda: all(replica.load.num_generated_tokens for replica in router.fleet.replicas[:2]))
        seconds = 1e-9  # both pages have the same time
        *loads, total = replicas_between(before, await page())
        assert [(load.is_ready, load.running, load.waiting) for load in (*loads, total)] == [(True, 0, 0)] * 4
        assert [load.generation_tokens_per_s for load in loads] == [
            pytest.approx(8 / seconds), pytest.approx(8 / seconds), None
        ]  # fmt: skip


@in_loop
async def test_prefix_is_that_of_every_route_and_of_the_callers_key() -> None:
    keys = KeyRing({"key-a": "ann", "key-b": "ben"})
    async with serving(keys=KeyRing({"secret": ROUTER})) as served, routing(
        url_of(served), url_of(served) + "/", keys=keys, upstream_key="secret"
    ) as router:  # fmt: skip
        found = {}
        for key in ("key-a", "key-b"):
            for path, body in (
                (CHAT, chat_body(text=long_text(1))),
                ("/v1/completions", {"model": "scripted", "prompt": long_text(1)}),
                ("/v1/responses", {"model": "scripted", "input": long_text(1)}),
                ("/v1/messages", chat_body(text=long_text(1))),
            ):
                forwarded = [(b"content-type", b"application/json"), (b"x-quire-client", key.encode()),
                             (b"x-quire-salt", keys.find(key.encode()).cache_salt.encode())]  # fmt: skip
                prompt = await router.fleet.read_prompt(path, forwarded, json.dumps(body).encode(), "scripted")
                found[key, path] = prompt.digests
                answer = await router.answer("POST", path, body=body, headers={"Authorization": f"Bearer {key}"})
                assert answer.status == 200, answer.body
        assert all(len(digests) > 5 for digests in found.values())
        assert found["key-a", CHAT] == found["key-a", "/v1/responses"] == found["key-a", "/v1/messages"]
        assert len(set(found.values())) == 4, "keys share no prefixes"
        known = router.fleet.replicas[0].digests
        await until(lambda: all(set(digests) <= known for digests in found.values()))


@pytest.mark.parametrize(
    "script",
    [
        writes(b""),
        writes(BUSY),
        writes(UNAUTHORIZED),
        writes(STREAM),
        writes(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"),
    ],
    ids=["closed", "status 503", "status 401", "head only", "head with a length"],
)
@in_loop
async def test_request_that_got_nothing_goes_to_another_replica(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "CHECK_EVERY_S", 2 * LIMIT_S)  # none while the requests run
    async with (
        serving() as served,
        failing(script) as url,
        routing(url, url_of(served), router_policy="round-robin", upstream_key="secret") as router,
    ):
        answers = [await router.chat(stream=stream) for stream in (False, True, False)]
        assert [answer.status for answer in answers] == [200, 200, 200]
        assert await router.counts("failures_total") == [1, 0], "until its next health check it gets no requests"
        assert (await router.counts("requests_total"))[1] == 3


@in_loop
async def test_without_another_replica_the_error_names_all() -> None:
    async with failing(writes(BUSY)) as busy, failing(writes(b"")) as closed, routing(
        busy, closed, "http://127.0.0.1:1"
    ) as router:  # fmt: skip
        answer = await router.chat()
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "no_replica", "2")
        message = answer.json["error"]["message"]
        assert f'{busy} answers "the engine is restarting"' in message
        assert f"{closed} does not answer" in message
        ready = await router.answer("GET", "/health/ready")
        assert ready.status == 503
        assert "http://127.0.0.1:1 does not answer (ConnectError)" in ready.json["error"]["message"]
        assert (await router.answer("GET", "/health/live")).status == 200


@in_loop
async def test_refusal_of_a_request_takes_no_replica_out() -> None:
    async with (
        failing(writes(TOO_LARGE)) as first,
        failing(writes(TOO_LARGE)) as second,
        routing(first, second) as router,
    ):
        answers = [await router.chat() for _ in range(2)]
        assert [(answer.status, answer.code) for answer in answers] == [(503, "out_of_memory")] * 2
        assert await router.counts("failures_total") == [2, 2]
        assert len(router.fleet.ready) == 2


@pytest.mark.parametrize(
    ("path", "cut"),
    [(CHAT, EVENT), (CHAT, EVENT + b"data: {"), ("/v1/responses", EVENT), ("/v1/messages", EVENT)],
    ids=["whole", "cut", "typed", "Anthropic's"],
)
@in_loop
async def test_stream_that_breaks_ends_with_an_error_event(path: str, cut: bytes) -> None:
    piece = STREAM + f"{len(cut):x}\r\n".encode() + cut + b"\r\n"
    async with failing(writes(piece)) as url, serving() as served, routing(
        url, url_of(served), router_policy="round-robin"
    ) as router:  # fmt: skip
        answer = await router.answer("POST", path, body=chat_body(stream=True))
        assert answer.status == 200
        *_, before, last, rest = answer.body.split(b"\n\n")
        assert rest == b""
        if path == CHAT:
            assert last == b"data: [DONE]"
            assert json.loads(before.removeprefix(b"data: "))["error"]["code"] == "replica_lost"
        else:
            name, data = last.split(b"\n")
            assert name == b"event: error"
            content = json.loads(data.removeprefix(b"data: "))
            code = content["error"]["details"]["error_code"] if path == "/v1/messages" else content["code"]
            assert code == "replica_lost"
        assert (await router.counts("requests_total"))[1] == 0, "it is not sent again"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@in_loop
async def test_client_that_leaves_ends_its_request_at_the_replica(stream: bool) -> None:
    is_held, may_go_on = threading.Event(), threading.Event()

    def hold(step: int) -> None:
        if step > 2:  # a stream's first event has been sent
            is_held.set()
            may_go_on.wait(LIMIT_S)

    async with serving() as served, routing(url_of(served)) as router:
        served.executor.in_step = hold
        try:
            data = json.dumps(chat_body(stream=stream, max_tokens=100)).encode()
            reader, writer = await router.connect()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            await until(is_held.is_set)
            if stream:
                await reader.readuntil(b"data: ")
            replica = router.fleet.replicas[0]
            assert (served.server_requests(), replica.num_in_flight) == (1, 1)
            writer.close()
            await until(lambda: not served.server_requests())
            await until(lambda: served.supervisor.the_client.commands)  # the engine would compute some more steps
        finally:
            may_go_on.set()
        await served.until_idle()
        await until(lambda: not router.state.admission.num_requests)
        assert (replica.num_in_flight, replica.num_own_tokens) == (0, 0)
        assert served.executor.num_steps < 10, "the engine has aborted it"


@in_loop
async def test_limits_of_a_key_hold_across_replicas() -> None:
    keys = KeyRing({"key-a": "ann"})
    headers = {"Authorization": "Bearer key-a"}
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(keys=KeyRing({"secret": ROUTER}))) for _ in range(2)]
        router = await stack.enter_async_context(
            routing(
                *map(url_of, servers), keys=keys, upstream_key="secret", requests_per_minute=3, tokens_per_minute=500
            )
        )
        assert (await router.chat()).status == 401
        answers = [await router.chat(headers=headers) for _ in range(4)]
        assert [answer.status for answer in answers] == [200, 200, 200, 429]
        assert answers[3].code == "rate_limit_exceeded"
        await asyncio.sleep(0.1)
        usage = sum(answer.json["usage"]["total_tokens"] for answer in answers[:3])
        left = router.state.admission.rates.of(record_of("ann"))._buckets["tokens"].level
        assert left == pytest.approx(500 - usage, abs=20)
        for stranger in servers:
            assert (await stranger.chat(headers=headers)).status == 401


@in_loop
async def test_replicas_come_and_go() -> None:
    async with AsyncExitStack() as stack:
        router, (_, second) = await two(stack, router_policy="round-robin")
        url = url_of(second)
        assert (await router.answer("POST", f"/remove_worker?url={url}")).json["status"] == "removed"
        await until(lambda: len(router.fleet.replicas) == 1)
        assert (await router.chat()).status == 200
        assert (await router.answer("POST", f"/add_worker?url={url}")).json["status"] == "added"
        await until(lambda: len(router.fleet.ready) == 2)
        for path, status, message in (
            (f"/add_worker?url={url}", 400, "is there already"),
            ("/add_worker?url=host:1", 400, "http://host:1 works"),
            ("/add_worker", 400, "name the replica"),
            ("/remove_worker?url=http://127.0.0.1:2", 404, "no replica"),
        ):
            answer = await router.answer("POST", path)
            assert answer.status == status
            assert message in answer.json["error"]["message"]
        second.state.is_draining = True
        await until(lambda: len(router.fleet.ready) == 1)
        assert [(await router.chat()).status for _ in range(3)] == [200] * 3
        second.state.is_draining = False
        await until(lambda: len(router.fleet.ready) == 2)
        for path in (
            "/replica/events",
            "/x/../replica/events",
            "/x/%2e%2e/replica/events",
            "/replica%2fevents",
            "/sleep",
            "/wake_up",
        ):
            assert (await router.answer("GET", path)).status == 404


@in_loop
async def test_only_the_admin_key_changes_replicas() -> None:
    keys = KeyRing({"key-a": "ann", "key-b": ADMIN})
    async with routing("http://127.0.0.1:1", keys=keys) as router:
        for key, status in (("key-a", 403), ("key-b", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            answer = await router.answer("POST", "/add_worker?url=http://127.0.0.1:2", headers=headers)
            assert answer.status == status
    async with routing("http://127.0.0.1:1", host="0.0.0.0", insecure=True) as router:
        assert (await router.answer("POST", "/add_worker?url=http://127.0.0.1:2")).status == 403


@pytest.mark.parametrize(("name", "code"), [(ROUTER, "invalid_request"), (None, "not_admin")])
@in_loop
async def test_adapters_of_a_keyed_replica_need_the_admin_key_here_and_the_routers_there(
    name: str | None, code: str
) -> None:
    keys = KeyRing({"key-a": "ann", "key-b": ADMIN})
    async with serving(keys=KeyRing({"secret": name})) as served, routing(
        url_of(served), keys=keys, upstream_key="secret"
    ) as router:  # fmt: skip
        body = {"lora_name": "sql", "lora_path": "/nowhere"}
        answers = [
            await router.answer("POST", "/v1/load_lora_adapter", headers={"Authorization": f"Bearer {key}"}, body=body)
            for key in ("key-a", "key-b")
        ]
        assert [answer.code for answer in answers] == ["not_admin", code]


@in_loop
async def test_request_goes_to_a_replica_that_has_its_model() -> None:
    async with failing(writes(GOOD), models=("other", "third")) as url, serving() as served, routing(
        url, url_of(served)
    ) as router:  # fmt: skip
        names = [card["id"] for card in (await router.answer("GET", "/v1/models")).json["data"]]
        assert names == ["other", "third", "scripted"]
        assert (await router.answer("GET", "/v1/models/third")).json == {"id": "third"}
        assert (await router.chat()).json["model"] == "scripted"
        assert (await router.chat(model="other")).json == {"ok": True}
        for answer in (await router.chat(model="absent"), await router.answer("GET", "/v1/models/absent")):
            assert (answer.status, answer.code) == (404, "model_not_found")
            assert "other, scripted, third" in answer.json["error"]["message"]


@in_loop
async def test_answers_and_refusals_are_passed_on() -> None:
    async with AsyncExitStack() as stack:
        router, (first, _) = await two(stack)
        for target in ("//127.0.0.1:1/x", "/a%2Fb%20c?x=%2F"):
            assert (await router.answer("GET", target)).json == (await first.answer("GET", target)).json
        assert b" 40" in await router.raw(b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        body = {"model": "scripted", "prompt": "abc"}
        for asked in (router, first):
            assert (await asked.answer("POST", "/tokenize", body=body)).json["count"] == 3
            assert (await asked.chat(temperature=9)).code == "invalid_parameter"
            assert (await asked.answer("GET", "/nothing?x=1")).code == "route_not_found"
            assert (await asked.answer("POST", CHAT, body=b"{")).status == 400
            answer = await asked.chat(headers={"X-Request-Id": "mine"}, stream=True)
            assert (answer.headers["x-request-id"], answer.headers["content-type"][:17]) == (
                "mine",
                "text/event-stream",
            )
            assert answer.body.endswith(b"data: [DONE]\n\n")


@in_loop
async def test_router_decides_which_pages_may_call() -> None:
    async with AsyncExitStack() as stack:
        router, _ = await two(stack, allowed_origins=("https://a.example",))
        for origin, status in (("https://a.example", 200), ("https://b.example", 403)):
            answer = await router.chat(headers={"Origin": origin, "Sec-Fetch-Site": "cross-site"})
            assert answer.status == status
