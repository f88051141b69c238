"""Memory behind the highest address in use is committed, up to its end, and keeps what is in it."""

import ctypes
import mmap
import time
import weakref

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.runtime import commit_ahead
from quire.runtime.commit_ahead import CommitAhead
from quire.runtime.huge_pages import HUGE_PAGE_BYTES, allocate


def resident_pages(memory: NDArray[np.uint8]) -> list[bool]:
    """Return for each page whether it has memory (mincore(2))."""
    num_pages = -(-len(memory) // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * num_pages)()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(memory.ctypes.data, len(memory), found) == 0
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


def step(ahead: CommitAhead, num_bytes: int) -> None:
    ahead.begin_step(num_bytes)
    ahead.end_step()


def test_what_comes_next_is_committed_and_nothing_behind_it(four_pages_ahead: int) -> None:
    memory = allocate(16 * HUGE_PAGE_BYTES)
    ahead = CommitAhead(memory)
    step(ahead, 3 * HUGE_PAGE_BYTES)
    end = 3 * HUGE_PAGE_BYTES + four_pages_ahead
    wait_for(ahead, end)
    pages = resident_pages(memory)
    assert all(pages[: end // mmap.PAGESIZE])
    assert not any(pages[end // mmap.PAGESIZE :])


def test_contents_stay(four_pages_ahead: int) -> None:
    memory = allocate(2 * HUGE_PAGE_BYTES)
    memory[:5] = 7
    ahead = CommitAhead(memory)
    wait_for(ahead, len(memory))
    assert memory[:6].tolist() == [7] * 5 + [0]


def test_nothing_is_committed_while_a_step_runs_or_one_was_just_there(four_pages_ahead: int) -> None:
    ahead = CommitAhead(allocate(16 * HUGE_PAGE_BYTES))
    wait_for(ahead, four_pages_ahead)
    ahead.begin_step(8 * HUGE_PAGE_BYTES)
    assert ahead.commit_rest(1) == 1
    ahead.end_step()
    assert ahead.commit_rest(1) == 2
    assert ahead.num_committed == four_pages_ahead
    wait_for(ahead, 8 * HUGE_PAGE_BYTES + four_pages_ahead)


def test_memory_is_given_back_with_its_owner() -> None:
    ahead = CommitAhead(allocate(16 * HUGE_PAGE_BYTES))
    ahead.begin_step(0)  # the thread waits
    owner = weakref.ref(ahead)
    del ahead
    end = time.monotonic() + 60
    while owner() is not None:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_system_that_cannot_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_ahead, "_POPULATE_WRITE", 12345)  # no advice that there is
    memory = allocate(2 * HUGE_PAGE_BYTES)
    ahead = CommitAhead(memory)
    wait_for(ahead, len(memory))
    assert not any(resident_pages(memory))
    assert ahead.commit_rest(0) is None
