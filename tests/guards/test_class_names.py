"""A class name stands for one thing in all packages, classes of `_native` apart."""

import re
from collections import Counter

from tests.guards.sources import python_files

CLASS = re.compile(r"^\s*class\s+(\w+)", re.MULTILINE)


def test_no_class_name_is_used_twice() -> None:
    names = Counter(name for path in python_files() for name in CLASS.findall(path.read_text()))
    assert names["LLMEngine"] == 1
    assert [name for name, count in names.items() if count > 1] == []
