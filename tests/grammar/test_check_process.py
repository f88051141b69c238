"""Hostile grammars: each is compiled or refused with a reason in time, and the next one is answered."""

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.hostile_forms import ENDLESS, HOSTILE
from quire.errors import InvalidParameterError, QueueFullError
from quire.grammar.check_process import (
    MAX_PROCESSES,
    CheckProcess,
    CheckProcesses,
    RefusedGrammar,
    short_reason,
)
from quire.grammar.limits import MAX_GRAMMAR_SYMBOLS
from quire.structured_outputs import MAX_TEXT_BYTES, StructuredOutputsParams
from tests.processes import LIMIT_S, wait_until

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


def test_grammar_is_compiled_beside_one_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    is_answered = threading.Event()

    def check(process: CheckProcess, spec: StructuredOutputsParams) -> str:
        assert spec is GOOD or is_answered.wait(LIMIT_S), "the other grammar waits for this one"
        return "a grammar"

    monkeypatch.setattr(CheckProcess, "check", check)
    processes = CheckProcesses()
    thread = threading.Thread(target=processes.check, args=[ENDLESS])
    thread.start()
    wait_until(lambda: processes._turns._value < MAX_PROCESSES)
    assert processes.check(GOOD) == "a grammar"
    is_answered.set()
    thread.join()
    assert len(processes._free) == MAX_PROCESSES


def test_waiting_for_other_grammars_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.grammar.check_process.DEADLINE_S", 0.1)
    processes = CheckProcesses()
    for _ in range(MAX_PROCESSES):
        processes._turns.acquire()  # as other threads do
    with pytest.raises(QueueFullError, match=r"within 0\.1 s"):
        processes.check(GOOD)
    for _ in range(MAX_PROCESSES):
        processes._turns.release()
    assert isinstance(processes.check(GOOD), str)
    processes.close()


def test_grammar_is_not_refused_when_the_process_got_no_processor_time() -> None:
    process = CheckProcess(deadline_s=0.5)
    process.check(GOOD)
    child = process._process
    assert child is not None
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(QueueFullError, match="within 2 s"):
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
    names: list[str] = []
    schema: dict[str, Any] = {"type": "object", "properties": {}, "required": names, "additionalProperties": False}
    while len(json.dumps(schema)) < MAX_TEXT_BYTES - 3000:
        for _ in range(50):
            names.append(f"property{len(names)}")
            schema["properties"][names[-1]] = {"type": "string", "maxLength": 20}
    assert len(names) > 700
    words = [f"value{number}" for number in range(4000)]
    for spec in (Spec(json=schema), Spec(json={"enum": words}), Spec(choice=words[:1000])):
        assert isinstance(process.check(spec), str)
    answer = process.check(Spec(json={"type": "object", "properties": {f"p{number}": {} for number in range(5000)}}))
    assert isinstance(answer, RefusedGrammar)
    assert f"number of symbols) too big (limit for this grammar: {MAX_GRAMMAR_SYMBOLS})" in answer.reason
    process.close()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (Spec(json={"type": "object", "properties": {f"p{number}": {} for number in range(1000)}}), "row has .* items"),
        (Spec(regex="[ab]{3}(c{60000})"), "determines more than 16384 bytes"),
        (Spec(json={"const": "x" * 20_000}), "determines more than 16384 bytes"),
    ],
)
def test_grammar_that_breaks_a_limit_soon_is_refused(process: CheckProcess, spec: Spec, reason: str) -> None:
    answer = ask(process, spec)
    assert isinstance(answer, RefusedGrammar)
    assert re.search(reason, answer.reason), answer.reason
