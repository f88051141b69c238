"""Requests from files, pipes and standard input; a file of answers that survives cuts, full disks, wrong paths."""

import io
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cli.batch_run import (
    AnswerFile,
    BatchFileError,
    BatchRequest,
    answer_line,
    error_line,
    is_wrong,
    read_requests,
    succeeded,
)
from tests.cli.batch_inputs import read_lines, request, write_lines


def good(custom_id: str) -> dict[str, Any]:
    return answer_line(BatchRequest(1, custom_id), 200, "r", {"text": "ü\n"})


def bad(custom_id: str) -> dict[str, Any]:
    return error_line(BatchRequest(1, custom_id), "timeout", "too slow")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        (b"\xff\xfe\n", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        (request(None), "custom_id"),
        (request(""), "custom_id"),
        (request("a", method="GET"), "method"),
        (request("a", url="http://elsewhere/v1/x"), "url"),
        (request("a", url="//elsewhere/v1/chat"), "url"),
        (request("a", url="/v1/../secret"), "url"),
        (request("a", url="/v1/files\n"), "url"),
        (request("a", url=None), "url"),
        (request("a", body=[]), "body"),
        (request("a", body={"stream": True}), "stream"),
    ],
)
def test_bad_line_has_a_problem_and_no_body(tmp_path: Path, line: Any, problem: str) -> None:
    path = tmp_path / "in"
    if isinstance(line, bytes):
        path.write_bytes(line)
    else:
        write_lines(path, line)
    (found,) = read_requests(path)
    assert problem in (found.problem or "")
    assert found.body is None


def test_requests_are_read_from_a_pipe_and_from_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "in")
    text = json.dumps(request("a")) + "\n{\n"
    threading.Thread(target=(tmp_path / "in").write_text, args=(text,)).start()
    assert [line.custom_id for line in read_requests(tmp_path / "in")] == ["a", None]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert [line.custom_id for line in read_requests(Path("-"))] == ["a", None]


def test_source_without_requests_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    for path, message in (
        (tmp_path / "missing", "missing cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (write_lines(tmp_path / "in", ""), "has no requests"),
        (Path("/dev/zero"), "/dev/zero is neither a file nor a pipe"),
        (Path("-"), "standard input has no requests"),
    ):
        with pytest.raises(BatchFileError, match=message):
            read_requests(path)


@pytest.mark.parametrize(
    ("status", "code", "wrong"),
    [
        (400, "unknown_parameter", True),
        (400, "structured_outputs_failed", False),
        (413, "too_large", True),
        (404, "model_not_found", False),
        (429, "queue_full", False),
        (500, "internal_error", False),
    ],
)
def test_only_refused_requests_are_wrong(status: int, code: str, wrong: bool) -> None:
    line = answer_line(BatchRequest(1, "a"), status, "r", {"error": {"code": code}})
    assert (succeeded(line), is_wrong(line)) == (False, wrong)
    assert succeeded(good("a"))
    assert is_wrong(error_line(BatchRequest(1, "a"), "invalid_line", "not JSON"))
    assert not is_wrong(bad("a"))


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null", "/dev/zero", "pipe", ".", "missing/out"])
def test_output_that_is_no_file_is_an_error(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(BatchFileError, match="cannot be written" if "/out" in path else "is not a file"):
        AnswerFile(Path(path))


def test_opening_keeps_successes_and_removes_failures(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "out", good("a"), bad("b"), good("c"))
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    with AnswerFile(tmp_path / "link") as answers:
        assert set(answers.done) == {"a", "c"}
        answers.write(good("b"))
    assert [line["custom_id"] for line in read_lines(path)] == ["a", "c", "b"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "link").is_symlink()
    assert {item.name for item in tmp_path.iterdir()} == {"out", "link"}


@settings(deadline=None, max_examples=60)
@given(st.integers(min_value=0, max_value=10_000))
def test_file_cut_anywhere_is_repaired(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "out"
    whole = "".join(json.dumps(good(name), ensure_ascii=False) + "\n" for name in ("a", "b")).encode()
    data = whole[: cut % (len(whole) + 1)]
    path.write_bytes(data)
    with AnswerFile(path) as answers:
        done = set(answers.done)
        for name in {"a", "b", "c"} - done:
            answers.write(good(name))
    assert {line["custom_id"] for line in read_lines(path)} == {"a", "b", "c"}
    assert len(read_lines(path)) == 3
    # Nothing that was whole is asked for again.
    assert len(done) >= data.count(b"\n")


@pytest.mark.parametrize("text", ["hello", '{"id": 1}\n', json.dumps(request("a")) + "\n", "\n"])
def test_file_of_another_format_is_unchanged(tmp_path: Path, text: str) -> None:
    path = tmp_path / "out"
    path.write_text(text)
    with pytest.raises(BatchFileError, match="line 1 is not an answer of a batch"):
        AnswerFile(path)
    assert path.read_text() == text


def test_second_batch_on_the_same_file_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "out", good("a"), bad("b"))
    with AnswerFile(path), pytest.raises(BatchFileError, match="being written by another batch"):
        AnswerFile(path)
    AnswerFile(path).__exit__()
