"""Requests that are read, lines that are wrong, and a file of answers that survives being cut off."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cli.batch_files import (
    AnswerFile,
    BatchFileError,
    BatchRequest,
    answer_line,
    check_ids,
    error_line,
    read_requests,
    succeeded,
)
from tests.cli.batch_inputs import URL, read_lines, request, write_lines


def good(custom_id: str) -> dict[str, Any]:
    return answer_line(BatchRequest(1, custom_id), 200, "r", {"text": "ü\n"})


def bad(custom_id: str) -> dict[str, Any]:
    return error_line(BatchRequest(1, custom_id), "timeout", "too slow")


def test_good_lines(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in", request("a"), "", request("b", body={"n": 1}, extra=1))
    assert list(read_requests(path)) == [
        BatchRequest(1, "a", URL, {"messages": []}),
        BatchRequest(3, "b", URL, {"n": 1}),
    ]
    assert check_ids(path) == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
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
def test_bad_lines(tmp_path: Path, line: Any, problem: str) -> None:
    (found,) = read_requests(write_lines(tmp_path / "in", line))
    assert problem in (found.problem or "")
    assert found.body is None


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\xff\xfe\n" + json.dumps(request("a")).encode())
    first, second = read_requests(path)
    assert "not JSON" in (first.problem or "")
    assert second.problem is None


def test_double_ids_are_named_with_their_lines(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in", request("a"), "{", request("b"), request("a"), request("b"))
    with pytest.raises(BatchFileError, match="'a' in lines 1 and 4; 'b' in lines 3 and 5"):
        check_ids(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match="cannot be read: No such file"):
        check_ids(tmp_path / "missing")
    with pytest.raises(BatchFileError, match="has no requests"):
        check_ids(write_lines(tmp_path / "in", ""))


def test_what_succeeded() -> None:
    assert succeeded(good("a"))
    assert not succeeded(bad("a"))
    assert not succeeded(answer_line(BatchRequest(1, "a"), 400, "", {}))


def test_successes_stay_and_failures_go(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "out", good("a"), bad("b"), good("c"))
    path.chmod(0o600)
    with AnswerFile(path) as answers:
        assert answers.done == {"a", "c"}
        answers.write(good("b"))
    assert [line["custom_id"] for line in read_lines(path)] == ["a", "c", "b"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert [item.name for item in tmp_path.iterdir()] == ["out"]


@settings(deadline=None, max_examples=60)
@given(st.integers(min_value=0, max_value=10_000))
def test_a_file_cut_anywhere_is_repaired(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
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


@pytest.mark.parametrize("text", ["hello\n", "hello", '{"id": 1}\n', json.dumps(request("a")) + "\n", "[]\n", "\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "out"
    path.write_text(text)
    with pytest.raises(BatchFileError, match="line 1 is not an answer of a batch"):
        AnswerFile(path)
    assert path.read_text() == text


def test_one_batch_at_a_time(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "out", good("a"), bad("b"))
    with AnswerFile(path), pytest.raises(BatchFileError, match="being written by another batch"):
        AnswerFile(path)
    AnswerFile(path).__exit__()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match="cannot be written"):
        AnswerFile(tmp_path / "missing" / "out")
