"""A side's process: asked and answered, still while it waits, and every way it can fail is told."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.side_process import SideError, SideProcess, SideSpec

COMMAND = (sys.executable, "-m", "tests.benchmarks.fake_side")
LOAD: dict[str, Any] = {"timeout_s": 60.0, "num_threads": 2, "max_num_seqs": 2, "max_model_len": 64}


def start(tmp_path: Path, **options: Any) -> SideProcess:
    return SideProcess(SideSpec("fake", COMMAND, "model", options, {"FAKE_SIDE": "set"}), tmp_path / "log")


@pytest.fixture
def side(tmp_path: Path) -> Iterator[SideProcess]:
    with start(tmp_path) as side:
        side.load(**LOAD)
        yield side


def state(side: SideProcess) -> str:
    """The letter in /proc: T is stopped."""
    return Path(f"/proc/{side._process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_load_and_measure(side: SideProcess) -> None:
    assert side.version == "0"
    assert side.settings == {"threads": 2, "variable": "set"}
    assert 0 <= side.load_s < side.start_s
    answer = side.request("measure", timeout_s=60, prompts=[[1, 2], [3]], num_generated=5)
    assert answer["tokens"] == 8
    assert answer["seconds"] > 0.003
    assert answer["token_ids"] == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_it_is_stopped_while_it_waits(side: SideProcess) -> None:
    deadline = time.monotonic() + 10
    while state(side) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state(side) == "T"
    before_s = side.answering_s
    side.request("measure", timeout_s=60, prompts=[[1]], num_generated=0)
    assert side.answering_s > before_s


def test_leaving_ends_the_process(tmp_path: Path) -> None:
    with start(tmp_path) as side:
        side.load(**LOAD)
    assert side._process.poll() is not None


@pytest.mark.parametrize(
    ("fails", "message"),
    [("load", r"fake: ValueError: no such model\n.*Traceback"), ("import", r"fake ended during 'load'\n.*chatter")],
)
def test_a_side_that_does_not_start(tmp_path: Path, fails: str, message: str) -> None:
    with start(tmp_path, fails=fails) as side, pytest.raises(SideError, match=f"(?s){message}"):
        side.load(**LOAD)


def test_a_side_that_cannot_measure(tmp_path: Path) -> None:
    with start(tmp_path, fails="measure") as side:
        side.load(**LOAD)
        with pytest.raises(SideError, match="out of memory"):
            side.request("measure", timeout_s=60, prompts=[[1]], num_generated=5)


def test_a_side_that_never_answers(tmp_path: Path) -> None:
    with start(tmp_path) as side, pytest.raises(SideError, match=r"no answer in 0 s"):
        side.load(**{**LOAD, "timeout_s": 0.0})
