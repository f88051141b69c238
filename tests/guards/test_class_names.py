"""A class name stands for one thing in the whole package, classes of `_native` apart."""

import ast
from collections import Counter
from pathlib import Path

from tests.guards.sources import nodes

PACKAGE = Path(__file__).parents[2] / "src" / "quire"


def test_no_class_name_is_used_twice() -> None:
    names = Counter(
        node.name for path in PACKAGE.rglob("*.py") for node in nodes(path) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []
