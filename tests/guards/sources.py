"""The packages; imports, classes, functions and attributes of source files, which are parsed once for all guards."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PACKAGES = {"quire": "tests", "quire_lessons": "tests/lessons", "quire_workshop": "tests/workshop"}
"""Package → the folder of its tests."""
KINDS = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Attribute)


def python_files() -> list[Path]:
    """Return the source files of all packages."""
    found = sorted(SOURCE.rglob("*.py"))
    assert {path.relative_to(SOURCE).parts[0] for path in found} == set(PACKAGES)
    return found


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, KINDS)]
