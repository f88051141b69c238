import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from quire.errors import MemoryCapacityError
from quire.runtime.address_space import (
    IMPORT_BYTES,
    AddressSpace,
    address_spaces,
    check_room_for_imports,
    memory_errors_named,
)
from quire.runtime.hardware import detect_hardware

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def test_limits_that_are_set_and_what_is_taken_of_them(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmSize:\t  2048 kB\nVmData:\t 1024 kB\nThreads:\t4\n")
    unlimited = {resource.RLIMIT_AS: resource.RLIM_INFINITY, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    assert address_spaces(unlimited, status) == []
    (space,) = address_spaces(unlimited | {resource.RLIMIT_AS: 500 * MIB}, status)
    assert (space.limit_bytes, space.used_bytes) == (500 * MIB, 2 * MIB)
    (space,) = address_spaces(unlimited | {resource.RLIMIT_DATA: 500 * MIB}, status)
    assert space.used_bytes == MIB
    (space,) = address_spaces({resource.RLIMIT_AS: 500 * MIB}, tmp_path / "absent")
    assert space.used_bytes == 0


def test_threads_take_their_part() -> None:
    space = AddressSpace("limit", 1000 * MIB, 600 * MIB, 0)
    assert 0 < space.left_bytes(2) < space.left_bytes(1) < 400 * MIB
    assert AddressSpace("limit", 500 * MIB, 600 * MIB, 0).left_bytes(1) == 0


def test_too_little_for_the_imports_is_said_with_both_numbers() -> None:
    check_room_for_imports([AddressSpace("limit", 100 * MIB, 0, 100 * MIB)])
    with pytest.raises(MemoryCapacityError, match=r"needs 100 MiB .* but 99 MiB are allowed \(limit\)"):
        check_room_for_imports([AddressSpace("limit", 99 * MIB, 0, 100 * MIB)])


@pytest.mark.parametrize("number", list(IMPORT_BYTES))
def test_a_process_within_that_room_can_import_torch_and_finds_the_limit(number: int) -> None:
    code = (
        "from quire.runtime.hardware import detect_hardware as detect\n"
        "found = detect('cpu')\n"
        "print(found.available_memory_bytes, found.total_memory_bytes, found.memory_limit)"
    )
    limit = IMPORT_BYTES[number] + 200 * MIB
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(number, (limit, limit)),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    available, total, name = result.stdout.strip().split(" ", 2)
    assert 0 < int(available) < 400 * MIB
    assert int(total) <= limit
    assert name.startswith("RLIMIT_AS" if number == resource.RLIMIT_AS else "RLIMIT_DATA")


def test_without_a_limit_none_is_named() -> None:
    if not address_spaces():
        assert detect_hardware("cpu").memory_limit in ("", "cgroup")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes."),
        RuntimeError("can't start new thread"),
    ],
)
def test_memory_that_runs_out_while_loading_is_told_as_such(error: Exception) -> None:
    wanted = r"loading ran out of memory.*--kv-cache-memory-bytes"
    with pytest.raises(MemoryCapacityError, match=wanted) as raised, memory_errors_named("loading"):
        raise error
    assert "\n" not in str(raised.value)


def test_other_errors_stay_as_they_are() -> None:
    for error in (RuntimeError("a bug"), OSError(errno.ENOENT, "no file"), ValueError("allocate memory")):
        with pytest.raises(type(error)) as raised, memory_errors_named("loading"):
            raise error
        assert raised.value is error
