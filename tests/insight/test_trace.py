"""Traces: what a recorder writes, replayed, equals the scheduler's own state; damaged files are refused."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from quire.engine.llm_engine import LLMEngine
from quire.engine.recorder import Recorder
from quire.events import EventKind, OpTime
from quire.insight.trace import EngineTrace, State, TraceError
from quire.sampling_params import SamplingParams
from quire.types import SchedulerOutput, StepResult
from tests.engine.builders import make_engine, run

SHARED = list(range(40, 60))


def add(engine: LLMEngine, name: str, prompt: list[int], max_tokens: int = 6, n: int = 1) -> None:
    engine.add_request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=1, n=n))


def assert_same_state(state: State, engine: LLMEngine) -> None:
    blocks = engine.scheduler.blocks
    assert {name: item.tables for name, item in state.requests.items()} == {
        request.request_id: request.blocks.tables for request in engine.scheduler.requests.running
    }
    counts = blocks.pool.reference_counts
    assert dict(state.references) == {block: count for block, count in enumerate(counts) if block and count}
    assert state.cached == {block for block in blocks.pool.free_ids() if blocks.cache.holds(block)}
    assert state.waiting.keys() == engine.scheduler.requests.waiting_since_s().keys()
    for name, item in state.requests.items():
        request = engine.scheduler.get(name)
        assert request is not None
        assert (item.num_computed, item.num_tokens) == (request.num_computed_tokens, request.num_tokens)


@pytest.mark.parametrize("seed", range(12))
def test_replayed_state_equals_the_schedulers_after_every_step(seed: int) -> None:
    draw = random.Random(seed)
    engine, executor = make_engine(
        num_blocks=draw.choice([24, 60]),
        max_num_batched_tokens=draw.choice([8, 64]),
        multi_step_decode=draw.choice([1, 4]),
        num_host_blocks=draw.choice([0, 40]),
        max_disk_bytes=draw.choice([0, 1]),
    )
    executor.num_disk_steps = lambda: draw.randint(1, 3)
    add(engine, "early", SHARED[:7])
    engine.step()
    add(engine, "queued", SHARED[:9])
    recorder = Recorder(engine)  # begins while a request runs
    text, num_added = recorder.take().decode(), 0
    while num_added < 25 or engine.has_unfinished_requests():
        if num_added < 25 and draw.random() < 0.5:
            prompt = SHARED[: draw.randrange(1, 20)] + [draw.randrange(97, 120) for _ in range(draw.randrange(6))]
            add(engine, str(num_added), prompt, draw.randrange(1, 12), n=draw.choice([1, 1, 1, 2]))
            num_added += 1
        if num_added and draw.random() < 0.05:
            engine.abort_request(str(draw.randrange(num_added)))
        engine.step()
        text += recorder.take().decode()
        state = State.of_header(json.loads(text.split("\n", 1)[0]))
        for line in EngineTrace.parse(text).lines[1:]:
            state.apply(line)
        assert_same_state(state, engine)


def test_step_lines_say_what_each_request_computed() -> None:
    engine, _ = make_engine(max_num_batched_tokens=8)
    recorder = Recorder(engine, with_text=True)
    add(engine, "a", SHARED[:12], max_tokens=2)
    run(engine)
    trace = EngineTrace.parse(recorder.take().decode())
    shares = [(share["start"], share["count"], len(share["new"])) for step in trace.steps for share in step["requests"]]
    assert shares == [(0, 8, 0), (8, 4, 1), (12, 1, 1)]
    assert trace.steps[0]["new_requests"][0]["text"] == [chr(token_id) for token_id in SHARED[:12]]
    assert trace.state_after(trace.steps[-1]).requests["a"].num_computed == 13
    assert trace.lines[-1]["kind"] == "finish"


def test_lines_without_text_have_numbers_of_tokens_only() -> None:
    engine, _ = make_engine(num_host_blocks=40, max_disk_bytes=1)
    recorder = Recorder(engine)
    add(engine, "a", SHARED, max_tokens=3, n=2)
    run(engine)
    loads = OpTime("Route: x", 1.0, 8, 2, "fp32", expert_loads=(0, 3, 0, 1))
    engine.events.record(EventKind.OPS, step_id=1, ops=[loads])
    lines = [json.loads(line) for line in recorder.take().splitlines()]
    steps = [line for line in lines if line.get("kind") == "step"]
    shares = [share for step in steps for share in step["requests"]]
    assert {token for share in shares for token in share["new"]} == {None}
    assert sum(len(share["new"]) for share in shares) == 6
    assert (
        {share["text"] for share in shares}
        == {item["text"] for step in steps for item in step["new_requests"]}
        == {None}
    )
    assert lines[-1]["ops"][0]["expert_loads"] == [3, 1, 0, 0], "which experts a token chose tells which token it is"
    assert not any(word in str(lines) for word in ("digest", "client", "salt"))


def test_client_reads_its_own_ids_and_lasting_names_of_other_requests() -> None:
    engine, _ = make_engine(multi_step_decode=1)
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1, n=2)
    engine.add_request("a", SHARED, params, client_id="ann")
    engine.step()
    recorder = Recorder(engine, reader="bob")
    engine.add_request("b", SHARED, params, client_id="bob")
    recorder.meet(engine.scheduler.requests.by_id["b"])

    def ids(data: bytes) -> set[str]:
        lines = [json.loads(line) for line in data.splitlines()]
        shares = [item for line in lines for item in line.get("requests", ())]
        return {line["id"] for line in lines if line.get("id")} | {share["id"] for share in shares}

    recorder.take_each()
    engine.step()
    engine.step()
    of_bob = ids(recorder.take_each()["bob"])
    assert {name for name in of_bob if not name.startswith("r")} == {"b", "b/1"}
    recorder.begin("ann")
    both = recorder.take_each()
    assert ids(both["ann"]) >= {"a", "a/1"}
    assert both["bob"] == b""
    recorder.close()
    assert engine.watcher is None
    recorder.begin("bob")
    assert ids(recorder.take_each()["bob"]) == of_bob
    recorder.begin("eve")
    assert not {"a", "b"} & ids(recorder.take_each()["eve"])
    run(engine)
    assert ids(recorder.take_each()["bob"]) == of_bob


def test_names_of_ended_requests_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.recorder.KEPT_NAMES", 3)
    engine, _ = make_engine()
    recorder = Recorder(engine, reader="bob")
    engine.add_request("long", SHARED, SamplingParams(max_tokens=90, ignore_eos=True), client_id="bob")
    recorder.meet(engine.scheduler.requests.by_id["long"])
    for number in range(20):
        add(engine, str(number), SHARED, max_tokens=1)
        engine.step()
        lines = recorder.take_each()["bob"]
    assert len(recorder._shown) <= 7
    assert b'"id":"long"' in lines, "one that runs is known however many came since"


def test_closed_recorder_leaves_the_engine_unwatched() -> None:
    engine, _ = make_engine()
    recorder = Recorder(engine, op_period=4)
    assert engine.watcher is not None
    recorder.close()
    assert engine.watcher is None
    assert engine.op_period == 0


def test_recorder_with_an_interval_times_a_step_once_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("quire.engine.recorder.time.monotonic", lambda: now[0])
    engine, _ = make_engine(multi_step_decode=1)
    recorder = Recorder(engine, op_interval_s=0.5)
    timed: list[bool] = []
    note = engine.watcher
    assert note is not None

    def watch(output: SchedulerOutput, result: StepResult) -> None:
        timed.append(output.times_ops)
        note(output, result)

    set_watcher = engine.watch
    engine.watch = lambda watcher, op_period=0: set_watcher(watcher and watch, op_period)  # type: ignore[method-assign]
    engine.watch(watch, engine.op_period)
    add(engine, "a", SHARED, max_tokens=12)
    while engine.has_unfinished_requests():
        now[0] += 0.2
        engine.step()
    assert timed[0]
    places = [at for at, is_timed in enumerate(timed) if is_timed]
    assert len(places) > 2
    assert all(other - one >= 3 for one, other in pairwise(places))
    recorder.close()
    assert engine.op_period == 0


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    engine, _ = make_engine()
    recorder = Recorder(engine)
    add(engine, "a", SHARED)
    run(engine)
    path = tmp_path / "a.jsonl"
    path.write_bytes(recorder.take())
    return path


def test_cut_file_is_read_up_to_the_cut(recording: Path) -> None:
    data = recording.read_bytes()
    recording.write_bytes(data[:-20])
    trace = EngineTrace.read(recording)
    assert trace.is_cut
    assert len(trace.lines) == data.count(b"\n") - 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no trace of Quire"),
        ("hello\n", "is no trace of Quire"),
        ('{"kind":"step"}\n', "is no trace of Quire"),
        ('{"quire_trace":99}\n', "has trace format 99, this version reads up to 1: upgrade Quire"),
        ('{"quire_trace":1}\nnonsense\n{}\n', "line 2, is no event"),
    ],
)
def test_damaged_or_foreign_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        EngineTrace.read(path)


def test_missing_file_and_missing_step_are_named(tmp_path: Path, recording: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        EngineTrace.read(tmp_path / "none.jsonl")
    trace = EngineTrace.read(recording)
    with pytest.raises(TraceError, match=f"no step 77: the trace has 1 … {trace.steps[-1]['step_id']}"):
        trace.step(77)
