"""The size limits of CONTRIBUTING.md, in statements: the formatter lays out, and no line is packed to fit."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guards.sources import PACKAGES, SOURCE, python_files

MAX_FILE, MAX_FUNCTION, MAX_KERNEL, MAX_CLASS = 350, 40, 120, 180
LARGER = {
    "quire/grammar/schemas.py: _Root": 190,
    "quire/server/connection.py: Connection": 198,
    "quire/server/models.py: Models": 191,
    "quire_lessons/tour.py: Tour": 193,
}
"""Classes above the limit, which may only become smaller."""
MAX_TOTAL = {"quire": 35_040, "quire_lessons": 2_770, "quire_workshop": 1_540}
"""Statements of each package. A change that needs more takes away what it makes needless, or says why in its commit."""
MIN_ROWS = 4
SKIP = "# fmt: skip"


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def num_statements(tree: ast.AST) -> int:
    """Count the statements in a node, itself included; docstrings are none."""
    return sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in ast.walk(tree))


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def too_large() -> Iterator[str]:
    for path in python_files():
        name, max_function = path.relative_to(SOURCE), MAX_KERNEL if "kernels" in path.parts else MAX_FUNCTION
        if (size := num_statements(parsed(path))) > MAX_FILE:
            yield f"{name}: {size} statements (limit {MAX_FILE})"
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                usual = MAX_CLASS if isinstance(node, ast.ClassDef) else max_function
                limit, size = LARGER.get(f"{name}: {node.name}", usual), num_statements(node) - 1
                if size > limit:
                    yield f"{name}: {node.name} has {size} statements (limit {limit})"


def test_files_classes_and_functions_are_small() -> None:
    assert list(too_large()) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_keep_their_budget(package: str) -> None:
    paths = [path for path in python_files() if path.relative_to(SOURCE).parts[0] == package]
    assert sum(num_statements(parsed(path)) for path in paths) <= MAX_TOTAL[package]


# --- Layout -------------------------------------------------------------------------------------


def test_only_tables_have_a_layout_of_their_own() -> None:
    found = {str(path): lines for path in python_files() if (lines := skips_outside_tables(path.read_text("utf-8")))}
    assert found == {}


def test_a_call_may_not_skip_the_formatter() -> None:
    assert skips_outside_tables(f"f(\n    a, b,\n)  {SKIP}\n") == [3]
    assert skips_outside_tables(f"A = (\n    1, 2,\n    3, 4,\n)  {SKIP}\n") == []
    assert skips_outside_tables(f"A = (\n    1, 2,\n    3, f(lambda: 4),\n)  {SKIP}\n") == [4]


def skips_outside_tables(source: str) -> list[int]:
    """Return the lines with `fmt: skip` that are not within a table of literals."""
    if SKIP not in source:
        return []
    tables: set[int] = set()
    for scope in ast.walk(ast.parse(source)):
        if isinstance(scope, ast.Module | ast.ClassDef):
            for statement in filter(is_table, scope.body):
                tables.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return [at for at, line in enumerate(source.splitlines(), 1) if SKIP in line and at not in tables]


def is_table(statement: ast.stmt) -> bool:
    """Return whether a statement assigns a collection of at least `MIN_ROWS` literals or rows of them."""
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    if isinstance(value, ast.Call) and len(value.args) == 1:  # frozenset({…})
        value = value.args[0]
    if isinstance(value, ast.BinOp):
        return is_literal(value)
    rows = value.values if isinstance(value, ast.Dict) else getattr(value, "elts", [])
    return value is not None and len(rows) >= MIN_ROWS and is_literal(value)


def is_literal(node: ast.expr) -> bool:
    """Return whether an expression has only constants, names, and calls that make rows of them."""
    if isinstance(node, ast.Call):
        return all(map(is_literal, [*node.args, *(keyword.value for keyword in node.keywords)]))
    kinds = (
        ast.Constant,
        ast.Name,
        ast.Attribute,
        ast.List,
        ast.Tuple,
        ast.Set,
        ast.Dict,
        ast.UnaryOp,
        ast.BinOp,
        ast.Starred,
    )
    children = (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
    return isinstance(node, kinds) and all(map(is_literal, children))
