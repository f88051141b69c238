"""Every folder has tests, small modules are not split off, no machine paths, every public name exists."""

import ast
import re
import subprocess
from pathlib import Path

import quire

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "quire"
MIN_CHAPTER_LINES = 50


def source_files() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")]


def test_every_folder_has_its_tests() -> None:
    folders = {path.parent.relative_to(PACKAGE) for path in source_files() if path.parent != PACKAGE}
    # Each kernel is a folder whose versions and cases tests/kernels finds by itself.
    tops = {Path("kernels") if folder.parts[0] == "kernels" else folder for folder in folders}
    missing = [str(folder) for folder in sorted(tops) if not list((ROOT / "tests" / folder).glob("test_*.py"))]
    assert missing == []


def test_small_modules_have_several_importers() -> None:
    """A module of fewer than 50 lines that one module alone imports belongs inside that module."""
    importers: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    importers.setdefault(name, set()).add(str(path))
    small = []
    for path in source_files():
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found_by_folder = parts[0] in ("kernels", "models") or path.parent.name == "routes"
        is_small = len(path.read_text().splitlines()) < MIN_CHAPTER_LINES
        if is_small and not found_by_folder and len(importers.get(".".join(("quire", *parts)), set())) == 1:
            small.append("/".join(parts))
    assert sorted(small) == []


def test_public_names_resolve() -> None:
    for name in quire.__all__:
        assert getattr(quire, name) is not None


def test_no_machine_paths() -> None:
    pattern = re.compile(r"/(?:ho" r"me|ro" r"ot|wo" r"rk|Us" r"ers)/[a-z]|/tm" r"p/[a-z]")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    found = []
    for name in listed:
        path = ROOT / name
        if not path.is_file() or path.suffix in (".png", ".gguf", ".safetensors"):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{name}:{number}: {line.strip()[:80]}")
    assert found == []
