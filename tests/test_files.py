"""Files of Quire's own that other users of the machine may have put in place: never used, written or waited for."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from quire import files
from quire.errors import ModelFileError, UnsupportedModelError
from quire.files import (
    UnsafeFileError,
    find_own,
    make_directory,
    open_own,
    read_json_object,
    read_own,
    read_regular,
    reading,
    replace_file,
)
from tests.hostile_files import HOSTILE, give_away, let_others_write, make_fifo, make_link


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "below" / "own"
    make_directory(path.parent)
    replace_file(path, [b"o", memoryview(b"wn")])
    return path


def test_own_file_is_read_and_for_this_user_alone(own: Path) -> None:
    assert read_own(own) == find_own(own) == b"own"
    assert own.stat().st_mode & 0o777 == 0o600
    assert own.parent.stat().st_mode & 0o777 == 0o700
    assert find_own(own.with_name("none")) is None
    assert [path.name for path in own.parent.iterdir()] == ["own"]


@pytest.mark.parametrize(("reason", "spoil"), HOSTILE.items())
def test_file_that_another_user_may_have_made_is_refused_with_the_reason(
    own: Path, caplog: pytest.LogCaptureFixture, reason: str, spoil: Callable[[Path], object]
) -> None:
    spoil(own)
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
        with pytest.raises(UnsafeFileError, match=reason):
            open_own(own, flags)
    assert find_own(own) is None
    (record,) = caplog.records
    assert reason in record.message
    assert record.message.endswith("own is not used")
    replace_file(own, [b"new"])
    assert read_own(own) == b"new"


@pytest.mark.parametrize("spoil", [let_others_write, give_away])
def test_directory_in_which_others_may_put_files_is_refused(own: Path, spoil: Callable[[Path], object]) -> None:
    spoil(own.parent)
    with pytest.raises(UnsafeFileError) as caught:
        read_own(own)
    assert caught.value.filename == str(own.parent)


def test_file_with_a_second_name_is_read_and_not_written(own: Path) -> None:
    diary = own.with_name("diary")
    diary.hardlink_to(own)
    assert read_own(own) == b"own"
    with pytest.raises(UnsafeFileError, match="has another name"):
        open_own(own, os.O_RDWR | os.O_CREAT)


def test_replaced_link_leaves_its_target(own: Path) -> None:
    target = make_link(own)
    replace_file(own, [b"new"])
    assert (target.read_bytes(), own.read_bytes(), own.is_symlink()) == (b"own", b"new", False)


def test_other_peoples_model_files_are_read_but_not_waited_for(own: Path) -> None:
    let_others_write(own)
    make_link(own)
    assert read_regular(own) == b"own"
    make_fifo(own)
    with pytest.raises(UnsafeFileError, match="is no regular file"):
        read_regular(own)


# --- JSON of models ---------------------------------------------------------------------------------


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
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 1)
    with pytest.raises(ModelFileError, match="at most 1"):
        read_json_object(path)


@pytest.mark.parametrize(
    "error", [KeyError("x"), TypeError("no\x1b[2J\nlines"), ZeroDivisionError(), UnicodeError("x"), OSError(36, "long")]
)  # fmt: skip
def test_error_that_a_reader_forgot_names_the_file_in_one_line(error: Exception) -> None:
    with pytest.raises(ModelFileError, match=r"^/models/config\.json: damaged \(.+\); fetch it again$") as caught, \
            reading(Path("/models/config.json")):  # fmt: skip
        raise error
    assert caught.value.__cause__ is error
    assert str(caught.value).isprintable()


def test_error_without_a_file_gets_its_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^/models: said$"), reading(Path("/models")):
        raise UnsupportedModelError("said")


@pytest.mark.parametrize(
    "error", [UnsupportedModelError("/models/x: said"), MemoryError(), KeyboardInterrupt(), ImportError()]
)
def test_other_errors_pass_a_reader_as_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, reading(Path("/models")):
        raise error
    assert caught.value is error
