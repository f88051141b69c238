"""Requests that are read from files, pipes and standard input, and lines that are wrong."""

import io
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cli.batch_requests import BatchFileError, BatchRequest, check_ids, open_requests, read_requests
from tests.cli.batch_inputs import URL, request, requests_of, write_lines


def test_good_lines(tmp_path: Path) -> None:
    source = requests_of(write_lines(tmp_path / "in", request("a"), "", request("b", body={"n": 1}, extra=1)))
    assert list(read_requests(source)) == [
        BatchRequest(1, "a", URL, {"messages": []}),
        BatchRequest(3, "b", URL, {"n": 1}),
    ]
    assert check_ids(source) == 2


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
    (found,) = read_requests(requests_of(write_lines(tmp_path / "in", line)))
    assert problem in (found.problem or "")
    assert found.body is None


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\xff\xfe\n" + json.dumps(request("a")).encode())
    first, second = read_requests(requests_of(path))
    assert "not JSON" in (first.problem or "")
    assert second.problem is None


def test_double_ids_are_named_with_their_lines(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in", request("a"), "{", request("b"), request("a"), request("b"))
    with pytest.raises(BatchFileError, match="'a' in lines 1 and 4; 'b' in lines 3 and 5"):
        check_ids(requests_of(path))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match="cannot be read: No such file"):
        check_ids(requests_of(tmp_path / "missing"))
    with pytest.raises(BatchFileError, match="has no requests"):
        check_ids(requests_of(write_lines(tmp_path / "in", "")))


def test_a_pipe_can_be_read_several_times(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in")
    text = json.dumps(request("a")) + "\n{\n"
    writer = threading.Thread(target=(tmp_path / "in").write_text, args=(text,))
    writer.start()
    with open_requests(tmp_path / "in") as source:
        writer.join()
        assert check_ids(source) == 2
        assert [line.custom_id for line in read_requests(source)] == ["a", None]
    assert not source.path.exists()


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps(request("a")).encode())))
    with open_requests(Path("-")) as source:
        assert [line.custom_id for line in read_requests(source)] == ["a"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with open_requests(Path("-")) as source, pytest.raises(BatchFileError, match="standard input has no requests"):
        check_ids(source)


def test_an_error_of_the_body_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True, buffer=io.BytesIO(b"{")))
    with pytest.raises(OSError, match="of the body"), open_requests(Path("-")):
        raise OSError("of the body")


def test_devices_are_no_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (Path("/dev/zero"), tmp_path):
        with pytest.raises(BatchFileError, match=f"{path} is neither a file nor a pipe"), open_requests(path):
            pass
    with open("/dev/zero") as device:
        monkeypatch.setattr("sys.stdin", device)
        with pytest.raises(BatchFileError, match="standard input is neither"), open_requests(Path("-")):
            pass
    with pytest.raises(BatchFileError, match="missing cannot be read: No such file"), open_requests(Path("missing")):
        pass
