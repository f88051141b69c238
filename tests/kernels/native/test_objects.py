"""Objects of native/: code that every processor runs needs no more than x86-64.

The sources of native/isa/ are compiled with flags of their own. An inline function that one of them shared with the
others would be linked once, perhaps as the version that this processor cannot run.
"""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[3] / "build"
WITH_FLAGS = {"avx2", "avx_vnni", "avx512", "avx512_bf16", "amx", "amx_emulated"}
"""Sources of native/isa/ that CMakeLists.txt compiles for one instruction set."""
FROM_BASE = tuple(f"quire::{name}(" for name in ("wait_for_all", "next_piece", "slot_of", "meet"))
"""Symbols that ops call in code without flags: threads/pool.cpp, ranks/exchange.cpp."""

pytestmark = [
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="objects of x86-64 only"),
    pytest.mark.skipif(not (shutil.which("objdump") and shutil.which("nm")), reason="no binutils"),
]


@pytest.fixture(scope="module")
def objects() -> dict[str, Path]:
    """Object files of the newest build, by source without its suffix, as in `isa/avx2`."""
    folders = sorted(BUILD.glob("*/CMakeFiles/_native.dir"), key=lambda folder: folder.stat().st_mtime)
    if not folders:
        pytest.skip("the extension was not built in build/")
    return {str(path.relative_to(folders[-1]))[: -len(".cpp.o")]: path for path in folders[-1].rglob("*.cpp.o")}


def vector_instructions(path: Path) -> list[str]:
    """Return the instructions of AVX and later: their names start with v, whatever the width of their registers."""
    text = subprocess.run(["objdump", "-d", str(path)], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\tv[a-z0-9]+ .*%[xyz]mm.*", text)


def symbols(path: Path) -> list[tuple[str, str]]:
    """Kind and name of what the object defines for others or wants from them."""
    text = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True).stdout
    return [(match[1], match[2]) for match in re.finditer(r"^[0-9a-f ]{16} (\w) (.*)$", text, re.MULTILINE)]


def test_what_every_processor_runs_has_no_vector_instructions_of_later_ones(objects: dict[str, Path]) -> None:
    base = {name: path for name, path in objects.items() if Path(name).name not in WITH_FLAGS}
    assert {"module", "plan/plan", "plan/bindings", "threads/pool", "isa/scalar", "isa/choose"} <= set(base)
    for name, path in base.items():
        assert vector_instructions(path) == [], name
    assert vector_instructions(objects["isa/avx2"]), "the search finds them where they are"


def test_instruction_sets_share_no_code(objects: dict[str, Path]) -> None:
    compiled = {name: path for name, path in objects.items() if Path(name).name in WITH_FLAGS}
    assert compiled
    for name, path in compiled.items():
        # Capitals are visible to the linker; W, V and u are linked once for all objects.
        defined = [symbol for kind, symbol in symbols(path) if kind in "WVuTDRBGS"]
        assert [symbol for symbol in defined if not re.fullmatch(r"quire::\w+_ops", symbol)] == [], name
        assert len(defined) == 1, name
        wanted = [symbol for kind, symbol in symbols(path) if kind == "U"]
        others = [symbol for symbol in wanted if "::" in symbol and not symbol.startswith(FROM_BASE)]
        assert others == [], f"{name}: code of other objects"
