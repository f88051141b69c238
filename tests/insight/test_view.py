"""Pictures of steps: their cells, against hand-made batches and the scheduler's own blocks."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quire.engine.recorder import Recorder
from quire.insight.picture import to_html
from quire.insight.trace import Trace
from quire.insight.view import VIEWS, view_ops, view_step
from quire.sampling_params import SamplingParams
from tests.cli.command_line import call
from tests.engine.builders import make_engine, run

PROMPT = list(range(40, 50))


def record(*prompts: list[int], max_tokens: int = 4, **scheduler: int) -> tuple[Trace, bytes]:
    engine, _ = make_engine(multi_step_decode=1, **scheduler)
    recorder = Recorder(engine)
    for name, prompt in zip("abcdef", prompts, strict=False):
        engine.add_request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        engine.step()
    run(engine)
    data = recorder.take()
    return Trace.parse(data.decode()), data


def test_step_names_requests_that_wait() -> None:
    trace, _ = record(PROMPT, PROMPT[:4], max_num_seqs=1)
    waiting = [row for row in view_step(trace, trace.steps[1]).rows if "waits for" in row.remark]
    assert [row.label for row in waiting] == ["B b"]


def test_ops_without_timed_instructions_says_how_to_record_them() -> None:
    trace, _ = record(PROMPT)
    assert "--op-period 1" in view_ops(trace, trace.steps[0]).caption


@pytest.mark.parametrize("what", VIEWS)
def test_every_picture_is_text_svg_and_a_page_without_references(what: str) -> None:
    trace, _ = record(PROMPT, PROMPT)
    picture = VIEWS[what](trace, trace.steps[1])
    assert picture.title in picture.to_text()
    assert (Path(__file__).parents[2] / picture.source).is_file()
    ElementTree.fromstring(picture.to_svg())
    page = to_html(picture.title, [picture.to_svg()])
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_command_draws_a_recording_and_names_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(record(PROMPT)[1])
    result = call("view", "blocks", str(path), "--json", "--step", "1")
    assert json.loads(result.stdout)["schema"] == "quire.view/1"
    assert call("view", "mask", str(path), "--svg", str(tmp_path / "m.svg")).exit_code == 0
    assert (tmp_path / "m.svg").read_text().startswith("<svg")
    assert "no step 99" in call("view", "step", str(path), "--step", "99").stderr
    assert "is no trace of Quire" in call("view", "step", __file__).stderr
