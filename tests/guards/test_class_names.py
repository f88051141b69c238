"""A class name stands for one thing in the whole package, classes of `_native` apart."""

import re
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "quire"
CLASS = re.compile(r"^\s*class\s+(\w+)", re.MULTILINE)


def test_no_class_name_is_used_twice() -> None:
    names = Counter(name for path in PACKAGE.rglob("*.py") for name in CLASS.findall(path.read_text()))
    assert names["LLMEngine"] == 1
    assert [name for name, count in names.items() if count > 1] == []
