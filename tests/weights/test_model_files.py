import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quire.errors import ModelFileError
from quire.weights.model_files import map_file


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
