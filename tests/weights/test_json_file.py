from pathlib import Path

import pytest

from quire.errors import ModelFileError
from quire.weights import json_file
from quire.weights.json_file import read_json_object


def test_reads_an_object(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 64, "name": "é"}', encoding="utf-8")
    assert read_json_object(path) == {"hidden_size": 64, "name": "é"}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"a": 1} x', b"\xff\xfe{}", b'"' + b"\xff" + b'"', b"[" * 200_000, b"9" * 10_000,
     b'{"a": ' + b"{" * 200_000],
    ids=["empty", "open", "list", "null", "tail", "utf16", "bytes", "deep", "digits", "deep-object"],
)  # fmt: skip
def test_anything_else_is_a_typed_error_in_one_line(tmp_path: Path, content: bytes) -> None:
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
    monkeypatch.setattr(json_file, "MAX_FILE_BYTES", 1)
    with pytest.raises(ModelFileError, match="at most 1"):
        read_json_object(path)
