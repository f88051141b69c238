"""Memory behind the highest address in use is committed, up to its end, and keeps what is in it."""

import ctypes
import mmap
import time

import pytest
import torch

from quire.runtime import commit_ahead
from quire.runtime.commit_ahead import CommitAhead
from quire.runtime.huge_pages import HUGE_PAGE_BYTES, allocate


def resident_pages(memory: torch.Tensor) -> list[bool]:
    """Whether each page has memory (mincore(2))."""
    num_pages = -(-len(memory) // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * num_pages)()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(memory.data_ptr(), len(memory), found) == 0
    return [bool(page & 1) for page in found]


def wait_for(ahead: CommitAhead, num_bytes: int) -> None:
    end = time.monotonic() + 60
    while ahead.num_committed < num_bytes:
        assert time.monotonic() < end, f"{ahead.num_committed} of {num_bytes} bytes after a minute"
        time.sleep(0.01)


@pytest.fixture
def four_pages_ahead(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(commit_ahead, "AHEAD_BYTES", 4 * HUGE_PAGE_BYTES)
    return 4 * HUGE_PAGE_BYTES


def test_what_comes_next_is_committed_and_nothing_behind_it(four_pages_ahead: int) -> None:
    memory = allocate(16 * HUGE_PAGE_BYTES)
    ahead = CommitAhead(memory)
    ahead.reach(HUGE_PAGE_BYTES)
    wait_for(ahead, HUGE_PAGE_BYTES + four_pages_ahead)
    pages = resident_pages(memory)
    num_committed = (HUGE_PAGE_BYTES + four_pages_ahead) // mmap.PAGESIZE
    assert all(pages[:num_committed])
    assert not any(pages[num_committed:])


def test_contents_stay(four_pages_ahead: int) -> None:
    memory = allocate(2 * HUGE_PAGE_BYTES)
    memory[:5] = 7
    ahead = CommitAhead(memory)
    ahead.reach(0)
    wait_for(ahead, len(memory))
    assert memory[:6].tolist() == [7] * 5 + [0]


@pytest.mark.parametrize("num_bytes", [4096, HUGE_PAGE_BYTES + 5])
def test_it_ends_where_the_memory_ends(num_bytes: int) -> None:
    memory = allocate(num_bytes)
    ahead = CommitAhead(memory)
    ahead.reach(num_bytes)
    wait_for(ahead, num_bytes)
    assert ahead.num_committed == num_bytes
    assert all(resident_pages(memory))


def test_memory_in_use_goes_on_being_followed(four_pages_ahead: int) -> None:
    ahead = CommitAhead(allocate(32 * HUGE_PAGE_BYTES))
    for num_pages in range(0, 28, 2):
        ahead.reach(num_pages * HUGE_PAGE_BYTES)
        wait_for(ahead, num_pages * HUGE_PAGE_BYTES + four_pages_ahead // 2)


def test_a_system_that_cannot_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_ahead, "_POPULATE_WRITE", 12345)  # no advice that there is
    memory = allocate(2 * HUGE_PAGE_BYTES)
    ahead = CommitAhead(memory)
    ahead.reach(0)
    wait_for(ahead, len(memory))
    assert not any(resident_pages(memory))
    assert not ahead.commit_next()
