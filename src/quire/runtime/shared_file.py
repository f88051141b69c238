"""`SharedFile`: bytes in a file that one process fills and many processes map, with the key of what they were made of.

A header, then from `DATA_OFFSET` on the bytes. The process that holds the lock on `….partial` fills that file in mapped
memory; others wait, and map the result. Where files have huge pages (ext4, XFS, Btrfs) this is as fast as anonymous
memory (elsewhere `huge_pages.on_huge_pages` copies small files), and the system writes the pages to disk by itself. A
renamed file is valid until the machine restarts, because all processes see the same page cache. A thread then brings it
to disk (`settle`), and from there on it is valid as long as its time of modification is the one in its header: no start
reads the bytes to check them. `check` does, on demand.
Must not know models.
Next to read: `plan/weight_file.py`, which keeps packed weights so.
"""

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.byte_sizes import format_bytes
from quire.linux import begin_write_back, reserve_blocks, write_back
from quire.runtime.huge_pages import HUGE_PAGE_BYTES, map_file
from quire.weights.progress import Progress

logger = logging.getLogger("quire.runtime")
MAGIC = b"quirewt1"
SUFFIX, PARTIAL = ".weights", ".partial"
DATA_OFFSET = HUGE_PAGE_BYTES
"""Offset of the bytes in the file: that of a huge page."""
SETTLE_S = 10.0
"""Time after which a new file is brought to disk: short runs do not wait for the disk when they end."""
SETTLE_BYTES = 64 << 20
"""Bytes that are brought to disk in one call, which delays the end of the process."""
WRITTEN_BEHIND_BYTES = 1 << 30
"""Least size of a file that is written to disk while it is packed.

The system itself begins when a tenth of the memory is dirty, and holds up the threads that pack from about 15 % on.
"""
WRITE_INTERVAL_S = 0.25
SHARE_OF_DISK = 0.5
"""Default limit of all files: this share of the disk's free space, with what the files take already."""
_PREFIX = struct.Struct("<8s32sI")  # magic, SHA-256 of the header, its length
_MAX_HEADER_BYTES = 64 << 10
_READ_BYTES = 4 << 20


class Header(msgspec.Struct, frozen=True):
    """Description of a file, in its first bytes.

    Fields:
        source: path of the model's file or directory.
        boot_id: of the system that packed the file; None when it is known to be on disk.
        modified_s: the time of modification that the file then has, seconds.
        sha256: of the bytes, when they were brought to disk.
    """

    key: str
    model: str
    source: str
    rank: int
    num_bytes: int
    made_by: str
    boot_id: str | None
    modified_s: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file of packed weights in a directory, or its place there."""

    path: Path
    header: Header

    def find(self) -> NDArray[np.uint8] | None:
        """Map the weights; None if there is no file, or another one than the header asks for. Raises: OSError."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # `settle` rewrites the header
            status, header = os.fstat(descriptor), read_header(descriptor)
            problem = self._problem(header, status)
            if problem is not None:
                logger.info("%s %s: the weights are packed anew", self.path, problem)
                return None
            with suppress(OSError):  # a directory that can only be read
                os.utime(self.path, ns=(time.time_ns(), status.st_mtime_ns))
            memory = map_file(descriptor, self.header.num_bytes, DATA_OFFSET)
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # the mapping holds the file open
        finally:
            os.close(descriptor)
        if header is not None and header.boot_id is not None:
            settle_later(self.path)
        return memory

    def _problem(self, header: Header | None, status: os.stat_result) -> str | None:
        if header is None:
            return "is damaged"
        if header.key != self.header.key:
            return f"was packed from another state of the model, or by another version ({header.made_by})"
        if status.st_size != DATA_OFFSET + header.num_bytes:
            return f"has {status.st_size:,} bytes, not {DATA_OFFSET + header.num_bytes:,}"
        if header.boot_id is None:
            return None if int(status.st_mtime) == header.modified_s else "was changed after it was written"
        return None if header.boot_id == boot_id() else "was perhaps not on disk when the machine stopped"


class Unfinished:
    """A file that this process alone packs. Attributes: `memory`: its bytes, zeros at first."""

    def __init__(self, place: SharedFile, descriptor: int, max_bytes: int | None) -> None:
        """Reserve the disk space. `descriptor`: of the locked file, which this object closes. Raises: OSError."""
        self._place, self._descriptor, self._path = place, descriptor, partial_path(place.path)
        self._is_packed = threading.Event()
        self._writer: threading.Thread | None = None
        try:
            os.ftruncate(descriptor, 0)
            make_room(place, max_bytes)
            # Without reserved blocks, writing to the mapped pages of a full disk would end the process.
            reserve_blocks(descriptor, DATA_OFFSET, place.header.num_bytes)
            self.memory = map_file(descriptor, place.header.num_bytes, DATA_OFFSET, is_writable=True)
        except OSError:
            self.close()
            raise
        if place.header.num_bytes >= WRITTEN_BEHIND_BYTES:
            self._writer = threading.Thread(target=self._write_behind, daemon=True)
            self._writer.start()

    def _write_behind(self) -> None:
        """Write to disk what is packed by now, again and again."""
        while not self._is_packed.wait(WRITE_INTERVAL_S):
            begin_write_back(self._descriptor)

    def publish(self) -> NDArray[np.uint8]:
        """Give the file its name. Return its bytes, which can no longer be written. Raises: OSError."""
        write_header(self._descriptor, self._place.header)
        memory = map_file(self._descriptor, self._place.header.num_bytes, DATA_OFFSET)
        os.replace(self._path, self._place.path)
        self._path = self._place.path
        settle_later(self._path)
        return memory

    def close(self) -> None:
        """Let other processes go on; delete the file unless it was published."""
        self._is_packed.set()
        if self._writer is not None:
            self._writer.join()
        if self._path != self._place.path:
            with suppress(OSError):
                self._path.unlink()
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # the mapping holds the file open
        os.close(self._descriptor)


def find_or_begin(place: SharedFile, max_bytes: int | None, report: Progress) -> NDArray[np.uint8] | Unfinished:
    """Map a file, or become the process that packs it, after waiting for another one that does. Raises: OSError.

    `max_bytes`: limit of the directory; None: `SHARE_OF_DISK`.
    """
    place.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = partial_path(place.path)
    while (memory := place.find()) is None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report("waiting for another process that packs the same weights", 0, None)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            is_alone = _is_at(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise
        if is_alone:
            return Unfinished(place, descriptor, max_bytes)
        os.close(descriptor)  # the other process has renamed or deleted it
    return memory


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def make_room(place: SharedFile, max_bytes: int | None) -> None:
    """Delete the files used longest ago until the new one fits below the limit. Raises: OSError if it never does."""
    directory, needed = place.path.parent, place.header.num_bytes
    with suppress(FileNotFoundError):
        place.path.unlink()  # `find` refused it
    others = (file for file in list_files(directory) if file.path != partial_path(place.path))
    files = sorted(others, key=lambda file: file.used_ns)
    used = sum(file.num_bytes for file in files)
    limit = max_bytes if max_bytes is not None else int(SHARE_OF_DISK * (shutil.disk_usage(directory).free + used))
    if needed > limit:
        raise OSError(errno.EFBIG, f"{format_bytes(needed)} are more than the limit of {format_bytes(limit)}")
    for file in files:
        if used + needed <= limit:
            return
        logger.info("%s is deleted: the packed weights of another model need its space", file.path)
        file.path.unlink(missing_ok=True)
        used -= file.num_bytes


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of a directory. `header`: None if it is damaged, or still being written."""

    path: Path
    header: Header | None
    num_bytes: int
    used_ns: int

    def is_of(self, source: Path) -> bool:
        """Return whether it was packed from a model's file, or from one in the directory `source`."""
        path = None if self.header is None else Path(self.header.source)
        return path is not None and source in (path, *path.parents)


def list_files(directory: Path) -> Iterator[FoundFile]:
    """Yield the files of all models; one that is being written counts as used now. Raises: OSError."""
    for path in sorted(directory.iterdir()):
        if path.suffix not in (SUFFIX, PARTIAL):
            continue
        with suppress(OSError):  # another process deletes files too
            # Reading must not count as use; the system allows that for files of this user.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOATIME)
            try:
                status = os.fstat(descriptor)
                header = None if path.suffix == PARTIAL else read_header(descriptor)
                used_ns = status.st_atime_ns if path.suffix == SUFFIX else status.st_mtime_ns
            finally:
                os.close(descriptor)
            yield FoundFile(path, header, status.st_blocks * 512, used_ns)


def check(file: FoundFile) -> str | None:
    """Read all bytes of a file and return what is wrong with it. Raises: OSError."""
    header = file.header
    if header is None:
        return "is damaged"
    descriptor = os.open(file.path, os.O_RDONLY | os.O_NOATIME)
    try:
        num_bytes = os.fstat(descriptor).st_size - DATA_OFFSET
        if num_bytes != header.num_bytes:
            return f"has {num_bytes:,} bytes of weights, not {header.num_bytes:,}"
        if header.sha256 is not None and header.sha256 != _sha256(descriptor):
            return "does not have the bytes that were written"
        return None
    finally:
        os.close(descriptor)


def _sha256(descriptor: int) -> str:
    digest, offset = hashlib.sha256(), DATA_OFFSET
    while data := os.pread(descriptor, _READ_BYTES, offset):
        digest.update(data)
        offset += len(data)
    return digest.hexdigest()


def partial_path(path: Path) -> Path:
    """Return the name of a file while it is packed."""
    return path.with_name(path.name + PARTIAL)


def read_header(descriptor: int) -> Header | None:
    """Return the header of a file; None if it is damaged, or of something else. Raises: OSError."""
    data = os.pread(descriptor, _MAX_HEADER_BYTES, 0)
    if len(data) < _PREFIX.size:
        return None
    magic, checksum, length = _PREFIX.unpack_from(data)
    body = data[_PREFIX.size : _PREFIX.size + length]
    if magic != MAGIC or hashlib.sha256(body).digest() != checksum:
        return None
    try:
        return msgspec.json.decode(body, type=Header)
    except msgspec.MsgspecError:
        return None


def write_header(descriptor: int, header: Header) -> None:
    """Write the header of a file. Raises: OSError."""
    body = msgspec.json.encode(header)
    os.pwrite(descriptor, _PREFIX.pack(MAGIC, hashlib.sha256(body).digest(), len(body)) + body, 0)


def boot_id() -> str | None:
    """Return the identity of the running system since it started."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return None


def settle_later(path: Path) -> None:
    """Bring a file to disk in `SETTLE_S` seconds, if this process still runs."""
    timer = threading.Timer(SETTLE_S, _settle, [path])
    timer.daemon = True
    timer.start()


def _settle(path: Path) -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread: steps do not wait for it
        settle(path)


def settle(path: Path) -> None:
    """Bring a file to disk, then say so in its header. Raises: OSError.

    Pages that are being written to disk hold up a process that ends, so they are written some at a time.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        for start in range(0, os.fstat(descriptor).st_size, SETTLE_BYTES):
            write_back(descriptor, start, SETTLE_BYTES)
        os.fsync(descriptor)
        sha256 = _sha256(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        header = read_header(descriptor)
        if header is not None and header.boot_id is not None:
            modified_s = int(time.time())
            settled = msgspec.structs.replace(header, boot_id=None, modified_s=modified_s, sha256=sha256)
            write_header(descriptor, settled)
            os.fsync(descriptor)
            os.utime(descriptor, ns=(os.fstat(descriptor).st_atime_ns, modified_s * 10**9))
    finally:
        os.close(descriptor)
