"""`BlockFiles`: KV blocks as files, one per block, that outlive the process. No threads, no scheduler.

`DIR/<fingerprint>/<digest>-<group>.kv`, for a rank of several `DIR/<fingerprint>-<rank>of<ranks>/…`: 128 bytes of
header, then the block's bytes in all layers of its group. The fingerprint is that of everything the bytes depend on
(`disk_tier.py`), so that one directory serves many models; the digest is that of the prefix. Header: magic,
fingerprint, digest, group, number of bytes, and a SHA-256 of these and the bytes. A file is written under another name
and renamed, so processes may share a directory. Files are not synced: one that a power failure tore has another
checksum, and counts as absent. Next to read: `disk_tier.py`.
"""

import contextlib
import hashlib
import json
import os
import re
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.files import check_own, make_directory, open_own, read_own, replace_file
from quire.runtime.cached_files import CachedFile, trim

MAGIC = b"quirekv1"
_HEADER = struct.Struct("<8s32s32sIQ")
HEADER_BYTES = 128
DESCRIPTION = "model.json"
_DIRECTORY = re.compile(r"[0-9a-f]{32}(-\d+of\d+)?")
_FILE = re.compile(r"([0-9a-f]{64})-(\d{1,4})\.kv")
_UNFINISHED = re.compile(r"([0-9a-f]{64}-\d{1,4}\.kv|model\.json)\.[\w.]+")
_OLD_S = 3600
"""An unfinished file of this age belongs to a process that was killed."""
_KEPT = 0.9
"""Share of the limit that is left when the oldest files are deleted."""


class BlockFileError(Exception):
    """A file does not hold the block that its name says."""


@dataclass(frozen=True, slots=True)
class BlockFile(CachedFile):
    """A file of a directory, as its name and status tell."""

    group_index: int
    digest: bytes

    def problem(self) -> str | None:
        """Read the file and return what is wrong with it. Raises: OSError."""
        data = memoryview(read_own(self.path))
        if len(data) < HEADER_BYTES or bytes(data[:8]) != MAGIC:
            return "is no block of this version"
        _, fingerprint, _, _, _ = _HEADER.unpack_from(data)
        if fingerprint.hex()[:32] != self.path.parent.name[:32]:
            return "belongs to another model"
        expected = make_header(fingerprint, self.group_index, self.digest, data[HEADER_BYTES:])
        return None if data[:HEADER_BYTES] == expected else "is damaged"


class BlockFiles:
    """The blocks of one model in a directory that is bounded over all models."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        fingerprint: bytes,
        description: dict[str, Any],
        max_bytes: int,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Make the directory and delete leftovers. `description`: for people, of the model.

        `num_ranks`: processes that share the limit, each of which writes about as much as this one.
        Raises: ConfigError if files cannot be written there.
        """
        self.root = Path(root).expanduser()
        self._fingerprint, self._max_bytes, self._num_ranks = fingerprint, max_bytes, num_ranks
        self.directory = self.root / (fingerprint.hex()[:32] + (f"-{rank}of{num_ranks}" if num_ranks > 1 else ""))
        try:
            make_directory(self.directory)
            with contextlib.suppress(PermissionError):
                self.directory.chmod(0o700)  # a volume's group may have been given the right to write
            check_own(self.directory, self.directory.stat())
            replace_file(self.directory / DESCRIPTION, [json.dumps(description).encode()])
        except OSError as error:
            raise ConfigError(
                f"--kv-disk {self.root} cannot hold KV blocks ({error.strerror or error}): name a directory that this"
                " user may write to, or leave --kv-disk out"
            ) from error
        for path in self.directory.iterdir():
            with contextlib.suppress(OSError):
                if _UNFINISHED.fullmatch(path.name) and path.stat().st_mtime < time.time() - _OLD_S:
                    path.unlink()
        self._num_bytes = sum(file.num_bytes for file in list_files(self.root))
        self._trim()

    def keys(self) -> set[tuple[int, bytes]]:
        """Return group and digest of each block of the model."""
        return {(file.group_index, file.digest) for file in files_in(self.directory)}

    def path(self, group_index: int, digest: bytes) -> Path:
        """Return the place of a block."""
        return self.directory / f"{digest.hex()}-{group_index}.kv"

    def read(self, group_index: int, digest: bytes, target: memoryview, *, age_ns: int = 0) -> None:
        """Read a block, and note its use `age_ns` ago. Mutates: target, also when this raises.

        Raises: FileNotFoundError, OSError, BlockFileError.
        """
        path = self.path(group_index, digest)
        header = bytearray(HEADER_BYTES)
        with open(open_own(path), "rb", buffering=0) as file:
            num_read = os.readv(file.fileno(), [header, target])
            if num_read != HEADER_BYTES + len(target) or os.fstat(file.fileno()).st_size != num_read:
                raise BlockFileError("has another length")
        if header != make_header(self._fingerprint, group_index, digest, target):
            raise BlockFileError("is damaged")
        with contextlib.suppress(OSError):
            used_ns = time.time_ns() - age_ns
            os.utime(path, ns=(used_ns, used_ns))

    def write(self, group_index: int, digest: bytes, values: memoryview, *, age_ns: int = 0) -> None:
        """Write a block; if the limit is exceeded, delete those used longest ago. Raises: OSError."""
        path = self.path(group_index, digest)
        replace_file(path, [make_header(self._fingerprint, group_index, digest, values), values])
        if age_ns:
            used_ns = time.time_ns() - age_ns
            os.utime(path, ns=(used_ns, used_ns))
        self._num_bytes += self._num_ranks * (HEADER_BYTES + len(values))
        self._trim()

    def _trim(self) -> None:
        if self._num_bytes <= self._max_bytes:
            return
        # Other processes write and delete too: only the directory knows.
        files = list(list_files(self.root))
        self._num_bytes = sum(file.num_bytes for file in files)
        if self._num_bytes > self._max_bytes:
            self._num_bytes -= sum(file.num_bytes for file in trim(files, int(_KEPT * self._max_bytes)))


def make_header(fingerprint: bytes, group_index: int, digest: bytes, values: memoryview) -> bytes:
    """Return the header of a block's file: fields, their checksum with the values, zeros."""
    fields = _HEADER.pack(MAGIC, fingerprint, digest, group_index, len(values))
    checksum = hashlib.sha256(fields)
    checksum.update(values)
    return (fields + checksum.digest()).ljust(HEADER_BYTES, b"\0")


def list_files(root: Path) -> Iterator[BlockFile]:
    """Yield the blocks of all models in a directory. Raises: OSError if it cannot be listed."""
    for directory in list_models(root):
        yield from files_in(directory)


def list_models(root: Path) -> list[Path]:
    """Return the directories of models. Raises: OSError."""
    return sorted(path for path in root.iterdir() if _DIRECTORY.fullmatch(path.name) and path.is_dir())


def read_description(directory: Path) -> dict[str, Any]:
    """Return what is known of a directory's model; empty if its description is gone."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(read_own(directory / DESCRIPTION))
        if isinstance(found, dict):
            return found
    return {}


def files_in(directory: Path) -> Iterator[BlockFile]:
    """Yield the blocks of one model, in no order."""
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            name = _FILE.fullmatch(entry.name)
            if name is not None:
                with contextlib.suppress(OSError):  # another process deletes files too
                    status, path = entry.stat(follow_symlinks=False), directory / entry.name
                    yield BlockFile(path, status.st_size, status.st_mtime_ns, int(name[2]), bytes.fromhex(name[1]))
