import os
from pathlib import Path

import pytest

from quire.errors import ModelFileError
from quire.weights import model_files
from quire.weights.model_files import map_file, read_json_object


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
