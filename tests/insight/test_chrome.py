"""Timelines: valid trace events, nested slices, matching flows."""

import json
from collections import defaultdict
from typing import Any

import pytest

from quire.engine.recorder import Recorder
from quire.insight.chrome import to_chrome
from quire.insight.trace import Trace
from quire.sampling_params import SamplingParams
from tests.engine.builders import make_engine, run


@pytest.fixture(scope="module")
def trace() -> Trace:
    engine, _ = make_engine(max_num_batched_tokens=16, num_blocks=30)
    recorder = Recorder(engine)
    for index in range(6):
        engine.add_request(str(index), list(range(40, 52 + index)), SamplingParams(max_tokens=9, ignore_eos=True))
    run(engine)
    return Trace.parse(recorder.take().decode())


@pytest.fixture(scope="module")
def events(trace: Trace) -> list[dict[str, Any]]:
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


def test_each_request_slice_is_reached_by_one_flow_from_its_step(trace: Trace, events: list[dict[str, Any]]) -> None:
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(len(step["requests"]) for step in trace.steps)
    slices = {(event["tid"], event["ts"]) for event in events if event["ph"] == "X" and event["pid"] == 2}
    assert {(event["tid"], event["ts"]) for event in ends.values()} == slices


def test_counters_are_those_of_the_replayed_state(trace: Trace, events: list[dict[str, Any]]) -> None:
    in_use = [event["args"]["in use"] for event in events if event["ph"] == "C" and event["name"] == "KV blocks"]
    assert in_use == [len(trace.state_after(step).references) for step in trace.steps]
