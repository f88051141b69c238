"""Waiting for processes: one that is to end may be gone, or be a zombie, between any two questions."""

import functools
import time
from collections.abc import Callable

import psutil

LIMIT_S = 60.0


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process is gone or a zombie: what collects a lost process may take its time."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], object], explain: Callable[[], str] = str) -> None:
    """Poll a condition until it holds. `explain`: returns what to say if it never does."""
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, explain()
        time.sleep(0.01)


def wait_for_end(*processes: psutil.Process | int) -> None:
    """Wait until processes have ended, which may be given by their ids."""
    for process in processes:
        if isinstance(process, int):
            try:
                process = psutil.Process(process)
            except psutil.NoSuchProcess:
                continue
        wait_until(functools.partial(has_ended, process), lambda: f"{process} is left over")  # noqa: B023
