"""Allowed imports between packages and folders (docs/architecture.md), lazy and type-only ones included."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guards.sources import PACKAGES, ROOT, SOURCE, nodes, python_files

PACKAGE = SOURCE / "quire"
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
    "turns",
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
    "cli": {"insight", "server", "engine", "weights", "text", "models", "runtime"},
}
NEXT_DOOR = {
    "quire_lessons/compare": {"engine", "insight", "models", "parallel", "runtime", "scheduler", "weights"},
    "quire_lessons/learn": {"quire_lessons/compare", "drafts", "engine", "insight", "sampling", "scheduler"},
    "quire_lessons": {
        "quire_lessons/compare", "engine", "insight", "kernels", "parallel", "runtime", "scheduler", "text", "weights",
    },
    "quire_lessons/cli": {
        "quire_lessons", "quire_lessons/compare", "quire_lessons/learn", "cli", "engine", "insight", "runtime", "text",
        "weights",
    },
    "quire_workshop/gguf": {"text", "weights"},
    "quire_workshop": {
        "quire_workshop/gguf", "cli", "engine", "insight", "layers", "models", "parallel", "runtime", "server",
        "weights",
    },
    "quire_workshop/cli": {
        "quire_workshop", "quire_workshop/gguf", "cli", "engine", "insight", "models", "runtime", "weights",
    },
}  # fmt: skip
"""Folders of the other packages → their own folders, and those of `quire`, that they may import."""


def test_table_is_that_of_the_docs() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("## Folders and allowed imports")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*`) \| .* \| (.*) \|$", section, flags=re.MULTILINE)[1:]
    (root_files, others), *folders = rows
    assert set(re.findall(r"`(\w+)\.py`", root_files)) == ROOT_MODULES
    assert others == "each other"
    documented = {name.strip("`/"): set(re.findall(r"[\w/]+", targets)) for name, targets in folders}
    assert documented == MAY_IMPORT | NEXT_DOOR


def imported_names(path: Path) -> list[tuple[int, str, str]]:
    """Line, module and name of each import of the packages in the file, wherever it stands; no name for `import x`."""
    found: list[tuple[int, str, str]] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found += [(node.lineno, node.module, alias.name) for alias in node.names]
    return [(line, module, name) for line, module, name in found if module.split(".")[0] in PACKAGES]


def is_module(dotted: str) -> bool:
    path = SOURCE.joinpath(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def target_of(module: str, name: str) -> str:
    """Return the imported module, or of `quire` itself the name."""
    return f"{module}.{name}" if name and (module == "quire" or is_module(f"{module}.{name}")) else module


def folder_of(path: Path) -> str:
    """Return the row of the tables that a file belongs to, "" for root modules of `quire`."""
    package, *folders = path.relative_to(SOURCE).parent.parts
    return "/".join(folders[:1] if package == "quire" else (package, *folders))


def test_folders_import_only_what_the_table_allows() -> None:
    wrong = []
    for path in python_files():
        folder = folder_of(path)
        if not folder:
            continue
        allowed = (MAY_IMPORT | NEXT_DOOR)[folder] | {folder}
        for line, module, name in imported_names(path):
            imported = target_of(module, name)
            package, *parts = imported.split(".")
            if package == "quire":
                beside = {"__version__", "_native"} if folder in MAY_IMPORT else {"__version__", ""}
                is_allowed = (parts[0] if parts else "") in allowed | ROOT_MODULES | beside
            else:
                file = SOURCE.joinpath(package, *parts)
                is_allowed = folder_of(file / "a.py" if file.is_dir() else file) in allowed
            if not is_allowed:
                wrong.append(f"{path.relative_to(SOURCE)}:{line}: {folder} may not import {imported}")
    assert wrong == []


def test_root_modules_import_only_each_other() -> None:
    wrong = []
    for own in sorted(ROOT_MODULES):
        for line, module, name in imported_names(PACKAGE / f"{own}.py"):
            imported = target_of(module, name)
            if imported.partition(".")[2].split(".")[0] not in ROOT_MODULES:
                wrong.append(f"{own}.py:{line}: {imported}")
    assert wrong == []


def test_quire_imports_no_other_package_and_these_not_one_another() -> None:
    """A verb may be called by its command line, as the server's page does; a module's name in a text is an import."""
    wrong = []
    for path in python_files():
        own = path.relative_to(SOURCE).parts[0]
        others = PACKAGES.keys() - {own, "quire"}
        wrong += [
            f"{path.relative_to(SOURCE)}:{line}: {module}"
            for line, module, _ in imported_names(path)
            if module.split(".")[0] in others
        ]
        text = re.search(rf"""["']({"|".join(others)})\.\w""", path.read_text())
        wrong += [f"{path.relative_to(SOURCE)}: {text[0]}"] if text else []
    assert wrong == []


@pytest.mark.parametrize(
    "module",
    ["quire", "quire.types", "quire.config", "quire.resolve", "quire.scheduler.scheduler", "quire.cli.main",
     "quire.weights.sources", "quire.text.tokenizer", "quire_lessons.verbs", "quire_workshop.verbs"],
)  # fmt: skip
def test_importing_costs_no_torch(module: str) -> None:
    slow = ("torch", "numpy", "transformers", "llguidance", "huggingface_hub", "safetensors", "jinja2")
    code = f"import sys, {module}; print([m for m in {slow} if sys.modules.get(m)])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_benchmarks_import_names_that_exist() -> None:
    """Only a run of a benchmark would find a name that was changed in the package; tests import theirs."""
    pytest.importorskip("gguf", reason="benchmarks need the packages of development")
    missing = [
        f"{path.relative_to(ROOT)}: {node.module}.{alias.name}"
        for path in sorted((ROOT / "benchmarks").rglob("*.py"))
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in {*PACKAGES, "benchmarks"}
        for alias in node.names
        if not has_name(str(node.module), alias.name)
    ]
    assert missing == []


def has_name(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    is_package = hasattr(found, "__path__")
    return hasattr(found, name) or (is_package and importlib.util.find_spec(f"{module}.{name}") is not None)


def test_no_files_import_each_other() -> None:
    """Imports inside functions and for type checking count; what `quire` itself offers is a facade."""
    targets: dict[str, set[str]] = {}
    for path in python_files():
        parts = path.relative_to(SOURCE).with_suffix("").parts
        own = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        targets[own] = {target_of(module, name) for _, module, name in imported_names(path)} - {own, "quire"}
    while leaves := {name for name, found in targets.items() if not found & targets.keys()}:
        targets = {name: found - leaves for name, found in targets.items() if name not in leaves}
    assert sorted(targets) == []
