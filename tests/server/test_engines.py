"""Several engines behind one server: placement, deaths, slow starts. The engines run in threads, or are stand-ins."""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config import EngineOptions
from quire.engine.llm import LLM
from quire.errors import ConfigError, EngineDeadError, ModelNotFoundError
from quire.server import engines as engines_module
from quire.server import supervisor as supervisor_module
from quire.server.engines import Engines, share_of
from quire.server.errors import ApiError
from quire.server.models import make_models
from quire.server.options import ServerOptions
from quire.server.supervisor import EngineState
from tests.engine.builders import make_config
from tests.server.fake_engine import in_loop, until
from tests.server.served import Served, ThreadedEngineClient, serving

MANY = {"max_num_seqs": 4, "max_model_len": 256}


def clients(served: Served) -> list[ThreadedEngineClient]:
    return [supervisor._client for supervisor in served.state.engines.supervisors]  # type: ignore[misc]


def hold(client: ThreadedEngineClient) -> Callable[[], None]:
    """Let no step of an engine end. Returns: a function that lets it go on."""
    loop, held = asyncio.get_running_loop(), [True]

    def wait(step: int) -> None:
        while held and not loop.is_closed():
            time.sleep(0.002)

    client.executor.in_step = wait
    return held.clear


# --- Placement ----------------------------------------------------------------------------------


@in_loop
async def test_requests_go_to_the_engine_that_has_their_prefix_cached() -> None:
    async with serving(num_engines=2, scheduler=MANY) as served:
        texts = {"a": "first prefix " * 8, "b": "other prefix " * 8}
        places = {}
        for name, text in texts.items():
            before = [client.statistics.num_prompt_tokens for client in clients(served)]
            assert (await served.chat(text=text)).status == 200
            await served.until_idle()
            after = [client.statistics.num_prompt_tokens for client in clients(served)]
            places[name] = [now > then for now, then in zip(after, before, strict=True)].index(True)
        assert sorted(places.values()) == [0, 1], "equal engines take turns"
        for name in "aabab":
            before = [client.statistics.num_cached_tokens for client in clients(served)]
            assert (await served.chat(text=texts[name] + "?")).status == 200
            await served.until_idle()
            after = [client.statistics.num_cached_tokens for client in clients(served)]
            assert [now > then for now, then in zip(after, before, strict=True)].index(True) == places[name]


@in_loop
async def test_prompts_that_come_together_share_the_engine_that_computes_their_prefix() -> None:
    async with serving(num_engines=2, scheduler=MANY) as served:
        go_on = [hold(client) for client in clients(served)]
        chats = [asyncio.create_task(served.chat(text="the same words " * 10 + str(n))) for n in range(3)]
        await until(lambda: served.server_requests() == 3)
        await until(lambda: sum(client.num_requests for client in clients(served)) == 3)
        assert sorted(client.num_requests for client in clients(served)) == [0, 3]
        for release in go_on:
            release()
        assert [(await chat).status for chat in chats] == [200] * 3


@in_loop
async def test_load_is_spread_over_the_engines() -> None:
    async with serving(num_engines=2, scheduler=MANY) as served:
        go_on = [hold(client) for client in clients(served)]
        chats = [asyncio.create_task(served.chat(text=f"{n} has words of its own")) for n in range(6)]
        await until(lambda: sum(client.num_requests for client in clients(served)) == 6)
        assert [client.num_requests for client in clients(served)] == [3, 3]
        for release in go_on:
            release()
        assert [(await chat).status for chat in chats] == [200] * 6
        await served.until_idle()
        loads = list(served.state.engines._candidates())
        assert [(load._placed, load._expected) for load in loads] == [([], {})] * 2


@in_loop
async def test_one_engine_computes_nothing_for_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> bytes:
        raise AssertionError("digests of a prompt")

    monkeypatch.setattr(engines_module, "prompt_digests", fail)
    async with serving() as served:
        assert (await served.chat()).status == 200
    async with serving(num_engines=2) as served:
        assert (await served.chat()).status == 500, "the stand-in is used where there is a choice"


@in_loop
async def test_queue_has_room_for_the_sequences_of_all_engines() -> None:
    async with serving(num_engines=2, scheduler={"max_num_seqs": 2}, max_queued_requests=1) as served:
        go_on = [hold(client) for client in clients(served)]
        chats = [asyncio.create_task(served.chat(text=f"{n} text")) for n in range(5)]
        await until(lambda: served.server_requests() == 5)
        assert (await served.chat()).status == 429
        for release in go_on:
            release()
        assert [(await chat).status for chat in chats] == [200] * 5


# --- Deaths -------------------------------------------------------------------------------------


@in_loop
async def test_only_the_requests_of_an_engine_that_dies_end() -> None:
    async with serving(num_engines=2, scheduler=MANY) as served:
        go_on = [hold(client) for client in clients(served)]
        chats = [asyncio.create_task(served.chat(text=f"{n} text")) for n in range(4)]
        await until(lambda: [client.num_requests for client in clients(served)] == [2, 2])
        first = served.state.engines.supervisors[0]
        clients(served)[0].connection_lost(None)
        first._on_death(EngineDeadError("gone"))
        assert (first.state, served.state.engines.state) == (EngineState.RESTARTING, EngineState.READY)
        assert (await served.answer("GET", "/health/ready")).status == 200
        others = [asyncio.create_task(served.chat(text=f"{n} more")) for n in range(3)]
        await until(lambda: clients(served)[1].num_requests == 5)
        for release in go_on:
            release()
        answers = [await chat for chat in chats]
        assert sorted(answer.status for answer in answers) == [200, 200, 503, 503]
        assert {answer.code for answer in answers if answer.status == 503} == {"engine_dead"}
        assert [(await other).status for other in others] == [200] * 3


@in_loop
async def test_no_engine_that_lives_is_not_ready() -> None:
    async with serving(num_engines=2) as served:
        for supervisor in served.state.engines.supervisors:
            supervisor.state = EngineState.RESTARTING
        for answer in (await served.chat(), await served.answer("GET", "/health/ready")):
            assert (answer.status, answer.code) == (503, "engine_not_ready")
        assert served.state.status == "restarting"
        served.state.engines.supervisors[1].state = EngineState.READY
        assert (await served.chat()).status == 200


@in_loop
async def test_silent_engine_gets_no_requests_and_makes_the_server_not_ready() -> None:
    async with serving(num_engines=2) as served:
        silent, other = clients(served)
        silent.last_heard_s -= 100
        silent.data_received = lambda data: None  # type: ignore[method-assign]  # no heartbeat arrives
        for n in range(4):
            assert (await served.chat(text=f"{n} text")).status == 200
        assert (silent.statistics.num_prompt_tokens, other.statistics.num_finished["length"]) == (0, 4)
        assert (await served.answer("GET", "/health/ready")).code == "engine_not_answering"


@in_loop
async def test_stalled_engine_ends_liveness_though_the_other_one_computes() -> None:
    async with serving(num_engines=2) as served:
        stalled = served.state.engines.supervisors[1]
        stalled.stall_s = lambda: 1000.0  # type: ignore[method-assign]
        assert (await served.chat()).status == 200
        assert (await served.answer("GET", "/health/live")).code == "engine_stalled"


# --- Numbers and events -------------------------------------------------------------------------


@in_loop
async def test_metrics_and_events_are_those_of_each_engine() -> None:
    async with serving(num_engines=2, metrics_names="vllm") as served:
        for n in range(4):
            await served.chat(text=f"{n} text")
        await served.until_idle()
        text = (await served.answer("GET", "/metrics")).body.decode()
        for rank in "01":
            assert f'quire_generation_tokens_total{{engine="{rank}"}} 8.0' in text
            assert f'quire_engine_up{{engine="{rank}"}} 1.0' in text
            assert f'vllm:generation_tokens_total{{engine="{rank}",model_name="scripted"}} 8.0' in text
        assert text.count("# TYPE quire_generation_tokens_total") == 1
        assert "\nquire_admitted_requests 0.0" in text
        refused = await served.answer("GET", "/xray/events?engine=2")
        assert (refused.status, refused.json["error"]["param"]) == (400, "engine")
        watching = asyncio.create_task(served.raw(b"GET /xray/events?engine=1 HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        await until(lambda: clients(served)[1].engine.watcher is not None)
        assert clients(served)[0].engine.watcher is None
        watching.cancel()


# --- Life ---------------------------------------------------------------------------------------


class StandInClient:
    """An engine process that is ready when its gate opens. `ends`: how loading ends, by the engine's number."""

    made: list["StandInClient"]
    fails: dict[int, Exception]

    def __init__(self, on_death: Callable[[EngineDeadError], None]) -> None:
        self.die = on_death
        self.gate = asyncio.Event()
        self.is_stopped = False
        self.made.append(self)

    async def start(self, options: EngineOptions, *, is_replacement: bool = False) -> Any:
        self.options, self.is_replacement = options, is_replacement
        rank = options.data_parallel_rank or 0
        if rank in self.fails:
            raise self.fails[rank]
        await self.gate.wait()
        return SimpleNamespace(config=make_config())

    async def stop(self) -> None:
        self.is_stopped = True

    async def describe_end(self) -> str:
        return "the engine's process ended"


class StandInFrontEnd:
    num_loaded = 0

    @classmethod
    def load(cls, *arguments: Any) -> "StandInFrontEnd":
        cls.num_loaded += 1
        return cls()

    def warm_up(self) -> None:
        """Do nothing."""


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[StandInClient]:
    monkeypatch.setattr(supervisor_module, "EngineClient", StandInClient)
    monkeypatch.setattr(engines_module, "FrontEnd", StandInFrontEnd)
    StandInClient.made, StandInClient.fails, StandInFrontEnd.num_loaded = [], {}, 0
    return StandInClient.made


@in_loop
async def test_engine_that_starts_slowly_holds_up_neither_the_others_nor_their_front_end(
    stand_ins: list[StandInClient],
) -> None:
    engines = Engines(EngineOptions(data_parallel_size=3), lambda error: None)
    starting = asyncio.create_task(engines.start())
    await until(lambda: len(stand_ins) == 3)
    assert [client.options.data_parallel_rank for client in stand_ins] == [0, 1, 2]
    stand_ins[1].gate.set()
    stand_ins[2].gate.set()
    await until(lambda: [supervisor.is_ready for supervisor in engines.supervisors] == [False, True, True])
    assert (engines.is_ready, starting.done(), StandInFrontEnd.num_loaded) == (True, False, 1)
    assert engines.client is stand_ins[1]
    stand_ins[0].gate.set()
    await starting
    assert StandInFrontEnd.num_loaded == 1
    await engines.stop()


@in_loop
async def test_first_error_of_loading_ends_the_start_and_the_engines_sleep_on(stand_ins: list[StandInClient]) -> None:
    engines = Engines(EngineOptions(data_parallel_size=2), lambda error: None)
    engines.rest()
    StandInClient.fails = {1: ModelNotFoundError("it is gone")}
    with pytest.raises(ModelNotFoundError):
        await engines.wake_up()
    assert (engines.is_asleep, [client.is_stopped for client in stand_ins]) == (True, [True, True])
    with pytest.raises(ApiError, match="/wake_up"):
        _ = engines.client
    StandInClient.fails = {}
    waking = asyncio.create_task(engines.wake_up())
    await until(lambda: len(stand_ins) == 4)
    for client in stand_ins:
        client.gate.set()
    await waking
    assert [supervisor.is_ready for supervisor in engines.supervisors] == [True, True]
    await engines.sleep()
    assert engines.is_asleep
    await engines.stop()


@in_loop
async def test_engine_that_dies_too_often_ends_the_server_with_its_number(stand_ins: list[StandInClient]) -> None:
    lost: list[str] = []
    engines = Engines(EngineOptions(data_parallel_size=2), lambda error: lost.append(error.message))
    starting = asyncio.create_task(engines.start())
    await until(lambda: len(stand_ins) == 2)
    for client in stand_ins:
        client.gate.set()
    await starting
    for num_deaths in range(1, supervisor_module.MAX_DEATHS + 1):
        stand_ins[-1 if num_deaths > 1 else 1].die(EngineDeadError("gone"))
        assert engines.is_ready, "the other one goes on"
        if num_deaths < supervisor_module.MAX_DEATHS:
            await until(lambda num_deaths=num_deaths: len(stand_ins) == 2 + num_deaths)
            assert stand_ins[-1].is_replacement
            assert stand_ins[-1].options.data_parallel_rank == 1
            stand_ins[-1].gate.set()
            await until(lambda: engines.supervisors[1].is_ready)
    await until(lambda: lost)
    assert lost == ["engine 1: the engine's process ended, the 5th time within 60 s: giving up"]
    await engines.stop()


def test_chosen_memory_is_shared_and_other_options_stay() -> None:
    options = EngineOptions(data_parallel_size=2, kv_cache_memory_bytes=101, num_blocks_override=7)
    share = share_of(options, 1)
    assert (share.data_parallel_rank, share.kv_cache_memory_bytes, share.num_blocks_override) == (1, 50, 3)
    assert share_of(EngineOptions(num_blocks_override=7), 0) == EngineOptions(num_blocks_override=7)


@pytest.mark.parametrize(
    ("engine", "server", "advice"),
    [
        ({"data_parallel_size": 2, "device": "cuda:0"}, {}, "--device cuda gives each engine its own"),
        ({"data_parallel_size": 2}, {"keep_alive": "5m"}, "one model that stays loaded"),
    ],
)
def test_engines_that_cannot_have_a_share_are_refused(
    engine: dict[str, Any], server: dict[str, Any], advice: str
) -> None:
    with pytest.raises(ConfigError, match=advice):
        make_models({"tiny": EngineOptions(**engine)}, ServerOptions(**server), lambda error: None)


def test_engine_in_this_process_is_one() -> None:
    with pytest.raises(ConfigError, match=r"`quire serve` starts several; data_parallel_size=1 works"):
        LLM("absent", data_parallel_size=2)


def test_no_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size=0"):
        EngineOptions(data_parallel_size=0)
