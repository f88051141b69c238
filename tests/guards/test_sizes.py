"""The size limits of CONTRIBUTING.md: a reader can hold a file, a function and the choke points in the head."""

import ast
from pathlib import Path

from tests.guards.sources import ROOT, SOURCE, nodes, python_files

PACKAGE = SOURCE / "quire"
MAX_FILE_LINES = 450
MAX_MODEL_LINES = 200
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 150
CHOKE_POINTS = {
    "scheduler/scheduler.py": "schedule",
    "engine/llm_engine.py": "step",
    "runtime/model_runner.py": "run",
}
MAX_CHOKE_POINT_LINES = 60


def functions(path: Path) -> list[tuple[str, int]]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(n.name, n.end_lineno - n.lineno + 1) for n in nodes(path) if isinstance(n, kinds)]


def test_files_are_short() -> None:
    long = []
    for path in python_files():
        limit = MAX_MODEL_LINES if path.parent.name == "models" and path.name != "registry.py" else MAX_FILE_LINES
        lines = len(path.read_text().splitlines())
        if lines > limit:
            long.append(f"{path.relative_to(ROOT)}: {lines} lines (limit {limit})")
    assert long == []


def test_functions_are_short() -> None:
    long = []
    for path in python_files():
        limit = MAX_KERNEL_LINES if "kernels" in path.parts else MAX_FUNCTION_LINES
        long += [f"{path.relative_to(ROOT)}: {name} {n}" for name, n in functions(path) if n > limit]
    assert long == []


def test_choke_points_stay_small() -> None:
    """The next feature must fit in."""
    for file, name in CHOKE_POINTS.items():
        length = dict(functions(PACKAGE / file))[name]
        assert length <= MAX_CHOKE_POINT_LINES, f"{file}: {name} has {length} lines; refactor first"
