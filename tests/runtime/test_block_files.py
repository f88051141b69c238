"""Blocks as files: whatever happens to a file, a read gives the block's own bytes or nothing."""

import errno
import functools
import hashlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.files import UnsafeFileError
from quire.runtime.block_files import (
    HEADER_BYTES,
    BlockFile,
    BlockFileError,
    BlockFiles,
    list_files,
    read_description,
)
from quire.runtime.disk_tier import DiskTier
from tests.hostile_files import HOSTILE, give_away, let_others_write

FINGERPRINT = hashlib.sha256(b"model").digest()
BLOCK_BYTES = 700
FILE_BYTES = HEADER_BYTES + BLOCK_BYTES
NUM_DAMAGES = 1000
NUM_KILLS = 1000


def digest_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


@functools.cache
def block_of(digest: bytes, group: int = 0, num_bytes: int = BLOCK_BYTES) -> bytes:
    return random.Random(digest + bytes([group])).randbytes(num_bytes)


def open_files(root: Path, max_bytes: int = 1 << 30, fingerprint: bytes = FINGERPRINT) -> BlockFiles:
    return BlockFiles(root, fingerprint, {"model": "tiny"}, max_bytes)


def write(files: BlockFiles, number: int, group: int = 0) -> Path:
    digest = digest_of(number)
    files.write(group, digest, memoryview(block_of(digest, group)))
    return files.path(group, digest)


def read(files: BlockFiles, number: int, group: int = 0) -> bytes:
    target = bytearray(BLOCK_BYTES)
    files.read(group, digest_of(number), memoryview(target))
    return bytes(target)


def read_later(tier: DiskTier, digests: list[bytes], pages: np.ndarray) -> tuple[list[int], list[int]]:
    """Read into rows 1, 2, …; returns the rows filled, and those that were not."""
    tier.read(0, digests, range(1, len(digests) + 1), pages)
    return tier.take_read(10.0)


def test_blocks_are_found_by_another_process(tmp_path: Path) -> None:
    files = open_files(tmp_path / "made" / "here")
    for number, group in ((1, 0), (1, 1), (2, 0)):
        write(files, number, group)
    again = open_files(tmp_path / "made" / "here")
    assert again.keys() == {(0, digest_of(1)), (1, digest_of(1)), (0, digest_of(2))}
    assert read(again, 1, 1) == block_of(digest_of(1), 1)
    assert read_description(again.directory) == {"model": "tiny"}
    other = open_files(tmp_path / "made" / "here", fingerprint=b"\1" * 32)
    assert other.keys() == set()
    assert len(list(list_files(other.root))) == 3
    assert again.directory.stat().st_mode & 0o77 == 0, "prompts can be guessed from keys and values"


def damaged(rng: random.Random, data: bytearray, others: list[bytes]) -> bytes:
    """Return a file as torn writes, bad memory and careless people leave it."""
    at = rng.randrange(len(data))
    kind = rng.randrange(6)
    if kind == 0:
        del data[at:]
    elif kind == 1:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 2:
        data[at:] = bytes(len(data) - at)
    elif kind == 3:
        data += rng.randbytes(rng.randrange(1, 9))
    elif kind == 4:
        data[:] = rng.choice(others)
    else:
        data[at : at + 9] = rng.randbytes(9)
    return bytes(data)


def test_damaged_file_is_never_used(tmp_path: Path) -> None:
    files, foreign = open_files(tmp_path), open_files(tmp_path, fingerprint=b"\1" * 32)
    known = {(number, group): write(files, number, group).read_bytes() for number in range(6) for group in (0, 1)}
    others = [*known.values(), write(foreign, 1).read_bytes(), write(foreign, 2).read_bytes()]
    rng, num_refused = random.Random(3), 0
    for _ in range(NUM_DAMAGES):
        (number, group), before = rng.choice(list(known.items()))
        path = files.path(group, digest_of(number))
        after = damaged(rng, bytearray(before), others)
        path.write_bytes(after)
        if after == before:  # the same file, or zeros where zeros were
            assert read(files, number, group) == block_of(digest_of(number), group)
            continue
        with pytest.raises(BlockFileError):
            read(files, number, group)
        assert BlockFile(path, 0, 0, group, digest_of(number)).problem() is not None
        num_refused += 1
    assert num_refused > 0.9 * NUM_DAMAGES


KILLER = """
import gc, hashlib, itertools, os, random, signal, sys, time
from quire.runtime.block_files import BlockFiles

digests = [hashlib.sha256(b"%d" % number).digest() for number in range(400)]
blocks = [memoryview(random.Random(digest + bytes(1)).randbytes(700)) for digest in digests]


def start(seed):
    # A process that writes blocks in an order of its own until it is killed, and tells of each one.
    ours, theirs = os.pipe()
    if child := os.fork():
        os.close(theirs)
        return child, ours
    files = BlockFiles(sys.argv[1], hashlib.sha256(b"model").digest(), {}, 60 * 828)
    while True:
        for number in random.Random(seed).sample(range(400), 400):
            files.write(0, digests[number], blocks[number])
            os.write(theirs, b"x")


rng = random.Random(4)
gc.disable()
for round in range(int(sys.argv[2]) // 2):
    writers = [start(2 * round + index) for index in range(2)]  # two at a time share the directory
    for _, ours in writers:
        for _ in range(rng.randrange(1, 8)):
            assert os.read(ours, 1) == b"x", "a writer ended by itself"
    time.sleep(rng.random() / 1000)  # the next writes are under way
    for child, ours in writers:
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        os.close(ours)
"""


def test_killed_writers_leave_only_whole_blocks(tmp_path: Path) -> None:
    """Writers are killed after some blocks, however long these take."""
    subprocess.run([sys.executable, "-c", KILLER, str(tmp_path), str(NUM_KILLS)], check=True)
    files = open_files(tmp_path)
    known = {digest_of(number): number for number in range(400)}
    assert len(files.keys()) > 25
    for _, digest in sorted(files.keys()):
        assert read(files, known[digest]) == block_of(digest)
    assert [file for file in list_files(tmp_path) if file.problem()] == []


def test_blocks_used_longest_ago_are_deleted_first(tmp_path: Path) -> None:
    files = open_files(tmp_path, max_bytes=10 * FILE_BYTES)
    for number in range(10):
        os.utime(write(files, number), ns=(number, number))
    read(files, 0)
    write(files, 10)
    # Nine tenths of ten blocks are left.
    assert files.keys() == {(0, digest_of(number)) for number in (0, 3, 4, 5, 6, 7, 8, 9, 10)}
    leftover = tmp_path / files.directory / f"{digest_of(1).hex()}-0.kv.17.3"
    leftover.write_bytes(b"torn")
    os.utime(leftover, (0, 0))
    smaller = open_files(tmp_path, max_bytes=5 * FILE_BYTES)
    assert len(smaller.keys()) == 4
    assert not leftover.exists()


def test_ranks_have_folders_of_their_own_and_share_the_limit(tmp_path: Path) -> None:
    keys = [hashlib.sha256(bytes([rank])).digest() for rank in range(2)]
    ranks = [BlockFiles(tmp_path, key, {}, 20 * FILE_BYTES, rank, 2) for rank, key in enumerate(keys)]
    for number in range(40):
        for files in ranks:
            write(files, number)
        found = list(list_files(tmp_path))
        assert len(found) <= 20
        assert all(file.problem() is None for file in found)
    assert {file.path.parent.name[-4:] for file in found} == {"0of2", "1of2"}


def test_directory_that_cannot_hold_blocks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--kv-disk .*/file cannot hold KV blocks \(File exists\): name a directory"):
        open_files(tmp_path / "file")

    def refuse(*arguments: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # root may write anywhere
    with pytest.raises(ConfigError, match=r"\(Permission denied\): name a directory that this user may write to"):
        open_files(tmp_path / "closed")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_full_disk_is_noted_once_and_blocks_are_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    files = open_files(tmp_path)
    write(files, 1)
    tier = DiskTier(files)

    def refuse(descriptor: int, parts: list[bytes]) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "writev", refuse)
    values = np.zeros((2, BLOCK_BYTES), np.uint8)
    for number in (5, 7):
        tier.write(0, [digest_of(number), digest_of(number + 1)], values, time.monotonic() + 5)
    pages = np.ones((4, BLOCK_BYTES), np.uint8)
    assert read_later(tier, [digest_of(1)], pages) == ([1], [])
    assert pages[1].tobytes() == block_of(digest_of(1))
    tier.close(time.monotonic() + 5)
    assert [record.message.split(": ", 1)[1] for record in caplog.records] == [
        f"KV blocks are no longer written ({os.strerror(code)}): "
        + ("free some space" if code == errno.ENOSPC else "see its state")
    ]
    assert [path.name for path in files.directory.iterdir() if "-0.kv" in path.name] == [
        files.path(0, digest_of(1)).name
    ]


def test_short_write_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = open_files(tmp_path)
    monkeypatch.setattr(os, "writev", lambda descriptor, parts: os.write(descriptor, parts[0]))
    with pytest.raises(OSError, match="No space left"):
        write(files, 1)
    assert files.keys() == set()


def test_blocks_that_cannot_be_read_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = open_files(tmp_path)
    paths = [write(files, number) for number in range(3)]
    for path in paths[:2]:
        path.write_bytes(path.read_bytes()[:-1])
    tier = DiskTier(files)
    pages = np.ones((6, BLOCK_BYTES), np.uint8)
    filled, failed = read_later(tier, [digest_of(number) for number in (0, 1, 2, 3)], pages)
    assert (sorted(filled), sorted(failed)) == ([3], [1, 2, 4])
    # Steps may read what they mask: it must be numbers.
    assert not pages[1:3].any()
    assert len(caplog.records) == 1
    assert "has another length: its tokens are computed again" in caplog.text
    tier.close(time.monotonic())


def test_block_that_waits_to_be_written_is_read_from_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(open_files(tmp_path))
    release = tier._writer.submit(time.sleep, 0.2)
    values = np.frombuffer(block_of(digest_of(1)), np.uint8).reshape(1, -1)
    tier.write(0, [digest_of(1)], values)
    pages = np.ones((2, BLOCK_BYTES), np.uint8)
    assert read_later(tier, [digest_of(1)], pages) == ([1], [])
    assert (pages[1] == values[0]).all()
    assert not release.done()
    tier.close(time.monotonic() + 5)
    assert tier.take_counts() == (BLOCK_BYTES, BLOCK_BYTES)


def test_slow_disk_drops_blocks_rather_than_stall_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire.runtime.disk_tier.MAX_QUEUED_BYTES", 2 * BLOCK_BYTES)
    tier = DiskTier(open_files(tmp_path))
    release = tier._writer.submit(time.sleep, 0.2)
    digests = [digest_of(number) for number in range(9)]
    tier.write(0, digests, np.zeros((9, BLOCK_BYTES), np.uint8))
    assert not release.done()
    # At the end nothing is dropped.
    tier.write(0, digests[5:], np.zeros((4, BLOCK_BYTES), np.uint8), time.monotonic() + 5)
    tier.close(time.monotonic() + 5)
    assert len(open_files(tmp_path).keys()) == 3 + 4
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("reason", "spoil"), HOSTILE.items())
def test_block_that_another_user_may_have_made_is_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: str, spoil: Callable[[Path], object]
) -> None:
    files = open_files(tmp_path)
    spoil(write(files, 1))
    again = open_files(tmp_path)
    tier, pages = DiskTier(again), np.ones((2, BLOCK_BYTES), np.uint8)
    assert read_later(tier, [digest_of(1)], pages) == ([], [1])
    (record,) = caplog.records
    assert reason in record.message
    with pytest.raises(UnsafeFileError, match=reason):
        next(iter(list_files(tmp_path))).problem()
    write(again, 1)
    assert read(again, 1) == block_of(digest_of(1))
    tier.close(time.monotonic())


def test_description_that_another_user_may_have_made_is_not_read(tmp_path: Path) -> None:
    for spoil in HOSTILE.values():
        directory = open_files(tmp_path).directory
        spoil(directory / "model.json")
        assert read_description(directory) == {}


def test_directory_of_blocks_is_this_users_alone(tmp_path: Path) -> None:
    let_others_write(open_files(tmp_path).directory)
    directory = open_files(tmp_path).directory
    assert directory.stat().st_mode & 0o777 == 0o700
    give_away(directory)
    with pytest.raises(ConfigError, match=r"cannot hold KV blocks \(belongs to the user 65534\)"):
        open_files(tmp_path)
