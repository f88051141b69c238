"""`detect_hardware`: the properties of this machine that decisions depend on. It reads, and sets nothing.

Limits of containers and shells count: a cgroup's memory and CPU quota, `ulimit -v`, and the CPUs this process may use.
Next to read: `resolve.py`, which decides with what is found here.
"""

import ctypes
import itertools
import math
import os
import platform
import resource
from collections.abc import Generator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from quire import _native
from quire.config import Hardware
from quire.errors import ConfigError
from quire.lazy_torch import require_torch
from quire.linux import allowed_cpus, keep_to_cpus

INSTRUCTION_SETS = ("scalar", "avx2", "avx_vnni", "avx512", "avx512_bf16", "amx", "neon", "neon_i8mm")
"""Values of `QUIRE_ISA`: `native/isa/cpu.h`."""
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
"""/proc/cpuinfo flags of CPUs which multiply bfloat16 in hardware (x86, then ARM)."""
MIN_BFLOAT16_CAPABILITY = (8, 0)
"""CUDA compute capability (Ampere)."""
ADDRESS_SPACE_LIMITS = {
    resource.RLIMIT_AS: ("RLIMIT_AS, ulimit -v", "VmSize"),
    resource.RLIMIT_DATA: ("RLIMIT_DATA, ulimit -d", "VmData"),
}
"""Limits on memory that is reserved, used or not: name, and the field of /proc/self/status that counts it."""
THREAD_BYTES = 16 << 20
"""Address space of a thread: its stack, and malloc's arena."""
NUM_OTHER_THREADS = 4
"""Threads that do not compute: receiving, loading."""


def detect_hardware(device: str = "auto") -> Hardware:
    """Describe the device: "auto" (CUDA when there is one), "cpu", "cuda" or "cuda:N".

    Raises: ConfigError if it is not one of these, or is not there.
    """
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdecimal())):
        raise ConfigError(f"device={device!r} is not one of auto, cpu, cuda, cuda:N")
    if kind == "cpu" or (kind == "auto" and not has_gpu_driver()):
        return _detect_cpu()
    if kind == "auto" and find_spec("torch") is None:
        return _detect_cpu()
    torch = require_torch(f"device={device!r}")
    if kind == "auto" and not torch.cuda.is_available():
        return _detect_cpu()
    if not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: torch {torch.__version__} finds no CUDA device; --device cpu works")
    count = torch.cuda.device_count()
    if int(index or 0) >= count:
        raise ConfigError(f"device={device!r}: there are {count} CUDA devices; --device cuda:{count - 1} is the last")
    return _detect_cuda(int(index or 0))


def each_instruction_set() -> Generator[str, None, None]:
    """Choose the kernels of each instruction set that this machine can run, in turn, and yield its name.

    Mutates: the process's choice, until the generator is closed.
    """
    before = _native.isa()
    try:
        for isa in filter(_native.isa_supported, INSTRUCTION_SETS):
            _native.set_isa(isa)
            yield isa
    finally:
        _native.set_isa(before)


def has_gpu_driver() -> bool:
    """Return whether the driver of an NVIDIA or AMD GPU is installed, without which torch finds no GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True


def _detect_cpu() -> Hardware:
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(memory[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    limits = cgroup_limits()
    num_threads = count_threads(limits.num_cpus)
    found = [(available, "")]
    if limits.memory_bytes is not None:
        total = min(total, limits.memory_bytes)
        found.append((max(0, limits.memory_bytes - limits.memory_used_bytes), "cgroup"))
    for limit, used, name in address_spaces():
        total = min(total, limit)
        found.append((max(0, limit - used - (num_threads + NUM_OTHER_THREADS) * THREAD_BYTES), name))
    available, memory_limit = min(found)
    info = read_cpu_info()
    return Hardware(
        device="cpu",
        total_memory_bytes=total,
        available_memory_bytes=available,
        has_fast_bfloat16=bool(BFLOAT16_FLAGS & info.flags),
        num_threads=num_threads,
        name=info.name or platform.machine(),
        memory_limit=memory_limit,
        has_tiles=_native.has_tiles(),
    )


def _detect_cuda(index: int) -> Hardware:
    import torch

    properties = torch.cuda.get_device_properties(index)
    available, total = torch.cuda.mem_get_info(index)
    return Hardware(
        device=f"cuda:{index}",
        total_memory_bytes=total,
        available_memory_bytes=available,
        has_fast_bfloat16=(properties.major, properties.minor) >= MIN_BFLOAT16_CAPABILITY,
        num_threads=count_threads(cgroup_limits().num_cpus),
        name=properties.name,
        num_devices=torch.cuda.device_count() - index,
        has_triton=find_spec("triton") is not None,
    )


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """Name and instruction-set flags of the first CPU."""

    name: str
    flags: frozenset[str]


def read_cpu_info(path: Path = Path("/proc/cpuinfo")) -> CpuInfo:
    """Read /proc/cpuinfo; empty where there is none."""
    name, flags = "", frozenset[str]()
    for line in _read_text(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features") and not flags:
            flags = frozenset(value.split())
        elif key.strip() == "model name" and not name:
            name = value.strip()
    return CpuInfo(name, flags)


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """Limits of the container: bytes of memory, bytes that cannot be reclaimed, CPUs (a quota, may be 1.5)."""

    memory_bytes: int | None
    memory_used_bytes: int
    num_cpus: float | None


def cgroup_limits(mount: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> CgroupLimits:
    """The tightest limits over this process's cgroup and its parents (cgroup v2, else v1's memory controller)."""
    memory_bytes: int | None = None
    used = 0
    num_cpus: float | None = None
    for folder in _cgroup_folders(mount, membership):
        limit = _read_int(folder / "memory.max") or _read_int(folder / "memory.limit_in_bytes")
        if limit is not None and (memory_bytes is None or limit < memory_bytes):
            memory_bytes = limit
            used = _unreclaimable(folder)
        quota, _, period = _read_text(folder / "cpu.max").strip().partition(" ")
        if quota.isdecimal() and period.isdecimal():
            num_cpus = min(num_cpus or math.inf, int(quota) / int(period))
    return CgroupLimits(memory_bytes, used, num_cpus)


def _cgroup_folders(mount: Path, membership: Path) -> list[Path]:
    """Folders of this process's cgroup and its parents, those that exist."""
    folders = [mount, mount / "memory"]
    for line in _read_text(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers not in ("", "memory"):
            continue
        folder = mount / controllers / name.lstrip("/")
        while folder != mount and mount in folder.parents:
            folders.append(folder)
            folder = folder.parent
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _unreclaimable(folder: Path) -> int:
    used = _read_int(folder / "memory.current") or _read_int(folder / "memory.usage_in_bytes") or 0
    # Cached file pages are given back under pressure; a mapped model file is most of them.
    for line in _read_text(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "active_file") and value.isdecimal():
            used -= int(value)
    return max(0, used)


def address_spaces(status: Path = Path("/proc/self/status")) -> list[tuple[int, int, str]]:
    """Limits on the address space of this process that are set: bytes allowed, bytes taken, name."""
    fields = (line.split() for line in _read_text(status).splitlines())
    used = {words[0].rstrip(":"): int(words[1]) << 10 for words in fields if len(words) == 3 and words[2] == "kB"}
    limits = ((resource.getrlimit(number)[0], *names) for number, names in ADDRESS_SPACE_LIMITS.items())
    return [(limit, used.get(field, 0), name) for limit, name, field in limits if limit != resource.RLIM_INFINITY]


def count_threads(quota: float | None = None, topology: Path = Path("/sys/devices/system/cpu")) -> int:
    """Threads worth starting: OMP_NUM_THREADS if set, else the physical cores this process may use.

    Two hyper-threads of one core share its multipliers, so that a second thread there only adds overhead.
    """
    chosen = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if chosen.isdecimal() and int(chosen) > 0:
        return int(chosen)
    num_cores = len(_cores(topology))
    return max(1, min(num_cores, math.floor(quota) if quota is not None else num_cores))


def cpus_of_ranks(num_ranks: int, topology: Path = Path("/sys/devices/system/cpu")) -> list[list[int]]:
    """Return per rank the CPUs of its own cores, equally many and side by side; none if there are fewer cores."""
    cores = _cores(topology)
    share = len(cores) // num_ranks
    shares = [cores[rank * share : (rank + 1) * share] for rank in range(num_ranks)]
    return [sorted(itertools.chain.from_iterable(chosen)) for chosen in shares]


def check_shares(num_shares: int, topology: Path = Path("/sys/devices/system/cpu")) -> None:
    """Raises: ConfigError if there are fewer cores than engines that are to share them."""
    num_cores = len(_cores(topology))
    if num_shares > num_cores:
        raise ConfigError(
            f"data_parallel_size={num_shares}: this process may use {num_cores} cores, and each engine needs one of "
            f"its own: --data-parallel-size {num_cores} works"
        )


def take_share(num_shares: int, index: int) -> None:
    """Keep this process to its cores, before a library starts threads: `num_shares` engines share the machine.

    Mutates: its CPUs, and OMP_NUM_THREADS. Raises: ConfigError.
    """
    check_shares(num_shares)
    num_threads = max(1, count_threads(cgroup_limits().num_cpus) // num_shares)
    keep_to_cpus(cpus_of_ranks(num_shares)[index])
    os.environ["OMP_NUM_THREADS"] = str(num_threads)


def device_of_share(device: str, num_shares: int, index: int, num_ranks: int = 1) -> str:
    """Return the first device of an engine: a GPU of its own for each rank if there are enough, else all share."""
    if device not in ("auto", "cuda") or not has_gpu_driver() or find_spec("torch") is None:
        return device
    import torch

    has_own = torch.cuda.device_count() >= num_shares * num_ranks
    return f"cuda:{index * num_ranks}" if has_own else device


def mapped_memory(process: Path = Path("/proc/self")) -> tuple[int, int]:
    """Return the bytes of mapped files in this process's memory, and the bytes that it has read from disks."""
    found = {}
    for line in (_read_text(process / "status") + _read_text(process / "io")).splitlines():
        name, _, value = line.partition(":")
        found[name] = value.split()[:1]
    resident, read = (int(next(iter(found.get(name, [])), "0")) for name in ("RssFile", "read_bytes"))
    return resident << 10, read


def _cores(topology: Path) -> list[list[int]]:
    """Return the physical cores that this process may use, each as its CPUs: hyper-threads."""
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(allowed_cpus()):
        folder = topology / f"cpu{cpu}" / "topology"
        core, package = _read_int(folder / "core_id"), _read_int(folder / "physical_package_id")
        cores.setdefault((-1, cpu) if core is None else (package or 0, core), []).append(cpu)
    return [cores[key] for key in sorted(cores)]


def _read_int(path: Path) -> int | None:
    text = _read_text(path).strip()
    return int(text) if text.isdecimal() else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
