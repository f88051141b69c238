"""`CachedFile`: a file of a directory that is bounded, and `trim`, which deletes those used longest ago.

Next to read: `shared_file.py` and `block_files.py`, the two kinds.
"""

from abc import abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file as its directory tells. `num_bytes`: on the disk."""

    path: Path
    num_bytes: int
    used_ns: int

    @abstractmethod
    def problem(self) -> str | None:
        """Read all of the file and return what is wrong with it. Raises: OSError."""


def trim(files: Iterable[CachedFile], max_bytes: int) -> list[CachedFile]:
    """Delete files, those used longest ago first, until the others have at most `max_bytes`. Returns: those deleted."""
    by_use = sorted(files, key=lambda file: file.used_ns)
    excess, deleted = sum(file.num_bytes for file in by_use) - max_bytes, list[CachedFile]()
    for file in by_use:
        if excess <= 0:
            break
        with suppress(OSError):  # another process deletes files too
            file.path.unlink()
        excess -= file.num_bytes
        deleted.append(file)
    return deleted
