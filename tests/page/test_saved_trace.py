"""`to_html`, and the replay in JavaScript against the replay in Python, on traces of a scripted engine."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from quire.engine.recorder import Recorder
from quire.insight.trace import EngineTrace, State, replay, to_html
from quire.insight.view import _block
from quire.sampling_params import SamplingParams
from tests.engine.builders import make_engine
from tests.page.conftest import OpenPage

STATES = """() => {
  const found = [];
  for (let at = 0; at < xray.recording.lines.length; at++) {
    const state = xray.recording.stateAt(at), sorted = (values) => [...values].sort((a, b) => a - b);
    const row = (r) => [r.id, r.num_prompt_tokens, r.num_tokens, r.num_computed, r.tables];
    const rows = [...state.requests.values()].map(row);
    const waiting = [...state.waiting].sort();
    found.push(structuredClone([rows, sorted(state.findable), sorted(state.cached()), waiting]));
  }
  return found;
}"""


def recorded_trace() -> EngineTrace:
    """Record a trace with shared prefixes, chunked prefill, preemptions and evictions: few blocks for many requests."""
    engine, _ = make_engine(num_blocks=14, block_size=4, max_num_seqs=5, max_num_batched_tokens=16, max_model_len=48)
    recorder = Recorder(engine, with_text=True)
    data = recorder.take()
    for number in range(9):
        text = "the same beginning, " + "abc"[: number % 3] + "</script>"[: number % 9]
        engine.add_request(f"r{number}", text, SamplingParams(max_tokens=6 + number, ignore_eos=True))
    for step in range(400):
        if not engine.has_unfinished_requests():
            break
        engine.step()
        if step == 7:
            engine.abort_request(["r0"])
        if step % 3 == 0:
            data += recorder.take()
    return EngineTrace.parse((data + recorder.take()).decode())


def state_as_lists(state: State) -> list[Any]:
    rows = [
        [r.request_id, r.num_prompt_tokens, r.num_tokens, r.num_computed, r.tables] for r in state.requests.values()
    ]
    return [rows, sorted(state.findable), sorted(state.cached), [list(item) for item in sorted(state.waiting.items())]]


def test_javascript_replays_every_state_that_python_replays(open_page: OpenPage, tmp_path: Path) -> None:
    trace = recorded_trace()
    assert {"arrive", "preempt", "evict", "cache", "share", "finish"} <= {line.get("kind") for line in trace.lines}
    (tmp_path / "trace.html").write_text(to_html(trace))
    page = open_page(f"file://{tmp_path}/trace.html", offline=True)
    expected = [state_as_lists(replay(trace.lines[: at + 1])) for at in range(len(trace.lines))]
    assert json.loads(json.dumps(page.evaluate(STATES))) == expected


def test_recording_stays_bounded_and_keeps_its_states(open_page: OpenPage, tmp_path: Path) -> None:
    trace = recorded_trace()
    (tmp_path / "trace.html").write_text(to_html(trace))
    page = open_page(f"file://{tmp_path}/trace.html", offline=True)
    num_steps, text, live = page.evaluate(
        """() => {
          const short = new xray.recording.constructor(8);
          for (const line of xray.recording.lines) short.add(structuredClone(line));
          return [short.steps.length, short.text(), JSON.stringify(short.live.describe().requests)];
        }"""
    )
    assert num_steps <= 9
    saved = EngineTrace.parse(text)
    assert len(saved.steps) == num_steps
    assert state_as_lists(replay(saved.lines)) == state_as_lists(replay(trace.lines))
    assert live == "[]"


def test_text_of_a_trace_ends_no_script(open_page: OpenPage, tmp_path: Path) -> None:
    trace = recorded_trace()
    trace.lines[0]["model"]["name"] = "</script><script>document.title = 'run'</script><!--"
    (tmp_path / "trace.html").write_text(to_html(trace))
    page = open_page(f"file://{tmp_path}/trace.html", offline=True)
    assert page.title() == "Trace of Quire"
    assert page.evaluate("xray.recording.lines[0].model.name") == trace.header["model"]["name"]


def open_trace(trace: EngineTrace, open_page: OpenPage, folder: Path, pane: str) -> Page:
    (folder / "trace.html").write_text(to_html(trace))
    page = open_page(f"file://{folder}/trace.html", offline=True)
    page.get_by_role("tab", name=pane).click()
    return page


def test_mask_is_one_matrix_with_a_block_for_each_request_on_its_diagonal(open_page: OpenPage, tmp_path: Path) -> None:
    trace = recorded_trace()
    step = max(trace.steps, key=lambda step: len(step["requests"]))
    page = open_trace(trace, open_page, tmp_path, "Mask")
    page.evaluate(f"xray.choose({step['step_id']})")
    frames = page.locator("#mask rect.frame")
    expect(frames).to_have_count(len(step["requests"]))
    places = page.evaluate(
        """() => [...document.querySelectorAll("#mask rect.frame")].map((one) =>
           ["x", "y", "width", "height"].map((name) => Number(one.getAttribute(name))))"""
    )
    for (x, y, width, height), (next_x, next_y, _, _) in pairwise(places):
        assert (next_x, next_y) == (pytest.approx(x + width), pytest.approx(y + height))
    keys = [share["start"] + share["count"] for share in step["requests"]]
    assert [width / places[0][2] for _, _, width, _ in places] == [pytest.approx(count / keys[0]) for count in keys]


def test_mask_tells_chunks_and_a_cached_prefix_apart(open_page: OpenPage, tmp_path: Path) -> None:
    trace = recorded_trace()
    page = open_trace(trace, open_page, tmp_path, "Mask")
    known = page.evaluate(
        "() => xray.recording.steps.map((step) => [step.step_id, [...xray.recording.history(step).entries()]])"
    )
    for step_id, requests in known:
        blocks = dict(requests)
        for share in trace.step(step_id)["requests"]:
            block = _block(trace, trace.step(step_id), share, "A")
            assert [list(chunk) for chunk in block.chunks] == blocks[share["id"]]["chunks"]
            assert block.num_cached == blocks[share["id"]]["cached"]


def timed_trace() -> EngineTrace:
    """Record a trace of one request, with the server's phases, and the instructions of two layers with experts."""
    engine, _ = make_engine(multi_step_decode=1)
    recorder = Recorder(engine)
    engine.add_request("r0", [40, 41, 42], SamplingParams(max_tokens=3, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    trace = EngineTrace.parse(recorder.take().decode())
    first, last = trace.steps[0], trace.steps[-1]
    begin, end = first["t"] - first["duration_s"], last["t"]
    phases = [["receive", begin - 3, begin - 2], ["tokenise", begin - 2, begin - 1], ["send", end, end + 1]]
    op = {"arithmetic": "int8", "flops": 8, "num_bytes": 2, "expert_loads": []}
    ops = [
        {**op, "name": "Embed: x", "microseconds": 5.0, "layer": None},
        {**op, "name": "Gemm: x", "microseconds": 20.0, "layer": 0},
        {**op, "name": "Route: x", "microseconds": 10.0, "layer": 0, "expert_loads": [3, 0, 1, 0]},
        {**op, "name": "Gemm: x", "microseconds": 15.0, "layer": 1},
    ]
    lines = [{"t": end, "kind": "ops", "id": "", "step_id": last["step_id"], "ops": ops},
             {"t": end + 1, "kind": "served", "id": "r0", "status": 200, "phases": phases}]  # fmt: skip
    return EngineTrace.parse("".join(json.dumps(line) + "\n" for line in [*trace.lines, *lines]))


def test_instructions_are_added_up_by_layer(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_trace(timed_trace(), open_page, tmp_path, "Ops")
    page.get_by_label("Add up by").select_option("layer")
    rows = page.locator("table.numbers tbody tr")
    expect(rows.locator("td:first-child")).to_have_text(["0", "1", "outside"])
    expect(rows.locator("td:nth-child(4)")).to_have_text([" 60.0 %", " 30.0 %", " 10.0 %"])


def test_experts_show_their_tokens(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_trace(timed_trace(), open_page, tmp_path, "Ops")
    expect(page.locator("#experts rect")).to_have_count(4)
    assert page.locator("#experts rect title").all_text_contents()[0] == "layer 0, expert 0: 3 tokens"
    expect(page.locator("#pane")).to_contain_text("2.0 experts of a layer were chosen by none")


def test_way_of_a_request_runs_from_receiving_to_sending(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_trace(timed_trace(), open_page, tmp_path, "Requests")
    way = page.evaluate("() => xray.recording.way('r0')")
    names = [part["name"] for part in way]
    assert list(dict.fromkeys(name for name in names if name not in ("wait", "between steps"))) == [
        "receive", "tokenise", "prefill", "decode", "send",
    ]  # fmt: skip
    assert all(one["to"] <= other["from"] + 1e-3 for one, other in pairwise(way))
    assert all(one["from"] <= one["to"] for one in way)
    expect(page.locator("#ways tbody tr")).to_contain_text("decode ×2")
    expect(page.locator("#ways tbody tr")).to_contain_text("detokenise, within the steps")
