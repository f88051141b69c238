"""A file of answers that survives being cut off, full disks and wrong paths."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cli.batch_files import AnswerFile, BatchWriteError, answer_line, error_line, is_wrong, succeeded
from quire.cli.batch_requests import BatchFileError, BatchRequest
from tests.cli.batch_inputs import read_lines, request, write_lines


def good(custom_id: str) -> dict[str, Any]:
    return answer_line(BatchRequest(1, custom_id), 200, "r", {"text": "ü\n"})


def bad(custom_id: str) -> dict[str, Any]:
    return error_line(BatchRequest(1, custom_id), "timeout", "too slow")


def test_what_succeeded() -> None:
    assert succeeded(good("a"))
    assert not succeeded(bad("a"))
    assert not succeeded(answer_line(BatchRequest(1, "a"), 400, "", {}))


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
def test_what_can_never_work(status: int, code: str, wrong: bool) -> None:
    asked = BatchRequest(1, "a")
    assert is_wrong(answer_line(asked, status, "r", {"error": {"code": code}})) is wrong


def test_lines_that_cannot_be_sent_are_wrong_and_broken_connections_are_not() -> None:
    asked = BatchRequest(1, "a")
    assert is_wrong(error_line(asked, "invalid_line", "not JSON"))
    assert not is_wrong(error_line(asked, "connection_broken", "gone"))
    assert is_wrong(answer_line(asked, 400, "r", ["no object"]))


def test_successes_stay_and_failures_go(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "out", good("a"), bad("b"), good("c"))
    path.chmod(0o600)
    with AnswerFile(path) as answers:
        assert set(answers.done) == {"a", "c"}
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


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null", "/dev/zero"])
def test_devices_are_no_files(path: str) -> None:
    with pytest.raises(BatchFileError, match=f"{path} is not a file"):
        AnswerFile(Path(path))


def test_a_pipe_and_a_directory_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(BatchFileError, match="is not a file"):
            AnswerFile(path)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "out", good("a"), bad("b"))
    (tmp_path / "link").symlink_to(path)
    with AnswerFile(tmp_path / "link") as answers:
        answers.write(good("b"))
    assert (tmp_path / "link").is_symlink()
    assert [line["custom_id"] for line in read_lines(path)] == ["a", "b"]


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "out", os.write
    with AnswerFile(path) as answers:
        answers.write(good("a"))
        left = 40

        def full(descriptor: int, data: bytes) -> int:
            nonlocal left
            if not left:
                raise OSError(errno.ENOSPC, "No space left on device")
            num_bytes = write(descriptor, data[:left])
            left -= num_bytes
            return num_bytes

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(BatchWriteError, match="No space left on device; the answers in it are kept"):
                answers.write(good("b"))
        assert [line["custom_id"] for line in read_lines(path)] == ["a"]
        answers.write(good("c"))
    assert [line["custom_id"] for line in read_lines(path)] == ["a", "c"]
