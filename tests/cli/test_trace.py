"""`quire trace`: recordings of a prompt and of a server, and what they are converted to."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.engine.recorder import Recorder
from quire.insight.chrome import TORCH
from quire.insight.trace import EngineTrace
from quire.sampling_params import SamplingParams
from tests.cli.command_line import call, parsed
from tests.cli.stub_server import Handler, stub_server
from tests.cli.tiny_directory import make_tiny_directory
from tests.engine.builders import make_engine


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    engine, _ = make_engine()
    recorder = Recorder(engine)
    engine.add_request("a", list(range(40, 50)), SamplingParams(max_tokens=3, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    path = tmp_path / "a.jsonl"
    path.write_bytes(recorder.take())
    return path


def test_prompt_is_recorded_with_text_and_timed_instructions(tmp_path: Path) -> None:
    model = make_tiny_directory(tmp_path / "model")
    path = tmp_path / "out.jsonl"
    result = call("trace", str(model), "hello", "-o", str(path), "--op-period", "1", "--max-tokens", "3", "--json")
    trace = EngineTrace.read(path)
    assert parsed(result)["num_steps"] == len(trace.steps) > 0
    assert all(share["text"] is not None for step in trace.steps for share in step["requests"])
    assert all(trace.ops_of(step) for step in trace.steps)
    limits = [line for line in trace.lines if line.get("kind") == "limits"]
    assert len(limits) == 1
    assert limits[0]["read_bytes_per_s"] > 0
    served = next(line for line in trace.lines if line.get("kind") == "served")
    assert [name for name, *_ in served["phases"]] == ["tokenise"]
    assert call("trace", str(path), "-o", str(tmp_path / "out.json")).exit_code == 0
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert len([event for event in events if event["name"] == "share of the limit"]) == len(trace.steps)


def test_recording_becomes_a_timeline_and_a_page(recording: Path, tmp_path: Path) -> None:
    assert call("trace", str(recording), "-o", str(tmp_path / "a.json")).exit_code == 0
    names = {event["name"] for event in json.loads((tmp_path / "a.json").read_text())["traceEvents"]}
    assert {f"step {step['step_id']}" for step in EngineTrace.read(recording).steps} <= names
    assert call("trace", str(recording), "-o", str(tmp_path / "a.html")).exit_code == 0
    assert '"quire_trace"' in (tmp_path / "a.html").read_text()


def test_operations_that_torch_profiler_sees_stand_inside_their_steps(tmp_path: Path) -> None:
    model, path = make_tiny_directory(tmp_path / "model"), tmp_path / "out.json"
    options = ("--torch-profiler", "--enforce-eager", "--max-tokens", "2", "-o", str(path))
    result = call("trace", str(model), "hello", *options)
    assert result.exit_code == 0, result.stderr
    slices = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    steps = [(item["ts"], item["ts"] + item["dur"]) for item in slices if item["name"].startswith("step ")]
    products = [item["ts"] for item in slices if item["pid"] == TORCH and item["name"] == "aten::linear"]
    assert len(products) >= len(steps) > 0
    assert all(any(start <= at <= end for start, end in steps) for at in products)


def test_server_is_recorded_until_it_ends_the_stream(recording: Path, tmp_path: Path) -> None:
    lines = recording.read_text().splitlines()

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(b":\n\n" + "".join(f"data: {line}\n\n" for line in lines).encode())

    path = tmp_path / "server.jsonl"
    with stub_server(answer) as server:
        result = call("trace", "--attach", "--url", server.url, "-o", str(path))
    assert result.exit_code == 0, result.stderr
    assert path.read_text().splitlines() == lines
