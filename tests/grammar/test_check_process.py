"""Hostile grammars: each is compiled or refused with a reason in time, and the next one is answered."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.hostile_forms import ENDLESS, HOSTILE
from quire.errors import InvalidParameterError, QueueFullError
from quire.grammar.check_process import CheckProcess, RefusedGrammar, short_reason
from quire.grammar.limits import MAX_GRAMMAR_SYMBOLS
from quire.structured_outputs import MAX_TEXT_BYTES, StructuredOutputsParams

Spec = StructuredOutputsParams
GOOD = Spec(regex="ab+")


def ask(process: CheckProcess, spec: StructuredOutputsParams) -> str | RefusedGrammar:
    """Return the answer, also on a busy machine."""
    for _ in range(30):
        with contextlib.suppress(QueueFullError):
            return process.check(spec)
    raise AssertionError("no answer")


@pytest.fixture(scope="module")
def process() -> Iterator[CheckProcess]:
    process = CheckProcess(deadline_s=2)
    yield process
    process.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_compiled_or_refused(process: CheckProcess, name: str) -> None:
    try:
        spec = HOSTILE[name]()
    except InvalidParameterError:
        return
    answer = ask(process, spec)
    if isinstance(answer, RefusedGrammar):
        assert 0 < len(answer.reason) <= 200
        assert answer.reason.isprintable()
        assert "0x" not in answer.reason
        assert ".rs" not in answer.reason
    assert isinstance(ask(process, GOOD), str)


def test_endless_compilation_is_refused_at_the_deadline() -> None:
    process = CheckProcess(deadline_s=0.5)
    answer = ask(process, ENDLESS)
    assert isinstance(answer, RefusedGrammar)
    assert "deadline of 0.5 s" in answer.reason
    assert isinstance(process.check(GOOD), str)
    process.close()


def test_waiting_for_another_grammar_ends_at_the_deadline() -> None:
    process = CheckProcess(deadline_s=1.0)
    process.check(GOOD)
    process._turn.acquire()  # as another thread does
    with pytest.raises(QueueFullError, match="within 1 s"):
        process.check(GOOD)
    process._turn.release()
    assert isinstance(process.check(GOOD), str)
    process.close()


def test_grammar_is_not_refused_when_the_process_got_no_processor_time() -> None:
    process = CheckProcess(deadline_s=1.0)
    process.check(GOOD)
    child = process._process
    assert child is not None
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(QueueFullError, match="within 1 s"):
        process.check(Spec(regex="abc"))
    assert isinstance(ask(process, GOOD), str)
    process.close()


def test_killed_process_is_replaced(process: CheckProcess) -> None:
    process.check(GOOD)
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert isinstance(process.check(GOOD), str)


def test_files_in_the_working_directory_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not the library')")
    monkeypatch.chdir(tmp_path)
    process = CheckProcess()
    assert isinstance(ask(process, GOOD), str)
    process.close()


def test_reason_names_no_option_that_clients_lack() -> None:
    said = "lexer precomputation failed; either increase limits.initial_lexer_fuel or disable precompute_large_lexemes"
    assert short_reason(said) == "its patterns are too large together: use fewer, or shorter repetitions"


def test_largest_schema_and_enum_are_compiled_and_more_symbols_refused() -> None:
    process = CheckProcess(deadline_s=30)
    schema: dict[str, Any] = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    while len(json.dumps(schema)) < MAX_TEXT_BYTES - 3000:
        for _ in range(50):
            schema["properties"][f"property{len(schema['properties'])}"] = {"type": "string", "maxLength": 20}
    assert len(schema["properties"]) > 1000
    words = [f"value{number}" for number in range(4000)]
    for spec in (Spec(json=schema), Spec(json={"enum": words}), Spec(choice=words[:1000])):
        assert isinstance(process.check(spec), str)
    answer = process.check(Spec(json={"type": "object", "properties": {f"p{number}": {} for number in range(5000)}}))
    assert isinstance(answer, RefusedGrammar)
    assert f"number of symbols) too big (limit for this grammar: {MAX_GRAMMAR_SYMBOLS})" in answer.reason
    process.close()
