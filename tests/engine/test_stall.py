"""Requests whose adapters are read while others run, and a scheduler that is stuck."""

from collections.abc import Sequence

import msgspec
import pytest

from quire.adapter import Adapter
from quire.engine import stall
from quire.engine.llm_engine import LLMEngine
from quire.errors import EngineDeadError
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from tests.engine.builders import ScriptedExecutor, make_config

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def executor() -> ScriptedExecutor:
    return ScriptedExecutor(make_config(max_num_seqs=2).scheduler)


@pytest.fixture
def engine(executor: ScriptedExecutor) -> LLMEngine:
    return LLMEngine(make_config({"enable_lora": True}, max_num_seqs=2), executor)


def submit(engine: LLMEngine, request_id: str, digest: str | None = None) -> None:
    prepared = engine.input_processor.prepare(request_id, {"prompt_token_ids": [97, 98, 99]}, PARAMS)
    adapter = None if digest is None else Adapter("x", "/x", digest)
    spec = msgspec.structs.replace(prepared.request.spec, adapter=adapter)
    engine.submit(engine.input_processor.complete(spec, streams=True))


def ended(engine: LLMEngine, num_steps: int) -> list[str]:
    """Ids of requests that end within some steps."""
    found = []
    for _ in range(num_steps):
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            found += [output.request_id] if output.finished else []
    return found


def test_request_waits_for_its_adapter_and_later_ones_overtake_it(
    engine: LLMEngine, executor: ScriptedExecutor
) -> None:
    executor.unread = {"one"}
    submit(engine, "first", "one")
    submit(engine, "second")
    submit(engine, "third", "two")
    assert sorted(ended(engine, 20)) == ["second", "third"]
    assert engine.has_unfinished_requests()
    executor.unread = set()
    assert ended(engine, 20) == ["first"]
    assert not engine.has_unfinished_requests()


def test_adapters_of_the_next_requests_are_read_and_no_more(
    engine: LLMEngine, executor: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    read = executor.read_adapters

    def noted(wanted: Sequence[Adapter], wait_s: float) -> set[str]:
        asked.append([adapter.digest for adapter in wanted])
        return read(wanted, wait_s)

    monkeypatch.setattr(executor, "read_adapters", noted)
    executor.unread = {f"adapter {number}" for number in range(5)}
    for number in range(5):
        submit(engine, f"request {number}", f"adapter {number}")
    submit(engine, "again", "adapter 1")
    engine.step()
    assert asked[-1] == ["adapter 0", "adapter 1"]
    executor.unread -= {"adapter 1"}
    engine.step()
    engine.step()
    # Two requests run with one of them; the next two of those that wait are read.
    assert asked[-1] == ["adapter 1", "adapter 0", "adapter 2"]
    executor.unread = set()
    assert len(ended(engine, 40)) == 6


def test_waiting_for_an_adapter_is_no_stall(
    engine: LLMEngine, executor: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall, "MAX_IDLE_STEPS", 3)
    executor.unread = {"one"}
    submit(engine, "first", "one")
    assert ended(engine, 10) == []
    engine.abort_request("first")
    assert ended(engine, 1) == ["first"]
    assert not engine.has_unfinished_requests()


def test_stuck_scheduler_is_an_error(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "MAX_IDLE_STEPS", 3)
    submit(engine, "first")
    monkeypatch.setattr(engine.scheduler.requests, "num_free_places", lambda: 0)
    ended(engine, 4)
    with pytest.raises(EngineDeadError, match="none can be scheduled"):
        ended(engine, 1)
