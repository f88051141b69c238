"""Timelines: valid trace events, nested slices, matching flows."""

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from quire.engine.recorder import Recorder
from quire.insight.chrome import to_chrome
from quire.insight.trace import EngineTrace
from quire.sampling_params import SamplingParams
from tests.engine.builders import make_engine, run


def record(num_blocks: int) -> EngineTrace:
    engine, _ = make_engine(max_num_batched_tokens=16, num_blocks=num_blocks)
    recorder = Recorder(engine)
    for index in range(6):
        engine.add_request(str(index), list(range(40, 52 + index)), SamplingParams(max_tokens=9, ignore_eos=True))
    run(engine)
    return EngineTrace.parse(recorder.take().decode())


@pytest.fixture(scope="module")
def trace() -> EngineTrace:
    return record(30)


@pytest.fixture(scope="module")
def events(trace: EngineTrace) -> list[dict[str, Any]]:
    file = json.loads(json.dumps(to_chrome(trace)))
    return list(file["traceEvents"])


def test_every_event_has_the_fields_of_its_phase(events: list[dict[str, Any]]) -> None:
    fields = {"X": {"ts", "dur", "name"}, "M": {"name", "args"}, "C": {"ts", "args"}, "i": {"ts", "s"},
              "s": {"id", "ts", "name", "cat"}, "f": {"id", "ts", "name", "cat", "bp"}}  # fmt: skip
    for event in events:
        assert fields[event["ph"]] | {"pid", "tid"} <= event.keys()
        assert event.get("ts", 0) >= 0


def test_slices_of_a_track_nest(events: list[dict[str, Any]]) -> None:
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(tracks) == 1 + 6
    for slices in tracks.values():
        open_until: list[float] = []
        for start, end in sorted(slices, key=lambda item: (item[0], -item[1])):
            while open_until and open_until[-1] <= start + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6
            open_until.append(end)


def test_each_request_slice_is_reached_by_one_flow_from_its_step(
    trace: EngineTrace, events: list[dict[str, Any]]
) -> None:
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(len(step["requests"]) for step in trace.steps)
    slices = {
        (event["tid"], event["ts"]) for event in events if event["pid"] == 2 and event["name"] in ("prefill", "decode")
    }
    assert {(event["tid"], event["ts"]) for event in ends.values()} == slices


def test_counters_are_those_of_the_replayed_state(trace: EngineTrace, events: list[dict[str, Any]]) -> None:
    in_use = [event["args"]["in use"] for event in events if event["ph"] == "C" and event["name"] == "KV blocks"]
    assert in_use == [len(trace.state_after(step).references) for step in trace.steps]


def slices_of(trace: EngineTrace, request_id: str) -> list[dict[str, Any]]:
    events = to_chrome(trace)["traceEvents"]
    track = next(
        event["tid"] for event in events if event["ph"] == "M" and event["args"]["name"] == f"request {request_id}"
    )
    found = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (2, track)]
    return sorted(found, key=lambda event: float(event["ts"]))


def test_request_waits_from_its_arrival_and_after_a_preemption_until_its_next_step() -> None:
    trace = record(12)
    preempted = next(line for line in trace.lines if line.get("kind") == "preempt")
    slices = [event for event in slices_of(trace, preempted["id"]) if event["name"] != "detokenise"]
    names = [event["name"] for event in slices]
    assert names[0] == "waiting"
    assert names.count("waiting") == 1 + sum(
        line.get("kind") == "preempt" and line["id"] == preempted["id"] for line in trace.lines
    )
    admit = next(line for line in trace.lines if line.get("kind") == "admit" and line["id"] == preempted["id"])
    assert slices[0]["ts"] == pytest.approx(1e6 * (admit["arrival_s"] - trace.header["t"]), abs=1)
    for event, after in pairwise(slices):
        if event["name"] == "waiting":
            assert event["ts"] + event["dur"] == pytest.approx(after["ts"], abs=1)


def test_request_aborted_in_the_queue_waits_until_then() -> None:
    engine, _ = make_engine(max_num_seqs=1)
    recorder = Recorder(engine)
    for name in ("runs", "waits"):
        engine.add_request(name, [40, 41], SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    engine.abort_request("waits")
    run(engine)
    assert [event["name"] for event in slices_of(EngineTrace.parse(recorder.take().decode()), "waits")] == ["waiting"]


def test_phases_of_the_server_surround_those_of_the_engine(trace: EngineTrace) -> None:
    start, end = trace.header["t"], trace.lines[-1]["t"]
    arrival = next(line["arrival_s"] for line in trace.lines if line.get("kind") == "admit" and line["id"] == "0")
    phases = [
        ["receive", start, arrival - 2e-6],
        ["tokenise", arrival - 2e-6, arrival + 1e-3],
        ["send", start, end + 1],
    ]
    phases[2][1] = end - 1e-3  # clocks of two processes may disagree by a little
    line = {"t": end + 1, "kind": "served", "id": "0", "status": 200, "phases": phases}
    slices = slices_of(EngineTrace([*trace.lines, line]), "0")
    names = list(dict.fromkeys(event["name"] for event in slices))
    assert names == ["receive", "tokenise", "waiting", "prefill", "detokenise", "decode", "send"]
    whole = [event for event in slices if event["name"] != "detokenise"]
    for event, after in pairwise(whole):
        assert event["ts"] + event["dur"] <= after["ts"] + 1e-6


def test_share_of_the_limit_is_least_time_by_step_time() -> None:
    engine, _ = make_engine()
    recorder = Recorder(engine)
    engine.add_request("0", [40, 41], SamplingParams(max_tokens=2, ignore_eos=True))
    run(engine)
    trace = EngineTrace.parse(recorder.take().decode())
    first, second = trace.steps
    op = {"name": "Gemm", "microseconds": 1.0, "flops": 2_000, "num_bytes": 500, "arithmetic": "int8"}
    ops = {"t": first["t"], "kind": "ops", "id": "", "step_id": first["step_id"], "ops": [op]}
    limits = {"t": 0, "kind": "limits", "id": "", "read_bytes_per_s": 1e6, "flops_per_s": {"fp32": 1e6, "int8": 4e6}}
    lines = [trace.header, limits, *trace.lines[1:], ops]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    counters = [
        event for event in to_chrome(EngineTrace.parse(text))["traceEvents"] if event["name"] == "share of the limit"
    ]
    assert [event["args"]["%"] for event in counters] == [pytest.approx(100 * 500e-6 / first["duration_s"])]
    assert second["duration_s"] > 0
