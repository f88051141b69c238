"""`to_html`, and the replay in JavaScript against the replay in Python, on traces of a scripted engine."""

import json
from pathlib import Path
from typing import Any

from quire.engine.recorder import Recorder
from quire.insight.trace import State, Trace, replay
from quire.insight.trace_page import to_html
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


def recorded_trace() -> Trace:
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
    return Trace.parse((data + recorder.take()).decode())


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
    saved = Trace.parse(text)
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
