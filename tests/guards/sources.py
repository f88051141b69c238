"""Imports, classes, functions and attributes of source files, which are parsed once for all guards."""

import ast
import functools
from pathlib import Path

KINDS = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Attribute)


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, KINDS)]
