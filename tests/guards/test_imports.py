"""Allowed imports between folders (docs/architecture.md), lazy and type-only ones included."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guards.sources import nodes

PACKAGE = Path(__file__).parents[2] / "src" / "quire"
ROOT_MODULES = {
    "adapter",
    "types",
    "transfers",
    "sampling_params",
    "structured_outputs",
    "config",
    "cache_spec",
    "outputs",
    "memory_plan",
    "rank_plan",
    "resolve",
    "errors",
    "files",
    "events",
    "byte_sizes",
    "option_fields",
    "nn",
    "lazy_torch",
    "garbage",
    "extras",
    "linux",
    "logs",
    "weight_map",
}
MAY_IMPORT = {
    "kernels": set(),
    "layers": {"kernels"},
    "models": {"layers", "kernels"},
    "grammar": set(),
    "sampling": {"kernels", "grammar"},
    "weights": set(),
    "text": set(),
    "scheduler": set(),
    "drafts": {"scheduler"},
    "runtime": {"models", "layers", "kernels", "sampling", "weights"},
    "parallel": {"runtime", "weights", "grammar"},
    "engine": {"drafts", "scheduler", "text", "grammar", "runtime", "parallel", "weights", "models"},
    "server": {"insight", "engine", "text", "grammar", "weights"},
    "insight": {"engine", "scheduler", "parallel", "runtime", "models", "layers", "kernels", "weights", "text"},
    "learn": {"insight", "engine", "drafts", "scheduler", "sampling"},
    "cli": {"learn", "insight", "server", "engine", "weights", "text", "models", "runtime"},
}


def test_table_is_that_of_the_docs() -> None:
    text = (PACKAGE.parents[1] / "docs" / "architecture.md").read_text()
    section = text.split("## Folders and allowed imports")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*`) \| .* \| (.*) \|$", section, flags=re.MULTILINE)[1:]
    (root_files, others), *folders = rows
    assert set(re.findall(r"`(\w+)\.py`", root_files)) == ROOT_MODULES
    assert others == "each other"
    documented = {name.strip("`/"): set(re.findall(r"\w+", targets)) for name, targets in folders}
    assert documented == MAY_IMPORT


def imported_names(path: Path) -> list[tuple[int, str]]:
    """Line and dotted name of each `quire…` import in the file, wherever it stands."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            if node.module == "quire":
                found += [(node.lineno, f"quire.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, node.module))
    return [(line, name) for line, name in found if name.split(".")[0] == "quire"]


def folder_files() -> list[tuple[str, Path]]:
    return [(path.relative_to(PACKAGE).parts[0], path) for path in PACKAGE.glob("*/**/*.py")]


def test_folders_import_only_what_the_table_allows() -> None:
    wrong = []
    for folder, path in folder_files():
        for line, name in imported_names(path):
            target = name.split(".")[1] if "." in name else ""
            if target in ROOT_MODULES | {folder, "__version__", "_native"} or target in MAY_IMPORT[folder]:
                continue
            wrong.append(f"{path.relative_to(PACKAGE)}:{line}: {folder} may not import {name}")
    assert wrong == []


def test_root_modules_import_only_each_other() -> None:
    wrong = []
    for name in sorted(ROOT_MODULES):
        for line, imported in imported_names(PACKAGE / f"{name}.py"):
            if imported.split(".")[1] not in ROOT_MODULES:
                wrong.append(f"{name}.py:{line}: {imported}")
    assert wrong == []


@pytest.mark.parametrize(
    "module",
    ["quire", "quire.types", "quire.config", "quire.resolve", "quire.scheduler.scheduler", "quire.cli.main",
     "quire.weights.sources", "quire.text.tokenizer"],
)  # fmt: skip
def test_importing_costs_no_torch(module: str) -> None:
    slow = ("torch", "numpy", "transformers", "llguidance", "huggingface_hub", "safetensors", "jinja2")
    code = f"import sys, {module}; print([m for m in {slow} if sys.modules.get(m)])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_benchmarks_import_names_that_exist() -> None:
    """Only a run of a benchmark would find a name that was changed in the package; tests import theirs."""
    pytest.importorskip("gguf", reason="benchmarks need the packages of development")
    root = PACKAGE.parents[1]
    missing = [
        f"{path.relative_to(root)}: {node.module}.{alias.name}"
        for path in sorted((root / "benchmarks").rglob("*.py"))
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("quire", "benchmarks")
        for alias in node.names
        if not has_name(str(node.module), alias.name)
    ]
    assert missing == []


def has_name(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    is_package = hasattr(found, "__path__")
    return hasattr(found, name) or (is_package and importlib.util.find_spec(f"{module}.{name}") is not None)
