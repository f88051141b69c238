import os
from pathlib import Path

import pytest

from quire.errors import ModelFileError
from quire.weights.mapped_file import map_file, printable


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


def test_printable_is_one_short_line() -> None:
    assert printable("a\nb\x1b[31m\0") == "a?b?[31m?"
    assert printable("é 世界") == "é 世界"
    assert len(printable("x" * 10_000)) == 301
