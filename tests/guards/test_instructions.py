"""An instruction says by traits what it is (`kernels/instruction.py`): only its own file knows its class."""

import ast

import quire.insight.explain.phases
import quire.runtime.plan.stages
from quire.kernels.instruction import Instruction
from quire.kernels.registry import import_operations
from tests.guards.sources import SOURCE, python_files


def classes(base: type[Instruction] = Instruction) -> dict[str, str]:
    """Return the package's instructions and the modules that declare them."""
    import_operations()
    assert quire.runtime.plan.stages
    assert quire.insight.explain.phases
    found = {each.__name__: each.__module__ for each in base.__subclasses__() if each.__module__.startswith("quire")}
    return found | {name: module for each in base.__subclasses__() for name, module in classes(each).items()}


def questions(text: str, names: set[str]) -> list[tuple[int, str]]:
    """Lines that use a class of `names` otherwise than to make an object, to annotate one, or as a base."""
    if not any(name in text for name in names):
        return []
    tree, allowed = list(ast.walk(ast.parse(text))), set[int]()
    for node in tree:
        if isinstance(node, ast.Call):
            allowed.add(id(node.func))
        elif isinstance(node, ast.ClassDef):
            allowed.update(map(id, node.bases))
        for annotation in (getattr(node, field, None) for field in ("annotation", "returns")):
            if isinstance(annotation, ast.AST):
                allowed.update(map(id, ast.walk(annotation)))
    return [
        (node.lineno, node.id)
        for node in tree
        if isinstance(node, ast.Name) and node.id in names and id(node) not in allowed
    ]


def test_nothing_asks_for_the_class_of_an_instruction() -> None:
    known = classes()
    assert {"Gemm", "ExpertUp", "Attend", "AllGather", "Receive", "MergeBest"} <= set(known)
    wrong = []
    for path in python_files():
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        names = {name for name, where in known.items() if where != module}
        found = questions(path.read_text(encoding="utf-8"), names)
        wrong += [f"{path.relative_to(SOURCE)}:{line}: {name}" for line, name in found]
    assert wrong == []


def test_questions_are_found() -> None:
    text = "def f(x: Gemm) -> Gemm:\n    y = Gemm(1)\n    return isinstance(x, A | Gemm)"
    assert questions(text, {"Gemm"}) == [(3, "Gemm")]
    text = "KINDS = (Gemm, A)\nmatch x:\n    case Gemm():\n        type(x) is Gemm"
    assert {line for line, _ in questions(text, {"Gemm"})} == {1, 3, 4}
