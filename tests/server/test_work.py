"""Threads of the server: turns of callers, bounds, cancellation, and kinds of work apart."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from quire.errors import QueueFullError
from quire.server.keys import KeyRing
from quire.server.request_record import Caller
from quire.server.work import LEAST_BYTES, LONG_BYTES, FairPool, WorkPools
from tests.server.fake_engine import LIMIT_S, in_loop
from tests.server.served import CHAT, Served, chat_body, serving


class Gates:
    """Jobs that note their begin and wait until they are let go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._open: dict[str, threading.Event] = {}

    def job(self, name: str) -> Callable[[], str]:
        self._open[name] = threading.Event()

        def work() -> str:
            self.begun.append(name)
            assert self._open[name].wait(LIMIT_S)
            return name

        return work

    def open(self, *names: str) -> None:
        for name in names:
            self._open[name].set()

    async def until_begun(self, *names: str) -> None:
        while not set(names) <= set(self.begun):
            await asyncio.sleep(0.001)


@pytest.fixture
def gates() -> Iterator[Gates]:
    gates = Gates()
    yield gates
    gates.open(*gates._open)


@in_loop
async def test_job_of_another_caller_begins_beside_a_queue(gates: Gates) -> None:
    pool = FairPool("test")
    tasks = [asyncio.create_task(pool.run("a", gates.job(f"a{number}"))) for number in range(3)]
    await gates.until_begun("a0")
    tasks.append(asyncio.create_task(pool.run("b", gates.job("b0"))))
    await gates.until_begun("b0")
    assert gates.begun == ["a0", "b0"], "a caller's jobs run one at a time"
    gates.open("b0", "a0", "a1", "a2")
    assert await asyncio.gather(*tasks) == ["a0", "a1", "a2", "b0"]


@in_loop
async def test_callers_take_turns(gates: Gates) -> None:
    pool = FairPool("test")
    names = ["a0", "a1", "a2", "b0", "b1", "c0", "c1"]
    tasks = [asyncio.create_task(pool.run(name[0], gates.job(name))) for name in names]
    await gates.until_begun("a0", "b0")
    for ends, begins in (("a0", "c0"), ("b0", "a1"), ("c0", "b1"), ("a1", "c1"), ("b1", "a2")):
        gates.open(ends)
        await gates.until_begun(begins)
    gates.open("c1", "a2")
    assert await asyncio.gather(*tasks) == names
    assert gates.begun[2:] == ["c0", "a1", "b1", "c1", "a2"]
    assert not pool._waiting
    assert not pool._num_bytes
    assert not pool._running


@in_loop
async def test_job_that_is_cancelled_while_it_waits_is_never_called(gates: Gates) -> None:
    pool = FairPool("test")
    tasks = [asyncio.create_task(pool.run("a", gates.job(name))) for name in ("first", "left", "last")]
    await gates.until_begun("first")
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    gates.open("first", "last")
    assert [await tasks[0], await tasks[2]] == ["first", "last"]
    assert gates.begun == ["first", "last"]


@in_loop
async def test_thread_of_a_job_that_is_cancelled_while_it_runs_is_free_at_its_end(gates: Gates) -> None:
    pool = FairPool("test")
    left = asyncio.create_task(pool.run("a", gates.job("left")))
    await gates.until_begun("left")
    left.cancel()
    await asyncio.wait([left])
    following = asyncio.create_task(pool.run("a", gates.job("following")))
    await asyncio.sleep(0)
    assert gates.begun == ["left"]
    gates.open("left", "following")
    assert await following == "following"


@in_loop
async def test_error_of_a_job_is_its_callers_only() -> None:
    pool = FairPool("test")

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await pool.run("a", fail)
    assert await pool.run("a", lambda: 1) == 1


@in_loop
async def test_waiting_bytes_are_bounded_in_all_and_per_caller(gates: Gates) -> None:
    pool = FairPool("test", max_waiting_bytes=8 * LEAST_BYTES)
    tasks = []

    async def add(caller: str, num_bytes: int = 0) -> None:
        tasks.append(asyncio.create_task(pool.run(caller, gates.job(f"{caller}{len(tasks)}"), num_bytes)))
        await asyncio.sleep(0)

    await add("a")
    await add("a", 100 * LEAST_BYTES)  # alone it may be larger than the bound
    with pytest.raises(QueueFullError):
        await pool.run("a", gates.job("refused"))
    tasks.pop().cancel()
    await asyncio.sleep(0)
    for _ in range(6):
        await add("a")
    with pytest.raises(QueueFullError):
        await pool.run("a", gates.job("refused"))
    await add("b")
    for _ in range(2):
        await add("b")
    with pytest.raises(QueueFullError):
        await pool.run("c", gates.job("refused"))
    gates.open(*gates._open)
    await asyncio.gather(*tasks)
    assert "refused" not in gates.begun


@in_loop
async def test_short_work_waits_neither_for_long_work_nor_for_grammars_nor_for_answers(gates: Gates) -> None:
    work, caller = WorkPools(), Caller("a")
    long_caller = Caller("a", num_bytes=LONG_BYTES + 1)
    tasks = [
        asyncio.create_task(work.prepare(long_caller, gates.job("long"))),
        asyncio.create_task(work.check_grammar(caller, gates.job("grammar"))),
        asyncio.create_task(work.write("a", gates.job("answer"))),
    ]
    await gates.until_begun("long", "grammar", "answer")
    assert await work.prepare(caller, lambda: "short") == "short"
    gates.open("long", "grammar", "answer")
    await asyncio.gather(*tasks)


# --- On a server ------------------------------------------------------------------------------

GOOD, BAD = {"Authorization": "Bearer good"}, {"Authorization": "Bearer bad"}
KEYS = KeyRing({"good": "good", "bad": "bad"})
FORM = {"structured_outputs": {"regex": "bad [a-z]"}}
PATHS = {
    CHAT: FORM,
    "/v1/completions": {"prompt": "a", "messages": None, **FORM},
    "/v1/responses": {"input": "a", "messages": None, "max_tokens": None, **FORM},
    "/v1/messages": FORM,
}


class Forms:
    """A server whose grammars are never checked until `open` is set."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.open = threading.Event()
        self.asked: list[str] = []

    def check(self, spec: Any) -> str:
        self.asked.append(spec.text)
        assert self.open.wait(LIMIT_S)
        return "start: /a/"

    async def until_asked(self, count: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(self.asked) < count:
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def held(monkeypatch: pytest.MonkeyPatch, **options: Any) -> AsyncIterator[Forms]:
    async with serving(keys=KEYS, **options) as served:
        forms = Forms(served)
        monkeypatch.setattr(served.state.engines.front_end.grammars, "check", forms.check)
        try:
            yield forms
        finally:
            forms.open.set()


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_chat_is_answered_while_grammars_are_checked(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    body = {name: value for name, value in (chat_body() | PATHS[path]).items() if value is not None}
    async with held(monkeypatch) as forms, asyncio.TaskGroup() as asking:
        for _ in range(5):
            asking.create_task(forms.served.answer("POST", path, headers=BAD, body=body))
        await forms.until_asked(1)
        for headers in (GOOD, BAD):
            assert (await forms.served.chat(headers=headers)).status == 200
        form = {"structured_outputs": {"regex": "good"}}
        asking.create_task(forms.served.chat(headers=GOOD, **form))
        await forms.until_asked(2)
        assert forms.asked == ["bad [a-z]", "good"], "the other key's grammar waits for this key's"
        forms.open.set()


@in_loop
async def test_grammar_of_a_client_that_hung_up_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with held(monkeypatch) as forms, asyncio.TaskGroup() as asking:
        asking.create_task(forms.served.chat(headers=BAD, structured_outputs={"regex": "first"}))
        await forms.until_asked(1)
        left = [
            asyncio.create_task(forms.served.chat(headers=BAD, structured_outputs={"regex": f"left {number}"}))
            for number in range(5)
        ]
        pool = forms.served.state.work._grammars
        while len(pool._waiting._items.get("bad", ())) < len(left):
            await asyncio.sleep(0.001)
        for task in left:
            task.cancel()
        while pool._waiting:
            await asyncio.sleep(0.001)
        asking.create_task(forms.served.chat(headers=BAD, structured_outputs={"regex": "last"}))
        forms.open.set()
    assert forms.asked == ["first", "last"]


LONG = "a " * (LONG_BYTES // 2)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
        ("/detokenize", {"tokens": [1] * LONG_BYTES}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/embeddings", {"input": LONG, "truncate_prompt_tokens": 1}),
        ("/v1/score", {"text_1": LONG, "text_2": "a", "truncate_prompt_tokens": 1}),
        ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 1}),
        (CHAT, chat_body(text=LONG, truncate_prompt_tokens=1)),
    ],
)
@in_loop
async def test_long_work_of_a_client_that_hung_up_is_not_done(path: str, body: dict[str, Any]) -> None:
    is_open, calls = threading.Event(), list[str]()
    async with serving(keys=KEYS) as served:
        pool = served.state.work._long
        first = asyncio.create_task(pool.run("bad", lambda: is_open.wait(LIMIT_S)))
        left = asyncio.create_task(served.answer("POST", path, headers=BAD, body={"model": "scripted", **body}))
        while not pool._waiting:
            assert not left.done(), left.result().body
            await asyncio.sleep(0.001)
        jobs = pool._waiting._items["bad"]
        jobs[0].function = lambda: calls.append(path)
        assert (await served.chat(headers=BAD)).status == 200
        left.cancel()
        while pool._waiting:
            await asyncio.sleep(0.001)
        is_open.set()
        assert await first
        assert not calls


@in_loop
async def test_too_much_waiting_work_is_refused_with_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with held(monkeypatch) as forms, asyncio.TaskGroup() as asking:
        monkeypatch.setattr(forms.served.state.work._grammars, "_max_waiting_bytes", LEAST_BYTES)
        for number in range(2):
            form = {"structured_outputs": {"regex": f"{number}"}}
            asking.create_task(forms.served.chat(headers=BAD, **form))
            await forms.until_asked(1)
        while not forms.served.state.work._grammars._waiting:
            await asyncio.sleep(0.001)
        refused = await forms.served.chat(headers=BAD, structured_outputs={"regex": "refused"})
        assert (refused.status, refused.code) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        forms.open.set()


@in_loop
async def test_chat_is_answered_while_the_engine_compiles_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    is_open, asked = threading.Event(), list[str]()
    async with serving(keys=KEYS) as served:
        engine = served.supervisor.the_client.engine
        compile_grammar = engine.input_processor.grammars.compile

        def compile_slowly(spec: Any, checked: str | None = None) -> Any:
            asked.append(spec.text)
            assert is_open.wait(LIMIT_S)
            return compile_grammar(spec, checked)

        monkeypatch.setattr(engine.input_processor.grammars, "compile", compile_slowly)
        forms = [
            asyncio.create_task(served.chat(headers=BAD, structured_outputs={"regex": f"a{{{number}}}"}))
            for number in range(1, 4)
        ]
        async with asyncio.timeout(LIMIT_S):
            while not asked or served.server_requests() < len(forms):
                await asyncio.sleep(0.001)
        assert (await served.chat(headers=BAD)).status == 200
        waiting = next(number for number in range(1, 4) if f"a{{{number}}}" not in asked)
        forms[waiting - 1].cancel()
        while served.server_requests() == len(forms):
            await asyncio.sleep(0.001)
        assert (await served.chat(headers=BAD)).status == 200  # so the engine has taken the abort
        is_open.set()
        del forms[waiting - 1]
        assert [(await form).status for form in forms] == [200, 200]
        assert f"a{{{waiting}}}" not in asked
        await served.until_idle()
