"""Imports of the packages, their declared dependencies, CONTRIBUTING.md's table and the pinned versions agree."""

import ast
import re
import sys
import tomllib

from quire.cli.doctor import MIN_PYTHON, TORCH_VERSIONS
from tests.guards.sources import PACKAGES, ROOT, nodes, python_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = [item for extra in ("torch", "gpu", "hf", "ray", "otel") for item in PROJECT["optional-dependencies"][extra]]
"""Imported only where it is asked for."""


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", requirement)[0] for requirement in requirements}


def imported_by_the_packages() -> set[str]:
    """Third-party top-level modules, with hyphens as distributions have them."""
    found: set[str] = set()
    for path in python_files():
        for node in nodes(path):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return {name.replace("_", "-") for name in found - sys.stdlib_module_names - PACKAGES.keys()}


def test_declared_is_imported_and_imported_is_declared() -> None:
    imported = imported_by_the_packages()
    optional = {name for name in imported if any(item.startswith(name) for item in OPTIONAL)}
    assert imported - optional == names(PROJECT["dependencies"])


def test_each_dependency_has_its_reason() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = re.findall(r"^\| ([a-z0-9, -]+) \| \w.*\|$", text.split("## Dependencies")[1], flags=re.MULTILINE)
    listed = {name.strip() for row in table for name in row.split(",")} - {"package"}
    assert listed == names(PROJECT["dependencies"])


def test_all_that_is_installed_by_name_is_pinned() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    extras = PROJECT["optional-dependencies"]
    wanted = (
        names(PROJECT["dependencies"])
        | names(extras["test"])
        | names(extras["dev"])
        | names(extras["torch"])
        | names(build)
    )
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line}
    assert wanted - {"quire"} <= pinned


def test_doctor_checks_the_declared_versions() -> None:
    python, torch = (".".join(map(str, version)) for version in (MIN_PYTHON, TORCH_VERSIONS[0]))
    above = ".".join(map(str, TORCH_VERSIONS[1]))
    assert PROJECT["requires-python"] == f">={python}"
    assert PROJECT["optional-dependencies"]["torch"] == [f"torch>={torch},<{above}"]
