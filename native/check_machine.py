"""Check of the machine before Quire is compiled on it: one line says what is missing, and both ways out.

`make` runs it before it sets anything up, `native/CMakeLists.txt` when pip compiles because no wheel fits. It must run
on Pythons that are too old for Quire.
"""

import os
import platform
import shutil
import struct
import sys
import sysconfig
from pathlib import Path

OLDEST_PYTHON = (3, 11)
COMPILERS = ("c++", "g++", "clang++")
WHEEL = "or install a wheel that `make wheel` made elsewhere (Linux, glibc 2.28 or newer, 64-bit x86 or ARM)"
SYSTEM = "use 64-bit Linux with glibc (Debian, Ubuntu, Fedora), or the container of deploy/Dockerfile"


def problem(version: tuple, bits: int, system: str, libc: str, compilers: tuple, headers: str) -> str:
    """Return the line that says why Quire cannot be compiled here; empty if it can.

    `compilers`: names of programs, any of which will do. `headers`: the folder of Python's headers.
    """
    if tuple(version[:2]) < OLDEST_PYTHON:
        running, oldest = (".".join(map(str, pair[:2])) for pair in (version, OLDEST_PYTHON))
        ways = f"install a newer one and name it, make PYTHON=python{oldest}, or use the container of deploy/Dockerfile"
        return f"Quire needs Python {oldest} or newer, and this is {running}: {ways}"
    if bits < 64:
        return f"Quire needs a 64-bit Python, and this one has {bits} bits: {SYSTEM}"
    if system == "Darwin":
        to_do = "native/threads/system.h and src/quire/linux.py are what a port would write"
        return f"Quire does not run on macOS yet ({to_do}): {SYSTEM}"
    if system != "Linux":
        return f"Quire does not run on {system}: {SYSTEM}"
    if libc != "glibc":
        return f"Quire needs glibc, and this system has another C library, as Alpine has musl: {SYSTEM}"
    if not any(shutil.which(name) for name in compilers):
        names = ", ".join(compilers)
        return f"Quire is compiled here, and there is no C++ compiler ({names}): apt install g++, {WHEEL}"
    if not Path(headers, "Python.h").exists():
        return f"Quire is compiled here, and {headers} has no headers of Python: apt install python3-dev, {WHEEL}"
    return ""


def main() -> None:
    """Check this machine. Raises: SystemExit with the line."""
    chosen = tuple(os.environ.get("CXX", "").split()[:1])
    libc, headers = platform.libc_ver()[0], sysconfig.get_path("include")
    bits = struct.calcsize("P") * 8
    sys.exit(problem(sys.version_info, bits, platform.system(), libc, chosen or COMPILERS, headers) or None)


if __name__ == "__main__":
    main()
