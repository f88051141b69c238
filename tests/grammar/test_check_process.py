"""Hostile grammars: each is compiled or refused with a reason in time, and the next one is answered."""

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.soak.inputs.hostile_forms import ENDLESS, HOSTILE
from quire.errors import InvalidParameterError, QueueFullError
from quire.grammar.check_process import CheckProcess, Refused, shared_check_process, short_reason
from quire.structured_outputs import StructuredOutputsParams

Form = StructuredOutputsParams
GOOD = Form(regex="ab+")


def ask(process: CheckProcess, form: StructuredOutputsParams) -> str | Refused:
    """The answer, however busy the machine is."""
    for _ in range(30):
        with contextlib.suppress(QueueFullError):
            return process.check(form)
    raise AssertionError("no answer")


@pytest.fixture(scope="module")
def process() -> Iterator[CheckProcess]:
    process = CheckProcess(deadline_s=5)
    yield process
    process.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_compiled_or_refused(process: CheckProcess, name: str) -> None:
    try:
        form = HOSTILE[name]()
    except InvalidParameterError:
        return
    answer = ask(process, form)
    if isinstance(answer, Refused):
        assert 0 < len(answer.reason) <= 200
        assert answer.reason.isprintable()
        assert "0x" not in answer.reason
        assert ".rs" not in answer.reason
    assert isinstance(ask(process, GOOD), str), "the next one is answered"


def test_there_are_many() -> None:
    assert len(HOSTILE) >= 60


def test_one_without_end_is_given_up_at_the_deadline() -> None:
    process = CheckProcess(deadline_s=0.5)
    answer = ask(process, ENDLESS)
    assert isinstance(answer, Refused)
    assert "deadline of 0.5 s" in answer.reason
    assert isinstance(process.check(GOOD), str)
    process.close()


def test_others_wait_no_longer_than_the_deadline() -> None:
    process = CheckProcess(deadline_s=1.0)
    process.check(GOOD)
    process._turn.acquire()  # as another thread's grammar does
    with pytest.raises(QueueFullError, match="within 1 s"):
        process.check(GOOD)
    process._turn.release()
    assert isinstance(process.check(GOOD), str)
    process.close()


def test_a_process_that_got_no_time_to_compute_refuses_nothing() -> None:
    """On a machine that is too busy a good grammar must not be called a bad one."""
    process = CheckProcess(deadline_s=4.0)
    process.check(GOOD)
    child = process._process
    assert child is not None
    child.send_signal(signal.SIGSTOP)
    with pytest.raises(QueueFullError, match="within 4 s"):
        process.check(Form(regex="abc"))
    assert isinstance(process.check(GOOD), str)
    process.close()


def test_a_process_that_was_killed_is_replaced(process: CheckProcess) -> None:
    process.check(GOOD)
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert isinstance(process.check(GOOD), str)


def test_files_where_it_is_started_stand_for_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not the library')")
    monkeypatch.chdir(tmp_path)
    process = CheckProcess()
    assert isinstance(ask(process, GOOD), str)
    process.close()


def test_closing_ends_the_process() -> None:
    process = CheckProcess()
    process.check(GOOD)
    child = process._process
    assert child is not None
    assert child.poll() is None
    process.close()
    assert child.poll() is not None


def test_one_process_for_all() -> None:
    assert shared_check_process() is shared_check_process()


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (Form(regex="(a"), "unclosed group"),
        (Form(regex="(?=a)b"), "look-around"),
        (Form(regex=r"[^\s\S]"), "no text matches it"),
        (Form(json={"if": {}}), r'Unimplemented keys: \["if"\]'),
        (Form(json={"$ref": "#"}), "no text matches it"),
        (Form(grammar="start: nope"), "nope"),
    ],
)
def test_reasons(process: CheckProcess, form: StructuredOutputsParams, says: str) -> None:
    answer = process.check(form)
    assert isinstance(answer, Refused)
    assert re.search(says, answer.reason), answer.reason


def test_whitespace_options_are_asked_for(process: CheckProcess) -> None:
    default, none, own = (
        process.check(Form(json={}, **fields))
        for fields in ({}, {"disable_any_whitespace": True}, {"whitespace_pattern": "_"})
    )
    assert len({default, none, own}) == 3
    refused = process.check(Form(json={}, whitespace_pattern="("))
    assert isinstance(refused, Refused)


def test_a_reason_names_no_option_that_no_client_has() -> None:
    said = "lexer precomputation failed; either increase limits.initial_lexer_fuel or disable precompute_large_lexemes"
    assert short_reason(said) == "its patterns are too large together: use fewer, or shorter repetitions"
