"""`SharedFile`: bytes in a file that one process fills and many processes map, with the key of what they were made of.

A header, then from `DATA_OFFSET` on the bytes. The process that holds the lock on `….partial` fills memory and goes on
with it, while a thread writes the file: packing and the first answer do not wait for the disk. What is on disk
is mapped in the place of that memory, so that processes share it. The whole file gets its name when all of it is on
disk, and is valid as long as its time of modification is the one in its header: no start reads the bytes to
check them (`check` does, on demand). Other processes wait for the file. What does not fit in memory is filled in the
mapped file itself.
Must not know models.
Next to read: `plan/weight_file.py`, which keeps packed weights so.
"""

import atexit
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
from quire.files import UnsafeFileError, check_own, make_directory, open_own
from quire.linux import map_over, reserve_blocks, write_back
from quire.runtime.cached_files import CachedFile, trim
from quire.runtime.huge_pages import COPIED_BYTES, HUGE_PAGE_BYTES, allocate, map_file
from quire.weights.model_files import Progress

logger = logging.getLogger("quire.runtime")
MAGIC = b"quirewt1"
SUFFIX, PARTIAL = ".weights", ".partial"
DATA_OFFSET = HUGE_PAGE_BYTES
"""Offset of the bytes in the file: that of a huge page."""
PIECE_BYTES = 64 << 20
"""Bytes that are written and brought to disk in one go; the system holds up a process that ends meanwhile."""
SILENT_S = 2.0
"""Time that the end of a process waits for the disk without a word."""
WRITER = "writes packed weights"
"""Name of the threads that write."""
SHARE_OF_DISK = 0.5
"""Default limit of all files: this share of the disk's free space, with what the files take already."""
_PREFIX = struct.Struct("<8s32sI")  # magic, SHA-256 of the header, its length
_MAX_HEADER_BYTES = 64 << 10
_READ_BYTES = 4 << 20


class Header(msgspec.Struct, frozen=True):
    """Description of a file, in its first bytes.

    Fields:
        source: path of the model's file or directory.
        modified_s: the time of modification of the file, seconds.
        sha256: of the bytes.
    """

    key: str
    model: str
    source: str
    rank: int
    num_bytes: int
    made_by: str
    modified_s: int = 0
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file of packed weights in a directory, or its place there."""

    path: Path
    header: Header

    def find(self) -> NDArray[np.uint8] | None:
        """Map the weights; None if there is no file, or another one than the header asks for. Raises: OSError."""
        try:
            descriptor = open_own(self.path)
        except FileNotFoundError:
            return None
        except UnsafeFileError as error:
            logger.warning("%s %s: the weights are packed anew", error.filename, error.strerror)
            return None
        try:
            status = os.fstat(descriptor)
            problem = self._problem(read_header(descriptor), status)
            if problem is not None:
                logger.info("%s %s: the weights are packed anew", self.path, problem)
                return None
            with suppress(OSError):  # a directory that can only be read
                os.utime(self.path, ns=(time.time_ns(), status.st_mtime_ns))
            return map_file(descriptor, self.header.num_bytes, DATA_OFFSET)
        finally:
            os.close(descriptor)

    def _problem(self, header: Header | None, status: os.stat_result) -> str | None:
        if header is None:
            return "is damaged"
        if header.key != self.header.key:
            return f"was packed from another state of the model, or by another version ({header.made_by})"
        if status.st_size != DATA_OFFSET + header.num_bytes:
            return f"has {status.st_size:,} bytes, not {DATA_OFFSET + header.num_bytes:,}"
        return None if int(status.st_mtime) == header.modified_s else "was changed after it was written"


class Unfinished:
    """A file that this process alone makes. Attributes: `memory`: its bytes, zeros at first."""

    def __init__(self, place: SharedFile, descriptor: int, max_bytes: int | None, *, fits_memory: bool) -> None:
        """Reserve the disk space. `descriptor`: of the locked file, which this object closes. Raises: OSError."""
        self._place, self._descriptor, self._fits_memory = place, descriptor, fits_memory
        num_bytes = place.header.num_bytes
        try:
            os.ftruncate(descriptor, 0)
            make_room(place, max_bytes)
            # A full disk is noticed now: writing to mapped pages without a place there would end the process.
            reserve_blocks(descriptor, DATA_OFFSET, num_bytes)
            if fits_memory:
                self.memory = allocate(num_bytes)
            else:
                self.memory = map_file(descriptor, num_bytes, DATA_OFFSET, is_writable=True)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Delete the file and let other processes go on; the memory stays."""
        with suppress(OSError):
            partial_path(self._place.path).unlink()
        os.close(self._descriptor)  # a mapping holds the file open, not its lock

    def publish(self) -> None:
        """Write the file in a thread of low priority, then give it its name. `memory` can no longer be written.

        The end of the process waits for it (`finish`); a note says why a file is not kept.
        """
        self.memory.flags.writeable = False
        threading.Thread(target=self._publish, name=WRITER, daemon=True).start()

    def _publish(self) -> None:
        path = self._place.path
        try:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread: steps do not wait
            self._write()
            os.replace(partial_path(path), path)
            os.close(self._descriptor)
        except OSError as error:
            logger.info("the packed weights of %s are not kept in %s: %s", self._place.header.model, path, error)
            self.discard()

    def _write(self) -> None:
        """Bring the bytes to disk, then the header. Memory above `COPIED_BYTES` becomes a mapping of the file.

        Raises: OSError.
        """
        digest = hashlib.sha256()
        is_mapped = not self._fits_memory or len(self.memory) > COPIED_BYTES
        for first in range(0, len(self.memory), PIECE_BYTES):
            piece, offset = self.memory[first : first + PIECE_BYTES], DATA_OFFSET + first
            data = piece.data
            digest.update(data)
            while self._fits_memory and data:
                data = data[os.pwrite(self._descriptor, data, offset + len(piece) - len(data)) :]
            write_back(self._descriptor, offset, len(piece))
            if is_mapped:
                map_over(piece.ctypes.data, self._descriptor, offset, len(piece))
        modified_s = int(time.time())
        header = msgspec.structs.replace(self._place.header, modified_s=modified_s, sha256=digest.hexdigest())
        write_header(self._descriptor, header)
        os.utime(self._descriptor, ns=(time.time_ns(), modified_s * 10**9))
        os.fsync(self._descriptor)


@atexit.register
def finish() -> None:
    """Wait until all files of this process are on disk; an interrupt gives them up."""
    writers = [thread for thread in threading.enumerate() if thread.name == WRITER]
    with suppress(BaseException):  # an interrupt, or the signal to end
        for timeout in (SILENT_S, None):
            for writer in writers:
                writer.join(timeout)
            if timeout is not None and any(writer.is_alive() for writer in writers):
                logger.warning("the packed weights are written to disk for the next start; Ctrl-C gives them up")


def find_or_begin(
    place: SharedFile, max_bytes: int | None, report: Progress, *, fits_memory: bool = True
) -> NDArray[np.uint8] | Unfinished:
    """Map a file, or become the process that makes it, after waiting for another one that does. Raises: OSError.

    `max_bytes`: limit of the directory; None: `SHARE_OF_DISK`. `fits_memory`: its bytes are made in memory.
    """
    path, directory = partial_path(place.path), place.path.parent
    make_directory(directory)
    check_own(directory, directory.stat())
    while (memory := place.find()) is None:
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
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
            return Unfinished(place, descriptor, max_bytes, fits_memory=fits_memory)
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
    others = [file for file in list_files(directory) if file.path != partial_path(place.path)]
    used = sum(file.num_bytes for file in others)
    limit = max_bytes if max_bytes is not None else int(SHARE_OF_DISK * (shutil.disk_usage(directory).free + used))
    if needed > limit:
        raise OSError(errno.EFBIG, f"{format_bytes(needed)} are more than the limit of {format_bytes(limit)}")
    for file in trim(others, limit - needed):
        logger.info("%s is deleted: the packed weights of another model need its space", file.path)


@dataclass(frozen=True, slots=True)
class FoundFile(CachedFile):
    """A file of a directory. `header`: None if it is damaged, still being written, or not safe."""

    header: Header | None

    def is_of(self, source: Path) -> bool:
        """Return whether it was packed from a model's file, or from one in the directory `source`."""
        path = None if self.header is None else Path(self.header.source)
        return path is not None and source in (path, *path.parents)

    def problem(self) -> str | None:
        """Read all bytes and return what is wrong with them. Raises: OSError."""
        descriptor = open_own(self.path, os.O_NOATIME)
        try:
            if self.header is None:
                return "is damaged"
            num_bytes = os.fstat(descriptor).st_size - DATA_OFFSET
            if num_bytes != self.header.num_bytes:
                return f"has {num_bytes:,} bytes of weights, not {self.header.num_bytes:,}"
            return None if self.header.sha256 == _sha256(descriptor) else "does not have the bytes that were written"
        finally:
            os.close(descriptor)


def list_files(directory: Path) -> Iterator[FoundFile]:
    """Yield the files of all models; one that is being written counts as used now. Raises: OSError."""
    for path in sorted(directory.iterdir()):
        if path.suffix not in (SUFFIX, PARTIAL):
            continue
        with suppress(OSError):  # another process deletes files too
            status = path.lstat()
            used_ns = status.st_atime_ns if path.suffix == SUFFIX else status.st_mtime_ns
            header = _header_at(path) if path.suffix == SUFFIX else None
            yield FoundFile(path, status.st_blocks * 512, used_ns, header)


def _header_at(path: Path) -> Header | None:
    """Return the header of a file, without counting as use, which the system allows for files of this user."""
    try:
        descriptor = open_own(path, os.O_NOATIME)
    except UnsafeFileError:
        return None
    try:
        return read_header(descriptor)
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
