"""Objects of native/: code that every processor runs needs no more than x86-64.

The units of an instruction set are compiled with its flags. An inline function that one of them shared with the
others would be linked once, perhaps as the version that this processor cannot run.
"""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[3] / "build"
BASE = {"_native", "isa_scalar", "nanobind-static"}
"""Libraries that CMakeLists.txt compiles for every processor; the others, `isa_<name>`, have flags of their own."""
FROM_BASE = tuple(
    f"quire::{name}(" for name in ("wait_for_all", "next_piece", "slot_of", "meet", "fetch", "fetch_first")
)
"""Symbols that ops call in code without flags: threads/pool.cpp, ranks/exchange.cpp, plan/plan.cpp."""

pytestmark = [
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="objects of x86-64 only"),
    pytest.mark.skipif(not (shutil.which("objdump") and shutil.which("nm")), reason="no binutils"),
]


@pytest.fixture(scope="module")
def objects() -> dict[str, Path]:
    """Object files of the newest build, by library and source, as in `isa_avx2/products`."""
    folders = sorted(BUILD.glob("*/CMakeFiles/_native.dir"), key=lambda folder: folder.stat().st_mtime)
    if not folders:
        pytest.skip("the extension was not built in build/")
    found = {}
    for library in folders[-1].parent.glob("*.dir"):
        for path in library.rglob("*.o"):
            found[f"{library.stem}/{path.name.split('.')[0]}"] = path
    return found


FIRST_PART = 1_000_000
"""Characters of a disassembly in which there are some instructions of every set."""


def vector_instructions(path: Path, num_characters: int = -1) -> list[str]:
    """Return the instructions of AVX and later: their names start with v, whatever the width of their registers.

    `num_characters`: at the beginning of the disassembly that are read; -1: all.

    Functions named `.avx2` are left out: the compiler made them beside plain ones, and the processor chooses at load.
    So is the section of that name: builds for one machine alone have it, and refuse to be imported without AVX2.
    """
    with subprocess.Popen(["objdump", "-d", str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = process.stdout.read(num_characters)
    assert process.returncode == 0 or len(text) == num_characters  # it is closed before its end
    sections = re.split(r"^Disassembly of section ", text, flags=re.MULTILINE)
    text = "".join(each for each in sections if not each.startswith(".text.avx2:"))
    functions = re.split(r"^(?=[0-9a-f]{16} <)", text, flags=re.MULTILINE)
    plain = "".join(each for each in functions if not re.match(r"[0-9a-f]{16} <[^>]*\.avx2[^>]*>", each))
    return re.findall(r"\tv[a-z0-9]+ .*%[xyz]mm.*", plain)


def symbols(path: Path) -> list[tuple[str, str]]:
    """Kind and name of what the object defines for others or wants from them."""
    text = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True).stdout
    return [(match[1], match[2]) for match in re.finditer(r"^[0-9a-f ]{16} (\w) (.*)$", text, re.MULTILINE)]


def test_what_every_processor_runs_has_no_vector_instructions_of_later_ones(objects: dict[str, Path]) -> None:
    base = {name: path for name, path in objects.items() if name.split("/")[0] in BASE}
    assert {"_native/unity_bindings_cxx", "_native/unity_engine_cxx", "isa_scalar/products"} <= set(base)
    for name, path in base.items():
        assert vector_instructions(path) == [], name


def test_instruction_sets_have_vector_instructions_and_share_no_code(objects: dict[str, Path]) -> None:
    compiled = {name: path for name, path in objects.items() if name.split("/")[0] not in BASE}
    if not compiled:
        pytest.skip("only the portable kernels were built")
    for name, path in compiled.items():
        assert vector_instructions(path, FIRST_PART), f"{name}: the search finds them where they are"
        # Capitals are visible to the linker; W, V and u are linked once for all objects.
        found = symbols(path)
        defined = [symbol for kind, symbol in found if kind in "WVuTDRBGS"]
        assert defined == ["quire::" + name.removeprefix("isa_").replace("/", "_")], name
        wanted = [symbol for kind, symbol in found if kind == "U"]
        others = [symbol for symbol in wanted if "::" in symbol and not symbol.startswith(FROM_BASE)]
        assert others == [], f"{name}: code of other objects"
