"""Pictures of steps: their cells, against hand-made batches and the scheduler's own blocks."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quire.engine.recorder import Recorder
from quire.insight.picture import Picture, to_html
from quire.insight.trace import EngineTrace
from quire.insight.view import (
    MAX_BLOCKS,
    VIEWS,
    _num_pairs,
    fullest_step,
    view_blocks,
    view_layers,
    view_mask,
    view_ops,
    view_step,
)
from quire.sampling_params import SamplingParams
from tests.cli.command_line import call
from tests.engine.builders import make_engine, run

PROMPT = list(range(40, 50))


def record(*prompts: list[int], max_tokens: int = 4, **scheduler: int) -> tuple[EngineTrace, bytes]:
    engine, _ = make_engine(multi_step_decode=1, **scheduler)
    recorder = Recorder(engine)
    for name, prompt in zip("abcdef", prompts, strict=False):
        engine.add_request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        engine.step()
    run(engine)
    data = recorder.take()
    return EngineTrace.parse(data.decode()), data


def test_step_names_requests_that_wait() -> None:
    trace, _ = record(PROMPT, PROMPT[:4], max_num_seqs=1)
    waiting = [row for row in view_step(trace, trace.steps[1]).rows if "waits for" in row.remark]
    assert [row.label for row in waiting] == ["B b"]


def rows_of(picture: Picture) -> dict[str, str]:
    """Return each row's cells as the terminal shows them."""
    return {row.label: "".join(picture.kinds[cell].character for cell in row.cells) for row in picture.rows}


def test_mask_of_two_requests_is_block_diagonal_and_tells_chunks_apart() -> None:
    trace, _ = record(PROMPT, list(range(70, 76)), max_num_batched_tokens=4, max_num_seqs=2)
    step = next(step for step in trace.steps if len(step["requests"]) == 2 and step["requests"][1]["start"] == 2)
    picture = view_mask(trace, step)
    rows = rows_of(picture)
    assert rows["keys of"].startswith("A" * 11 + "B")
    decode, *chunk = list(rows.values())[1:]
    assert decode.rstrip() == "▒▒▒▒▓▓▓▓▒▒█"  # chunks of 4, 4 and 2 tokens, then the step's own
    assert [row[:11].strip() for row in chunk] == [""] * len(chunk)
    assert [row[11:] for row in chunk] == ["▒▒█··", "▒▒██·", "▒▒███"]
    assert "4 · 16 = 64 cells kernels compute 23" in picture.caption  # 11 of A, and 3 + 4 + 5 of B


def test_mask_shows_a_cached_prefix_as_such() -> None:
    trace, _ = record([*range(40, 60)], [*range(40, 60)], block_size=4)
    hit = next(line for line in trace.lines if line.get("kind") == "admit" and line["num_cached_tokens"])
    step = next(step for step in trace.steps if any(share["id"] == hit["id"] for share in step["requests"]))
    row = next(cells for label, cells in rows_of(view_mask(trace, step)).items() if label.startswith("B token"))
    assert row.count("░") == hit["num_cached_tokens"]


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_pairs_of_a_mask_are_those_counted_one_by_one(window: int | None) -> None:
    for start, end in ((0, 1), (0, 7), (3, 9), (6, 6), (2, 200)):
        counted = sum(min(position, window or position) for position in range(start + 1, end + 1))
        assert _num_pairs(end, window) - _num_pairs(start, window) == counted


def test_numbers_of_a_recording_allocate_nothing() -> None:
    """They may be anyone's."""
    trace, _ = record(PROMPT)
    step, huge = trace.steps[1], 10**12
    (share,) = step["requests"]
    many = {**step, "requests": [{**share, "start": huge, "count": huge}]}
    mask = view_mask(trace, many)
    assert f"compute {huge * huge + huge * (huge + 1) // 2}" in mask.caption
    assert len(mask.rows) <= 50
    trace.header["engine"]["num_blocks"] = huge
    step["requests"][0]["tables"][0][1].append(huge - 1)
    blocks = view_blocks(trace, step)
    assert len(blocks.rows) <= MAX_BLOCKS // 64 + 2
    assert blocks.rows[MAX_BLOCKS // 64].remark == "not drawn"


def test_mask_of_long_requests_keeps_a_column_and_a_row_for_each() -> None:
    trace, _ = record([*range(40, 100)] * 4, PROMPT[:2], max_num_batched_tokens=512, max_model_len=512)
    step = fullest_step(trace)
    assert len(step["requests"]) == 2
    labels = [row.label[0] for row in view_mask(trace, step).rows[1:]]
    assert sorted(set(labels)) == ["A", "B"]
    assert max(len(row.cells) for row in view_mask(trace, step).rows) <= 96 + 2


def test_layers_add_up_to_the_time_of_all_instructions() -> None:
    trace, _ = record(PROMPT)
    step = trace.steps[0]
    ops = [{"name": "Gemm: x", "arithmetic": "fp32", "microseconds": us, "flops": 2e6, "num_bytes": 10, "layer": layer}
           for us, layer in ((100.0, None), (300.0, 0), (300.0, 0), (300.0, 1))]  # fmt: skip
    trace._ops[step["step_id"]] = ops
    picture = view_layers(trace, step)
    assert [(row.label, len(row.cells)) for row in picture.rows] == [("layer 0", 24), ("layer 1", 12), ("outside", 4)]
    assert "600.0 µs" in picture.rows[0].remark


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
    assert "`quire view ops`: leave it out" in call("view", "mask", str(path), "--by", "layer").stderr
    assert "no step 99" in call("view", "step", str(path), "--step", "99").stderr
    assert "is no trace of Quire" in call("view", "step", __file__).stderr
