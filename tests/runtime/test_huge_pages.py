import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from quire.errors import MemoryCapacityError
from quire.linux import bytes_on_huge_pages
from quire.runtime import huge_pages
from quire.runtime.huge_pages import HUGE_PAGE_BYTES, allocate, map_file, on_huge_pages


@pytest.mark.parametrize("num_bytes", [HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES + 5])
def test_large_memory_starts_at_a_huge_page_and_is_writable_to_its_end(num_bytes: int) -> None:
    memory = allocate(num_bytes)
    assert memory.ctypes.data % HUGE_PAGE_BYTES == 0
    assert memory.shape == (num_bytes,)
    assert not memory.any()
    memory.fill(7)
    assert memory[-1] == 7


def test_system_without_huge_pages_gives_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    class Refusing(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            refused.append(option)
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr("quire.runtime.huge_pages.mmap.mmap", Refusing)
    memory = allocate(HUGE_PAGE_BYTES)
    assert refused == [mmap.MADV_HUGEPAGE]
    memory.fill(1)
    assert memory.all()


def test_refused_memory_is_a_capacity_error_that_names_the_option() -> None:
    with pytest.raises(MemoryCapacityError, match=r"refuses 6.. TiB of memory .*--kv-cache-memory-bytes"):
        allocate(10**15 * 7 // 10)


def test_only_a_small_mapping_on_small_pages_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = np.random.default_rng(0).integers(0, 256, 4 * HUGE_PAGE_BYTES, np.uint8)
    path = tmp_path / "weights"
    path.write_bytes(content.tobytes())
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # read again by small pages
    for start in range(0, len(content), mmap.PAGESIZE):
        os.pread(descriptor, 1, start)
    mapped = map_file(descriptor, len(content), 0)
    os.close(descriptor)
    copied = on_huge_pages(mapped)
    assert bytes_on_huge_pages(mapped.ctypes.data) == 0
    assert not np.shares_memory(copied, mapped)
    np.testing.assert_array_equal(copied, content)
    monkeypatch.setattr(huge_pages, "COPIED_BYTES", len(content) - 1)
    assert on_huge_pages(mapped) is mapped
    monkeypatch.undo()
    monkeypatch.setattr(huge_pages, "bytes_on_huge_pages", lambda start: len(content))
    assert on_huge_pages(mapped) is mapped
