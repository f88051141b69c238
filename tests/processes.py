"""Waiting for processes that tests have ended: one may be gone, or be a zombie, between any two questions."""

import time

import psutil

LIMIT_S = 60.0


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process is gone or a zombie: what collects a lost process may take its time."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_end(*processes: psutil.Process | int) -> None:
    """Wait until processes have ended, which may be given by their ids."""
    deadline_s = time.monotonic() + LIMIT_S
    for process in processes:
        if isinstance(process, int):
            if not psutil.pid_exists(process):
                continue
            try:
                process = psutil.Process(process)
            except psutil.NoSuchProcess:
                continue
        while not has_ended(process):
            assert time.monotonic() < deadline_s, f"{process} is left over"
            time.sleep(0.01)
