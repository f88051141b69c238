"""Files that one process fills and others map: never one that is torn, foreign, outdated or damaged."""

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from quire.runtime import shared_file
from quire.runtime.shared_file import (
    DATA_OFFSET,
    Header,
    SharedFile,
    Unfinished,
    boot_id,
    find_or_begin,
    list_files,
    partial_path,
    read_header,
    settle,
)
from quire.weights.progress import ignore_progress

NUM_BYTES = 100_000
VALUES = np.random.default_rng(0).integers(0, 256, NUM_BYTES, np.uint8)


@pytest.fixture(autouse=True)
def settles_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests bring files to disk by themselves."""
    monkeypatch.setattr(shared_file, "settle_later", lambda path: None)


def place(directory: Path, name: str = "a", key: str = "k", num_bytes: int = NUM_BYTES) -> SharedFile:
    return SharedFile(directory / f"{name}.weights", Header(key, name, "/m", 0, num_bytes, "quire 1", boot_id()))


def begin(item: SharedFile, max_bytes: int | None = None) -> Unfinished:
    found = find_or_begin(item, max_bytes, ignore_progress)
    assert isinstance(found, Unfinished)
    return found


def make(item: SharedFile, max_bytes: int | None = None) -> None:
    unfinished = begin(item, max_bytes)
    unfinished.memory[:] = VALUES[: len(unfinished.memory)]
    unfinished.publish()
    unfinished.close()


def header_of(item: SharedFile) -> Header | None:
    descriptor = os.open(item.path, os.O_RDONLY)
    try:
        return read_header(descriptor)
    finally:
        os.close(descriptor)


def test_second_process_maps_the_same_bytes_and_cannot_write_them(tmp_path: Path) -> None:
    make(place(tmp_path / "below" / "directory"))
    found = place(tmp_path / "below" / "directory").find()
    assert found is not None
    assert found.tobytes() == VALUES.tobytes()
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1
    assert [path.name for path in (tmp_path / "below" / "directory").iterdir()] == ["a.weights"]


def test_published_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    unfinished = begin(place(tmp_path))
    assert not unfinished.memory.any()
    unfinished.memory[:] = VALUES
    assert unfinished.publish().tobytes() == VALUES.tobytes()
    unfinished.close()
    assert place(tmp_path).path.read_bytes()[DATA_OFFSET:] == VALUES.tobytes()


def test_settled_file_is_valid_after_a_restart_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(place(tmp_path))
    settle(place(tmp_path).path)
    monkeypatch.setattr(shared_file, "boot_id", lambda: "another")
    assert place(tmp_path).find() is not None
    make(place(tmp_path, "b"))
    settle(place(tmp_path, "b").path)
    settle(place(tmp_path, "b").path)
    assert place(tmp_path, "b").find() is not None


def test_file_settles_while_another_process_maps_it(tmp_path: Path) -> None:
    make(place(tmp_path))
    found = place(tmp_path).find()
    thread = threading.Thread(target=settle, args=[place(tmp_path).path], daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    header = header_of(place(tmp_path))
    assert header is not None
    assert header.boot_id is None
    assert found is not None
    assert found.tobytes() == VALUES.tobytes()


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(DATA_OFFSET + NUM_BYTES - 1)


def damage_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(60)
        file.write(b"~")


def change_bytes(path: Path) -> None:
    settle(path)
    with path.open("r+b") as file:
        file.seek(DATA_OFFSET + 7)
        file.write(b"~~")
    # The system's clock ticks every few milliseconds.
    os.utime(path, ns=(time.time_ns(), time.time_ns() + 5 * 10**9))


def stop_machine(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    header = read_header(descriptor)
    assert header is not None
    shared_file.write_header(descriptor, msgspec.structs.replace(header, boot_id="earlier"))
    os.close(descriptor)


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
        (stop_machine, "was perhaps not on disk when the machine stopped"),
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
    first.close()
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
    first.close()
    thread.join(60)
    assert isinstance(found[0], Unfinished)
    assert not found[0].memory.any()
    found[0].close()
    assert not list(tmp_path.iterdir())


def test_rest_of_a_killed_process_is_overwritten(tmp_path: Path) -> None:
    partial_path(place(tmp_path).path).write_bytes(bytes([7]) * (DATA_OFFSET + 2 * NUM_BYTES))
    unfinished = begin(place(tmp_path))
    assert not unfinished.memory.any()
    unfinished.memory[:] = VALUES
    unfinished.publish()
    unfinished.close()
    assert place(tmp_path).find() is not None


# --- Space ----------------------------------------------------------------------------------------


def test_large_file_is_written_to_disk_while_it_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = threading.Semaphore(0)
    monkeypatch.setattr(shared_file, "WRITTEN_BEHIND_BYTES", NUM_BYTES)
    monkeypatch.setattr(shared_file, "WRITE_INTERVAL_S", 0.001)
    monkeypatch.setattr(shared_file, "begin_write_back", lambda descriptor: (os.fstat(descriptor), written.release()))
    threads = threading.active_count()
    small = begin(place(tmp_path, "small", num_bytes=NUM_BYTES - 1))
    assert threading.active_count() == threads
    small.close()
    large = begin(place(tmp_path, "large"))
    assert written.acquire(timeout=10)
    large.memory[:] = VALUES
    assert written.acquire(timeout=10)
    assert np.array_equal(large.publish(), VALUES)
    large.close()
    assert threading.active_count() == threads  # no write meets the closed descriptor


def test_files_used_longest_ago_are_deleted_for_a_new_one(tmp_path: Path) -> None:
    for age, name in enumerate("abc"):
        make(place(tmp_path, name))
        os.utime(place(tmp_path, name).path, ns=(time.time_ns() - (100 + age) * 10**9, 10**9))
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
