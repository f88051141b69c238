"""Detected hardware: the real machine in outline, made-up /proc and cgroup files in detail."""

import os
import re
import resource
from pathlib import Path

import pytest
import torch

from quire import _native
from quire.errors import ConfigError
from quire.runtime import hardware
from quire.runtime.hardware import (
    INSTRUCTION_SETS,
    CgroupLimits,
    cgroup_limits,
    check_shares,
    count_threads,
    cpus_of_ranks,
    detect_hardware,
    device_of_share,
    each_instruction_set,
    read_cpu_info,
)

ROOT = Path(__file__).parents[2]
NO_CUDA = not torch.cuda.is_available()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.skipif(not NO_CUDA, reason="this machine has a CUDA device")
def test_without_cuda_auto_is_cpu_and_cuda_an_error() -> None:
    assert detect_hardware("auto").device == "cpu"
    for device in ("cuda", "cuda:0"):
        with pytest.raises(ConfigError, match="no CUDA device; --device cpu works"):
            detect_hardware(device)


@pytest.mark.gpu
@pytest.mark.skipif(NO_CUDA, reason="no CUDA device")
def test_cuda() -> None:
    assert detect_hardware("auto").device == "cuda:0"
    found = detect_hardware("cuda:0")
    assert 0 < found.available_memory_bytes <= found.total_memory_bytes
    with pytest.raises(ConfigError, match="is the last"):
        detect_hardware("cuda:99")


@pytest.mark.parametrize("device", ["", "gpu", "cpu:0", "cuda:x", "cuda:-1", "auto:1", "mps"])
def test_unknown_devices(device: str) -> None:
    with pytest.raises(ConfigError, match="not one of auto, cpu, cuda"):
        detect_hardware(device)


def test_cpu_info(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    write(path, "processor\t: 0\nmodel name\t: Fast 9000\nflags\t\t: fpu avx512_bf16 amx_bf16\n\nmodel name\t: other\n")
    info = read_cpu_info(path)
    assert info.name == "Fast 9000"
    assert info.flags == {"fpu", "avx512_bf16", "amx_bf16"}
    write(path, "processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert "bf16" in read_cpu_info(path).flags
    assert read_cpu_info(tmp_path / "absent").flags == frozenset()


def test_cgroup_v2_takes_the_tightest_limit_of_all_parents(tmp_path: Path) -> None:
    mount, membership = tmp_path / "cgroup", tmp_path / "membership"
    write(membership, "0::/outer/inner\n")
    write(mount / "outer/inner/memory.max", "max\n")
    write(mount / "outer/inner/cpu.max", "max 100000\n")
    write(mount / "outer/memory.max", "1000000\n")
    write(mount / "outer/memory.current", "700000\n")
    write(mount / "outer/memory.stat", "anon 400000\nfile 300000\ninactive_file 200000\nactive_file 50000\n")
    write(mount / "outer/cpu.max", "150000 100000\n")
    assert cgroup_limits(mount, membership) == CgroupLimits(1_000_000, 450_000, 1.5)


def test_cgroup_v1_and_none(tmp_path: Path) -> None:
    mount, membership = tmp_path / "cgroup", tmp_path / "membership"
    write(membership, "5:memory:/job\n3:cpu,cpuacct:/job\n")
    write(mount / "memory/job/memory.limit_in_bytes", "5000\n")
    write(mount / "memory/job/memory.usage_in_bytes", "3000\n")
    assert cgroup_limits(mount, membership) == CgroupLimits(5000, 3000, None)
    assert cgroup_limits(tmp_path / "absent", tmp_path / "absent") == CgroupLimits(None, 0, None)


def test_threads_are_physical_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5})
    for cpu in range(8):
        # Two sockets of two cores of two threads each: 0, 1 are one core.
        write(tmp_path / f"cpu{cpu}/topology/core_id", f"{cpu // 2 % 2}\n")
        write(tmp_path / f"cpu{cpu}/topology/physical_package_id", f"{cpu // 4}\n")
    assert count_threads(topology=tmp_path) == 3
    assert count_threads(quota=2.5, topology=tmp_path) == 2
    assert count_threads(quota=0.5, topology=tmp_path) == 1
    assert count_threads(topology=tmp_path / "absent") == 6
    # Ranks share no core, though its two threads are two CPUs.
    assert cpus_of_ranks(3, tmp_path) == [[0, 1], [2, 3], [4, 5]]
    assert cpus_of_ranks(1, tmp_path) == [[0, 1, 2, 3, 4, 5]]
    assert cpus_of_ranks(4, tmp_path) == [[], [], [], []]
    check_shares(3, tmp_path)
    with pytest.raises(ConfigError, match=r"data_parallel_size=4: .* 3 cores.*--data-parallel-size 3 works"):
        check_shares(4, tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert count_threads(topology=tmp_path) == 5


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "devices"),
    [(2, 1, ["cuda:0", "cuda:1"]), (1, 1, ["auto", "auto"]), (4, 2, ["cuda:0", "cuda:2"]), (3, 2, ["auto", "auto"])],
)
def test_replicas_have_their_own_gpus_if_there_are_enough(
    num_gpus: int, num_ranks: int, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert [device_of_share("auto", 2, index, num_ranks) for index in range(2)] == devices
    assert device_of_share("cpu", 2, 1) == "cpu"


@pytest.mark.parametrize(
    ("cgroup_bytes", "address_bytes", "available", "limit"),
    [(2**50, None, None, ""), (300, None, 290, "cgroup"), (300, 200, 200, "ulimit"), (100, 200, 90, "cgroup")],
)
def test_tightest_limit_of_memory_counts(
    cgroup_bytes: int, address_bytes: int | None, available: int | None, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces = [] if address_bytes is None else [(address_bytes, 0, "ulimit")]
    monkeypatch.setattr(hardware, "THREAD_BYTES", 0)
    monkeypatch.setattr(hardware, "address_spaces", lambda: spaces)
    monkeypatch.setattr(hardware, "cgroup_limits", lambda: CgroupLimits(cgroup_bytes, 10, None))
    found = detect_hardware("cpu")
    assert found.memory_limit == limit
    assert available is None or found.available_memory_bytes == available
    assert found.total_memory_bytes <= min(cgroup_bytes, address_bytes or cgroup_bytes)


@pytest.mark.parametrize(("number", "name"), [(resource.RLIMIT_AS, "RLIMIT_AS"), (resource.RLIMIT_DATA, "RLIMIT_DATA")])
def test_limited_address_space_limits_the_memory(number: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fields = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    used = {words[0]: int(words[1]) << 10 for words in fields if words[-1:] == ["kB"]}
    limit = used["VmSize:" if number == resource.RLIMIT_AS else "VmData:"] + (1 << 30)
    before = resource.getrlimit(number)
    resource.setrlimit(number, (limit, before[1]))
    try:
        found = detect_hardware("cpu")
    finally:
        resource.setrlimit(number, before)
    assert (512 << 20) < found.available_memory_bytes < 1 << 30
    assert found.total_memory_bytes <= limit
    assert found.memory_limit.startswith(name)


def test_docs_and_kernels_name_the_same_instruction_sets() -> None:
    row = re.search(r"^\| `QUIRE_ISA` \|.*", (ROOT / "docs" / "cli.md").read_text(), re.MULTILINE)
    assert row is not None
    assert tuple(dict.fromkeys(re.findall(r"`([a-z]\w+)`", row[0]))) == INSTRUCTION_SETS
    sets = re.search(r"kSetsBestFirst\[\] = {([^}]*)}", (ROOT / "native" / "isa" / "cpu.h").read_text())
    assert sets is not None
    assert set(re.findall(r'"(\w+)"', sets[1])) == set(INSTRUCTION_SETS)


def test_kernels_of_each_instruction_set_are_in_use_in_turn_and_then_those_of_before() -> None:
    before = _native.isa()
    assert [(name, _native.isa()) for name in each_instruction_set()] == [
        (name, name) for name in INSTRUCTION_SETS if _native.isa_supported(name)
    ]
    assert _native.isa() == before
    sets = each_instruction_set()
    next(sets)
    sets.close()
    assert _native.isa() == before
