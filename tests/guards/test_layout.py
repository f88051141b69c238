"""Every folder has tests, small modules are not split off, no machine paths, every public name exists."""

import ast
import re
import subprocess
from pathlib import Path

import quire
from tests.guards.sources import PACKAGES, ROOT, SOURCE, python_files

MIN_CHAPTER_LINES = 50


def source_files() -> list[Path]:
    return [path for path in python_files() if not path.name.startswith("__")]


def test_every_folder_has_its_tests() -> None:
    tests: set[Path] = set()
    for path in source_files():
        package, *folders = path.parent.relative_to(SOURCE).parts
        # Each kernel is a folder whose versions and cases tests/kernels finds by itself.
        tests.add(Path(PACKAGES[package], *(folders[:1] if folders[:1] == ["kernels"] else folders)))
    assert [str(folder) for folder in sorted(tests) if not list((ROOT / folder).glob("test_*.py"))] == []


def test_small_modules_have_several_importers() -> None:
    """A module of fewer than 50 lines that one module alone imports belongs inside that module."""
    importers: dict[str, set[str]] = {}
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    importers.setdefault(name, set()).add(str(path))
    small = []
    for path in source_files():
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found_by_folder = parts[1] in ("kernels", "models") or path.parent.name == "routes"
        is_small = len(path.read_text().splitlines()) < MIN_CHAPTER_LINES
        if is_small and not found_by_folder and len(importers.get(".".join(parts), set())) == 1:
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
