"""`quire doctor`: checks of the machine and the installation, each with the next step for a problem.

A check finds "ok", "note" (works, could be better) or "problem" (exit 6). Reads only; the cache directory is probed
with one temporary file. Next to read: `../insight/explain/device.py`.
"""

import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass

import click

from quire.byte_sizes import format_bytes
from quire.cli.command import ExitCode, option, output_of, verb
from quire.cli.main import package_version
from quire.cli.terminal import Output
from quire.config import EngineOptions
from quire.extras import install_command

CPU_FLAGS = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm",
    "bf16",
)  # fmt: skip
"""Flags of /proc/cpuinfo that decide which kernels can run, x86 first, then ARM."""
BUILDS = "a checkout has the kernels of one machine: `make run` builds those of this one, QUIRE_ISAS=all builds all"
MIN_PYTHON = (3, 11)
TORCH_VERSIONS = ((2, 11), (2, 14))
"""The first supported version, and the first one that was not tested."""
MIN_MEMORY_BYTES = 2**30
"""Approximate need of the default model with its KV cache."""
OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class Finding:
    """The result of one check. `advice` is the next step; empty without one."""

    name: str
    status: str
    found: str
    advice: str = ""


@verb("doctor", ("quire doctor", "quire doctor --json", "quire doctor --calibrate"))
@option("--calibrate", is_flag=True, help="measure this idle machine's kernels and keep their rates for explain")
def doctor_command(calibrate: bool) -> None:
    """Check this machine and installation.

    Exits with 6 when it finds a problem.
    """
    output = output_of()
    if calibrate:
        _calibrate(output)
        return
    findings = [run_check(name, check) for name, check in CHECKS.items()]
    healthy = all(finding.status != PROBLEM for finding in findings)
    if output.json:
        output.result_json("quire.doctor/1", {"healthy": healthy, "checks": [asdict(item) for item in findings]})
    else:
        _print(findings, output)
    if not healthy:
        click.get_current_context().exit(ExitCode.CHECK_FAILED)


def _calibrate(output: Output) -> None:
    from quire.insight.explain.device import calibration_path
    from quire.insight.explain.measure import calibrate

    found = calibrate(lambda part: output.note(f"measuring {part}"))
    read = found.read[-1][1]
    if output.json:
        limits = {"read_bytes_per_s": read, "flops_per_s": found.limits}
        output.result_json("quire.calibration/1", {"path": str(calibration_path()), **limits})
        return
    output.result(f"memory is read at {read / 1e9:.1f} GB/s")
    for name, rate in found.limits.items():
        output.result(f"products in {name} run at up to {rate / 1e12:.2f} TFLOP/s")
    output.note(f"kept in {calibration_path()}   next: quire explain --measure")


def run_check(name: str, check: Callable[[], Finding]) -> Finding:
    """Run one check; an exception in it is a problem, too."""
    try:
        return check()
    except Exception as error:
        return Finding(name, PROBLEM, f"the check failed: {type(error).__name__}: {error}")


def check_python() -> Finding:
    """Check the interpreter's version."""
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < MIN_PYTHON:
        return Finding("python", PROBLEM, found, "Quire needs Python 3.11 or newer")
    return Finding("python", OK, f"{found} ({sys.executable})")


def check_torch() -> Finding:
    """Check that torch, if it is installed, imports and has a supported version."""
    from quire.runtime.hardware import has_gpu_driver

    if importlib.util.find_spec("torch") is None:
        found = "not installed: models run as plans on the CPU"
        status = NOTE if has_gpu_driver() else OK
        return Finding("torch", status, found, f"{install_command('torch')} adds GPUs, and models op by op")
    import torch

    found = package_version("torch") or torch.__version__
    device = f"CUDA {torch.version.cuda}: {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else "CPU only"
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if not TORCH_VERSIONS[0] <= numbers < TORCH_VERSIONS[1]:
        return Finding("torch", NOTE, f"{found} ({device})", "tested are 2.11 to 2.13")
    return Finding("torch", OK, f"{found} ({device}, {torch.get_num_threads()} threads)")


def check_cpu() -> Finding:
    """Check the processor's instruction sets."""
    from quire.runtime.hardware import detect_hardware, read_cpu_info

    info, hardware = read_cpu_info(), detect_hardware("cpu")
    sets = [flag for flag in CPU_FLAGS if flag in info.flags]
    found = f"{hardware.name}, {hardware.num_threads} threads, {' '.join(sets) or 'no vector extensions known'}"
    if not {"avx2", "asimddp"} & info.flags:
        advice = "fast kernels need AVX2 (x86-64) or the dot products of Armv8.2; others run the slow path"
        return Finding("cpu", NOTE, found, advice)
    return Finding("cpu", OK, found)


def check_tuning() -> Finding:
    """List the models whose settings `quire tune` found here."""
    from quire.runtime.hardware import detect_hardware
    from quire.runtime.tuning import kept_tunings

    found = [f"{tuning.model}: {tuning.found}" for tuning in kept_tunings(detect_hardware("cpu"))]
    if found:
        return Finding("tuning", OK, " | ".join(found), "quire tune MODEL --clear restores the defaults")
    return Finding("tuning", OK, "defaults", "quire tune MODEL measures faster settings, on an idle machine")


def check_native() -> Finding:
    """Check that the compiled extension loads and uses the instruction set of `QUIRE_ISA`."""
    if importlib.util.find_spec("quire._native") is None:
        advice = "run `make run` in the checkout, or install Quire again with this Python's pip"
        return Finding("native module", PROBLEM, "not built for this Python", advice)
    native = importlib.import_module("quire._native")
    if native.requested_isa_missing:
        wanted = f"QUIRE_ISA={os.environ.get('QUIRE_ISA')} is not available here, {native.isa()} is used"
        from quire.runtime.hardware import INSTRUCTION_SETS

        there = ", ".join(filter(native.isa_supported, INSTRUCTION_SETS))
        return Finding("native module", PROBLEM, wanted, f"unset it for the best of {there}; {BUILDS}")
    if notes := native.isa_notes():
        found = f"loads, uses {native.isa()}; {'; '.join(notes)}"
        advice = "QUIRE_ISA chooses another set; a failed self-test is worth a report"
        if native.unbuilt_isa:
            advice = BUILDS
        return Finding("native module", NOTE, found, advice)
    found = f"loads, uses {native.isa()}"
    if native.has_tiles():
        found += "; long steps in bf16 tiles, other bits than short ones: --batch-invariant computes all alike"
    return Finding("native module", OK, found)


def check_memory() -> Finding:
    """Check the available memory."""
    from quire.runtime.hardware import detect_hardware

    hardware = detect_hardware("cpu")
    found = f"{format_bytes(hardware.available_memory_bytes)} of {format_bytes(hardware.total_memory_bytes)} available"
    if hardware.available_memory_bytes < MIN_MEMORY_BYTES:
        return Finding("memory", PROBLEM, found, f"free some: the default model needs {format_bytes(MIN_MEMORY_BYTES)}")
    more = "a mixture of experts may be larger: the experts that tokens do not choose stay on disk"
    return Finding("memory", OK, f"{found}; {more}")


def check_ranks() -> Finding:
    """Check how many ranks have cores of their own, and how fast they add up."""
    from quire.runtime.hardware import count_threads
    from quire.runtime.links import measure_all_reduce

    num_cores = count_threads()
    if num_cores == 1:
        return Finding("ranks", OK, "one core: ranks and stages would take turns, so leave the parallel sizes at 1")
    found = f"{num_cores} cores: as many ranks and stages, tensor-parallel times pipeline-parallel size, have their own"
    return Finding("ranks", OK, f"{found}; two ranks sum 1,024 values in {measure_all_reduce(2):.1f} µs")


def check_cache() -> Finding:
    """Check that the cache directory can be written."""
    from quire.weights.model_cache import cache_directory

    path = cache_directory()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return Finding("cache", PROBLEM, f"{path}: {error.strerror}", "set QUIRE_CACHE_DIR to a writable directory")
    return Finding("cache", OK, str(path))


def check_weights() -> Finding:
    """Report the files of packed weights."""
    from quire.runtime.shared_file import list_files
    from quire.weights.model_cache import weight_directory

    directory = weight_directory(EngineOptions())
    if directory is None:
        advice = "unset QUIRE_WEIGHT_CACHE: starts are faster, and processes share the weights"
        return Finding("packed weights", NOTE, "not kept: each start packs a model's weights anew", advice)
    if not directory.is_dir():
        return Finding("packed weights", OK, f"none yet in {directory}")
    files = list(list_files(directory))
    size, free = format_bytes(sum(file.num_bytes for file in files)), format_bytes(shutil.disk_usage(directory).free)
    return Finding("packed weights", OK, f"{len(files)} files, {size} in {directory}; {free} of its disk are free")


def check_hub() -> Finding:
    """Report the Hugging Face hub's settings without the token itself."""
    from quire.weights.model_cache import hub_cache_directory

    parts = [f"cache {hub_cache_directory()}", f"token {'set' if os.environ.get('HF_TOKEN') else 'not set'}"]
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return Finding("hub", NOTE, ", ".join([*parts, "offline"]), "unset HF_HUB_OFFLINE to download from the hub")
    return Finding("hub", OK, ", ".join(parts))


def check_model() -> Finding:
    """Check that the default model is in the cache."""
    from quire.weights.model_cache import list_cached

    default = EngineOptions.model
    cached = [item.name for item in list_cached()]
    if default in cached:
        return Finding("model", OK, f"{default} is cached")
    return Finding("model", NOTE, f"{default} is not fetched yet", f"quire pull {default}")


def check_transformers() -> Finding:
    """Report whether architectures that Quire lacks can run."""
    found = package_version("transformers")
    if found is None:
        advice = f"{install_command('hf')} runs architectures that Quire lacks by Transformers' own module"
        return Finding("transformers", NOTE, "not installed: only Quire's own models run", advice)
    return Finding("transformers", OK, f"{found} runs architectures that Quire lacks, op by op")


CHECKS: dict[str, Callable[[], Finding]] = {
    "python": check_python,
    "torch": check_torch,
    "transformers": check_transformers,
    "cpu": check_cpu,
    "native module": check_native,
    "tuning": check_tuning,
    "memory": check_memory,
    "ranks": check_ranks,
    "cache": check_cache,
    "packed weights": check_weights,
    "hub": check_hub,
    "model": check_model,
}


def _print(findings: list[Finding], output: Output) -> None:
    marks = {OK: ("✓", "green"), NOTE: ("·", "yellow"), PROBLEM: ("✗", "red")}
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark, color = marks[finding.status]
        advice = f"  → {finding.advice}" if finding.advice else ""
        output.stream(output.style(mark, color, sys.stdout))
        output.result(f" {finding.name:<{width}}  {finding.found}{advice}")
    problems = sum(finding.status == PROBLEM for finding in findings)
    output.note("no problems" if not problems else f"{problems} problem{'s' if problems > 1 else ''}")
