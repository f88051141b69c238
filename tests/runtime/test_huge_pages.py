import mmap

import pytest

from quire.errors import MemoryCapacityError
from quire.runtime.huge_pages import HUGE_PAGE_BYTES, allocate


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
