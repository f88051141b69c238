"""The packages beside `quire` use its public names only.

Public is what has no leading underscore: a name that is imported from the module that defines it, and an attribute.
"""

import ast
import functools
import re
from pathlib import Path

import quire
from tests.guards.sources import SOURCE, python_files
from tests.guards.test_imports import PACKAGE, imported_names, is_module

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PRIVATE = re.compile(r"_(?!_)")


@functools.cache
def definitions(module: str) -> dict[str, ast.AST]:
    """Return by name what a module defines and does not import, for `quire` itself its public names."""
    file = SOURCE.joinpath(*module.split("."))
    tree = ast.parse((file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text())
    if module == "quire":
        return dict.fromkeys(quire.__all__, tree)
    found: dict[str, ast.AST] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            found[node.name] = node
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = node
    return found


def private_names(node: ast.AST) -> set[str]:
    """Return the names with an underscore that a class defines or sets on `self`."""
    found = set()
    for item in ast.walk(node):
        if isinstance(item, FUNCTIONS):
            found.add(item.name)
        elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            found.add(item.id)
        elif isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and ast.unparse(item.value) == "self":
            found.add(item.attr)
    return set(filter(PRIVATE.match, found))


def is_public(module: str, name: str) -> bool:
    if (module, name) == ("quire", "__version__"):
        return True
    if any(part.startswith("_") for part in (*module.split("."), name)):
        return False
    return not name or is_module(f"{module}.{name}") or name in definitions(module)


def private_uses(path: Path) -> list[str]:
    """Private attributes are a file's own if its classes define them, and no class of `quire` that they derive from."""
    imported = [item for item in imported_names(path) if item[1].split(".")[0] == "quire"]
    found = [f"{line}: {module}.{name}" for line, module, name in imported if not is_public(module, name)]
    modules = {name: module for _, module, name in imported}
    nodes = list(ast.walk(ast.parse(path.read_text())))
    own, inherited = set[str](), set[str]()
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            own |= private_names(node)
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id in modules:
                    inherited |= private_names(definitions(modules[base.id])[base.id])
    for node in nodes:
        if isinstance(node, ast.Attribute) and PRIVATE.match(node.attr) and node.attr not in own - inherited:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return sorted(found, key=lambda use: int(use.split(":")[0]))


def test_other_packages_use_public_names_of_quire() -> None:
    paths = [path for path in python_files() if PACKAGE not in path.parents]
    found = [f"{path.relative_to(SOURCE)}:{use}" for path in paths for use in private_uses(path)]
    assert [use for use in found if not use.endswith(": os._exit")] == []


def test_private_uses_are_found(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "import quire\n"
        "from quire import LLM, __version__, _native\n"
        "from quire._native import Plan\n"
        "from quire.scheduler.blocks import BlockManager, BlockPool, _real_blocks\n"
        "from quire.scheduler.request import OwnedBlocks\n"
        "class Own(BlockManager):\n"
        "    def __init__(self):\n"
        "        self._mine = self._take(1)\n"
        "        self._events = None\n"
        "    def other(self, other, engine):\n"
        "        engine._config = other._mine\n"
    )
    assert [use.split(": ") for use in private_uses(path)] == [
        ["2", "quire._native"],
        ["3", "quire._native.Plan"],
        ["4", "quire.scheduler.blocks.BlockPool"],
        ["4", "quire.scheduler.blocks._real_blocks"],
        ["8", "self._take"],
        ["9", "self._events"],
        ["11", "engine._config"],
    ]
