"""Files that one process fills and others map: never one that is torn, foreign, outdated or damaged."""

import errno
import logging
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from quire.files import UnsafeFileError
from quire.runtime import shared_file
from quire.runtime.shared_file import (
    DATA_OFFSET,
    Header,
    SharedFile,
    Unfinished,
    find_or_begin,
    finish,
    list_files,
    partial_path,
)
from quire.weights.model_files import ignore_progress
from tests.hostile_files import HOSTILE, give_away, let_others_write

NUM_BYTES = 100_000
VALUES = np.random.default_rng(0).integers(0, 256, NUM_BYTES, np.uint8)


def place(directory: Path, name: str = "a", key: str = "k", num_bytes: int = NUM_BYTES) -> SharedFile:
    return SharedFile(directory / f"{name}.weights", Header(key, name, "/m", 0, num_bytes, "quire 1"))


def begin(item: SharedFile, max_bytes: int | None = None) -> Unfinished:
    found = find_or_begin(item, max_bytes, ignore_progress)
    assert isinstance(found, Unfinished)
    return found


def make(item: SharedFile, max_bytes: int | None = None, *, fits_memory: bool = True) -> Unfinished:
    unfinished = find_or_begin(item, max_bytes, ignore_progress, fits_memory=fits_memory)
    assert isinstance(unfinished, Unfinished)
    unfinished.memory[:] = VALUES[: len(unfinished.memory)]
    unfinished.publish()
    finish()
    return unfinished


def test_second_process_maps_the_same_bytes_and_cannot_write_them(tmp_path: Path) -> None:
    make(place(tmp_path / "below" / "directory"))
    found = place(tmp_path / "below" / "directory").find()
    assert found is not None
    assert found.tobytes() == VALUES.tobytes()
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1
    assert [path.name for path in (tmp_path / "below" / "directory").iterdir()] == ["a.weights"]


@pytest.mark.parametrize("fits_memory", [True, False])
def test_memory_is_a_mapping_of_the_file_once_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits_memory: bool
) -> None:
    monkeypatch.setattr(shared_file, "COPIED_BYTES", 0)
    monkeypatch.setattr(shared_file, "PIECE_BYTES", 4 * mmap.PAGESIZE)
    unfinished = make(place(tmp_path), fits_memory=fits_memory)
    assert unfinished.memory.tobytes() == VALUES.tobytes()
    assert place(tmp_path).path.read_bytes()[DATA_OFFSET:] == VALUES.tobytes()
    mapping = mapping_of(unfinished)
    assert mapping.split()[1] == "r--s"
    assert mapping.endswith(str(place(tmp_path).path))


def mapping_of(unfinished: Unfinished) -> str:
    """Return the system's line on the memory."""
    address = unfinished.memory.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return line
    raise AssertionError("the memory is not mapped")


def test_small_memory_stays_on_its_huge_pages(tmp_path: Path) -> None:
    unfinished = make(place(tmp_path))
    assert str(tmp_path) not in mapping_of(unfinished)
    assert unfinished.memory.tobytes() == VALUES.tobytes()
    assert place(tmp_path).path.read_bytes()[DATA_OFFSET:] == VALUES.tobytes()


def test_memory_is_read_while_the_file_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_file, "COPIED_BYTES", 0)
    monkeypatch.setattr(shared_file, "PIECE_BYTES", mmap.PAGESIZE)
    unfinished = begin(place(tmp_path))
    unfinished.memory[:] = VALUES
    unfinished.publish()
    while place(tmp_path).find() is None:
        assert np.array_equal(unfinished.memory, VALUES)
    assert np.array_equal(unfinished.memory, VALUES)
    finish()


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(DATA_OFFSET + NUM_BYTES - 1)


def damage_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(60)
        file.write(b"~")


def change_bytes(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(DATA_OFFSET + 7)
        file.write(b"~~")
    # The system's clock ticks every few milliseconds.
    os.utime(path, ns=(time.time_ns(), time.time_ns() + 5 * 10**9))


def hold_other_contents(path: Path) -> None:
    path.write_bytes(b"GGUF" + bytes(DATA_OFFSET + NUM_BYTES - 4))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (truncate, f"has {DATA_OFFSET + NUM_BYTES - 1:,} bytes, not {DATA_OFFSET + NUM_BYTES:,}"),
        (damage_header, "is damaged"),
        (hold_other_contents, "is damaged"),
        (lambda path: path.write_bytes(b""), "is damaged"),
        (change_bytes, "was changed after it was written"),
    ],
)
def test_spoilt_file_is_made_anew_with_a_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None], problem: str
) -> None:
    caplog.set_level(logging.INFO, "quire.runtime")
    make(place(tmp_path))
    spoil(place(tmp_path).path)
    assert place(tmp_path).find() is None
    assert [record.message for record in caplog.records] == [
        f"{place(tmp_path).path} {problem}: the weights are packed anew"
    ]
    make(place(tmp_path))
    found = place(tmp_path).find()
    assert found is not None
    assert found.tobytes() == VALUES.tobytes()


def test_file_with_another_key_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.runtime")
    make(place(tmp_path))
    assert place(tmp_path, key="other").find() is None
    assert "was packed from another state of the model, or by another version (quire 1)" in caplog.text
    make(place(tmp_path, key="other", num_bytes=500))
    assert place(tmp_path).find() is None
    found = place(tmp_path, key="other", num_bytes=500).find()
    assert found is not None
    assert found.tobytes() == VALUES[:500].tobytes()


def test_file_that_is_deleted_while_mapped_goes_on_working(tmp_path: Path) -> None:
    make(place(tmp_path))
    found = place(tmp_path).find()
    shutil.rmtree(tmp_path)
    assert found is not None
    assert found.tobytes() == VALUES.tobytes()


# --- Several processes ----------------------------------------------------------------------------


def test_second_process_waits_for_the_first_and_maps_its_file(tmp_path: Path) -> None:
    first, found, waits = begin(place(tmp_path)), [], threading.Event()

    def second() -> None:
        found.append(find_or_begin(place(tmp_path), None, lambda *news: waits.set()))

    thread = threading.Thread(target=second, daemon=True)
    thread.start()
    assert waits.wait(60)
    assert thread.is_alive()
    first.memory[:] = VALUES
    first.publish()
    thread.join(60)
    assert isinstance(found[0], np.ndarray)
    assert found[0].tobytes() == VALUES.tobytes()


def test_second_process_packs_if_the_first_gives_up(tmp_path: Path) -> None:
    first, found, waits = begin(place(tmp_path)), [], threading.Event()
    thread = threading.Thread(
        target=lambda: found.append(find_or_begin(place(tmp_path), None, lambda *news: waits.set())), daemon=True
    )
    thread.start()
    assert waits.wait(60)
    first.memory[:] = 1
    first.discard()
    thread.join(60)
    assert isinstance(found[0], Unfinished)
    assert not found[0].memory.any()
    found[0].discard()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fits_memory", [True, False])
def test_rest_of_a_killed_process_is_overwritten(tmp_path: Path, fits_memory: bool) -> None:
    partial_path(place(tmp_path).path).write_bytes(bytes([7]) * (DATA_OFFSET + 2 * NUM_BYTES))
    unfinished = find_or_begin(place(tmp_path), None, ignore_progress, fits_memory=fits_memory)
    assert isinstance(unfinished, Unfinished)
    assert not unfinished.memory.any()
    unfinished.memory[:] = VALUES
    unfinished.publish()
    finish()
    assert place(tmp_path).find() is not None


# --- The end of a process -------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let the disk wait for an event, and `finish` say so at once."""
    goes_on = threading.Event()
    monkeypatch.setattr(shared_file, "write_back", lambda *piece: goes_on.wait(60))
    monkeypatch.setattr(shared_file, "SILENT_S", 0.001)
    yield goes_on
    goes_on.set()
    finish()


def test_file_has_its_name_when_all_of_it_is_on_disk(
    tmp_path: Path, disk: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    unfinished = begin(place(tmp_path))
    unfinished.publish()
    assert place(tmp_path).find() is None
    end = threading.Thread(target=finish, daemon=True)
    end.start()
    end.join(0.1)
    assert end.is_alive()
    disk.set()
    end.join(60)
    assert not end.is_alive()
    assert place(tmp_path).find() is not None
    assert [record.message for record in caplog.records] == [
        "the packed weights are written to disk for the next start; Ctrl-C gives them up"
    ]


def test_interrupt_ends_the_wait_for_the_disk(
    tmp_path: Path, disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(thread: threading.Thread, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    begin(place(tmp_path)).publish()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupt)
        finish()
    assert place(tmp_path).find() is None


def test_disk_that_fails_leaves_the_memory_and_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, *rest: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    caplog.set_level(logging.INFO, "quire.runtime")
    monkeypatch.setattr(os, "pwrite", fail)
    unfinished = make(place(tmp_path))
    assert unfinished.memory.tobytes() == VALUES.tobytes()
    assert not list(tmp_path.iterdir())
    assert f"the packed weights of a are not kept in {tmp_path}" in caplog.text
    assert "Input/output error" in caplog.text
    monkeypatch.undo()
    make(place(tmp_path))
    assert place(tmp_path).find() is not None


# --- Space ----------------------------------------------------------------------------------------


def test_files_used_longest_ago_are_deleted_for_a_new_one(tmp_path: Path) -> None:
    for age, name in enumerate("abc"):
        make(place(tmp_path, name))
        path = place(tmp_path, name).path
        os.utime(path, ns=(time.time_ns() - (100 + age) * 10**9, path.stat().st_mtime_ns))
    assert place(tmp_path, "c").find() is not None
    sizes = {file.path.stem: file.num_bytes for file in list_files(tmp_path)}
    make(place(tmp_path, "d"), max_bytes=NUM_BYTES + sizes["a"] + sizes["c"])
    assert sorted(file.path.stem for file in list_files(tmp_path)) == ["a", "c", "d"]


def test_file_above_the_limit_is_refused_and_nothing_is_deleted(tmp_path: Path) -> None:
    make(place(tmp_path))
    with pytest.raises(OSError, match=r"more than the limit of 9\.77 KiB"):
        find_or_begin(place(tmp_path, "b"), 10_000, ignore_progress)
    assert [path.name for path in tmp_path.iterdir()] == ["a.weights"]


def test_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space left"):
        find_or_begin(place(tmp_path), None, ignore_progress)
    assert not list(tmp_path.iterdir())


# --- Other users of the machine -------------------------------------------------------------------


@pytest.mark.parametrize(("reason", "spoil"), HOSTILE.items())
def test_file_that_another_user_may_have_made_is_packed_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: str, spoil: Callable[[Path], object]
) -> None:
    make(place(tmp_path))
    spoil(place(tmp_path).path)
    make(place(tmp_path))
    (record,) = caplog.records
    assert record.message.startswith(f"{place(tmp_path).path} {reason}")
    assert record.message.endswith(": the weights are packed anew")
    found = place(tmp_path).find()
    assert found is not None
    assert found.tobytes() == VALUES.tobytes()


@pytest.mark.parametrize(("reason", "spoil"), HOSTILE.items())
def test_listed_file_that_is_not_safe_is_named_by_check(
    tmp_path: Path, reason: str, spoil: Callable[[Path], object]
) -> None:
    make(place(tmp_path))
    spoil(place(tmp_path).path)
    (file,) = list_files(tmp_path)
    assert file.header is None
    with pytest.raises(UnsafeFileError, match=reason):
        file.problem()


@pytest.mark.parametrize(("reason", "spoil"), HOSTILE.items())
def test_name_of_the_unfinished_file_that_another_user_took_is_not_written(
    tmp_path: Path, reason: str, spoil: Callable[[Path], object]
) -> None:
    path = partial_path(place(tmp_path).path)
    path.write_bytes(b"dear diary")
    found = spoil(path)
    with pytest.raises(UnsafeFileError, match=reason):
        find_or_begin(place(tmp_path), None, ignore_progress)
    if isinstance(found, Path):
        assert found.read_bytes() == b"dear diary"


@pytest.mark.parametrize("spoil", [let_others_write, give_away])
def test_directory_in_which_others_may_put_files_has_none_of_this_user(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    make(place(tmp_path))
    spoil(tmp_path)
    with pytest.raises(UnsafeFileError) as caught:
        find_or_begin(place(tmp_path), None, ignore_progress)
    assert caught.value.filename == str(tmp_path)
