import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quire.errors import ModelFileError
from quire.weights import model_files
from quire.weights.model_files import map_file, read_json_object
from tests.hostile_files import make_fifo


def test_mapping_shows_the_file_and_writes_stay_private(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"weights")
    mapping = map_file(path)
    mapping[0:1] = b"W"
    assert mapping[:] == b"Weights"
    assert path.read_bytes() == b"weights"


def test_bad_files_are_typed_errors(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (empty, pipe, tmp_path, tmp_path / "absent"):
        with pytest.raises(ModelFileError, match=path.name):
            map_file(path)


READ_TRUNCATED = """
import os, sys
from pathlib import Path
from quire.weights.model_files import map_file
if sys.argv[2:]:
    import faulthandler
    faulthandler.enable()
mapping = map_file(Path(sys.argv[1]))
os.truncate(sys.argv[1], 0)
mapping[5000]
"""


@pytest.mark.parametrize("handler", [[], ["faulthandler"]])
def test_page_of_a_truncated_file_ends_the_process_with_a_line_that_names_it(
    tmp_path: Path, handler: list[str]
) -> None:
    path = tmp_path / "model\x1b[2J.gguf"
    path.write_bytes(bytes(10_000))
    result = subprocess.run([sys.executable, "-c", READ_TRUNCATED, path, *handler], capture_output=True, text=True)
    assert result.returncode == -signal.SIGBUS
    line, *others = result.stderr.splitlines()
    assert line == (
        f"quire: {tmp_path}/model?[2J.gguf: a page of this mapped file cannot be read, because the file was truncated "
        "or its disk failed: restore the file, and start again"
    )
    assert bool(others) == bool(handler), "a program's own handler goes on"


def test_bus_error_that_is_sent_ends_a_process_without_a_line() -> None:
    code = (
        "import os; from quire._native import explain_bus_errors as f; f(); f(); os.kill(os.getpid(), 7); print('on')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGBUS, "", "")


def test_fifo_in_the_place_of_a_json_file_is_not_waited_for(tmp_path: Path) -> None:
    make_fifo(tmp_path / "config.json")
    with pytest.raises(ModelFileError, match=r"config\.json: cannot be read: is no regular file"):
        read_json_object(tmp_path / "config.json")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"a": 1} x', b"\xff\xfe{}", b'"' + b"\xff" + b'"', b"[" * 200_000, b"9" * 10_000,
     b'{"a": ' + b"{" * 200_000],
    ids=["empty", "open", "list", "null", "tail", "utf16", "bytes", "deep", "digits", "deep-object"],
)  # fmt: skip
def test_other_content_than_a_json_object_is_a_typed_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"config\.json") as caught:
        read_json_object(path)
    assert "\n" not in str(caught.value)


def test_missing_and_huge_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ModelFileError, match="No such file"):
        read_json_object(path)
    path.write_text("{}")
    monkeypatch.setattr(model_files, "MAX_JSON_BYTES", 1)
    with pytest.raises(ModelFileError, match="at most 1"):
        read_json_object(path)
