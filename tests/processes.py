"""Waiting for processes, one of which may be gone, or be a zombie, between any two questions; processes with limits."""

import functools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

LIMIT_S = 60.0
_CALL = "import sys, {module}; from tests.processes import limit; limit(); {module}.{name}(*sys.argv[1:])"


def run_limited(function: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Call `package.module:function` with words in a process that `limit` ends: a freeze fails a test, and no more."""
    module, _, name = function.partition(":")
    command = [sys.executable, "-c", _CALL.format(module=module, name=name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)


def outcomes_of(function: str, names: Iterable[str]) -> dict[str, Any]:
    """Return what a function prints for each of the words that it is called with, a line `[word, outcome]` of JSON.

    A word at which the process is ended gets "ended"; another process goes on with the next.
    """
    left, found = list(names), dict[str, Any]()
    while left:
        found |= dict(map(json.loads, run_limited(function, *left).stdout.splitlines()))
        left = [name for name in left if name not in found]
        if left:
            found[left.pop(0)] = "ended"
    return found


def limit(*, seconds: int = 10, num_bytes: int = 1 << 30) -> None:
    """Let the system end this process after some more processor time, and refuse it more memory."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    used_s = used.ru_utime + used.ru_stime
    resource.setrlimit(resource.RLIMIT_CPU, (int(used_s) + seconds, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + num_bytes, resource.RLIM_INFINITY))


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
