"""Every fixed sentence of `tour`, `explain` and `view` has its Chinese one, and the table has no other ones."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.insight.chinese import TABLE
from quire_lessons.cli.tour import _PAIRS
from tests.guards.sources import SOURCE

PACKAGE = SOURCE / "quire"
LESSONS = SOURCE / "quire_lessons"
SPEAKING = [
    *sorted(LESSONS.glob("tour*.py")), LESSONS / "cli" / "tour.py", *sorted((PACKAGE / "insight").glob("view*.py")),
    *sorted((PACKAGE / "insight" / "explain").glob("*.py")),
    PACKAGE / "cli" / "explain.py",
]  # fmt: skip
QUOTED = [PACKAGE / "memory_plan.py", PACKAGE / "resolve.py", *(PACKAGE / "kernels").glob("*.py")]
"""Sentences of these appear in the pictures and reports: the table may have them."""
SENTENCE = re.compile(r"[A-Za-z]{2,}[,;:]? [a-z]{2,}")
REASONS = {" ".join(reason.split()) for _, reason in _PAIRS}
NOT_SHOWN = {
    "StepWork | None", "tuple[Picture, int]",  # types
    "products in ", "products in",  # looked for
    "forward passes",  # a plural
    "Why is the sky blue?",  # the prompt
    "quire, op by op: a plan cannot hold {}",  # of `quire show`
    "limits of memory and arithmetic", "scheduling and sampling", "kernels of {} weights and {} KV",  # progress
    "no prompt was given", "waiting for the server's next step", "{}: the last line is incomplete and was left out",
}  # fmt: skip
"""The last ones are notes and errors on stderr, which are English for all verbs."""


def literals(path: Path) -> Iterator[str]:
    """Yield the texts of a file that may be shown, f-strings with "{}": not docstrings, errors, help or patterns."""
    tree = ast.parse(path.read_text())
    left_out: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left_out.add(id(node.value))
        if isinstance(node, ast.Raise) or is_call_of(node, "option", "verb", "UsageError", "Value", "field"):
            left_out.update(map(id, ast.walk(node)))
        names = [to.id for to in getattr(node, "targets", ()) if isinstance(to, ast.Name)]
        if any(name in ("_REASONS", "STYLE") or name.endswith("EXAMPLES") for name in names):
            left_out.update(map(id, ast.walk(node)))
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in left_out or id(node) in inside:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield from texts_of("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from texts_of(node.value)


def texts_of(literal: str) -> list[str]:
    """Return a literal, of HTML the texts between its tags."""
    return re.findall(r">([^<>]+)<", literal) if re.search(r"</\w+>", literal) else [literal]


def is_call_of(node: ast.AST, *names: str) -> bool:
    name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
    return name in names


@pytest.mark.parametrize("path", SPEAKING, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_sentence_has_its_chinese_one(path: Path) -> None:
    sentences = [text for text in literals(path) if SENTENCE.search(text.replace("{}", "#"))]
    assert [text for text in sentences if not is_known(text) and text not in NOT_SHOWN] == []


def is_known(text: str) -> bool:
    """Return whether the table has a sentence, alone or with the number before it."""
    return text in TABLE or f"# {text}" in TABLE or text.endswith(".py")


def test_every_reason_of_the_tour_has_its_chinese_one() -> None:
    assert REASONS - TABLE.keys() == set()


def test_table_has_only_sentences_that_are_said() -> None:
    said = REASONS | {text for path in (*SPEAKING, *QUOTED) for text in literals(path)}
    words = {word for text in said for word in re.findall(r"[A-Za-z]+", text)}
    assert [key for key in TABLE if key not in said and key.removeprefix("# ") not in said | words] == []


def test_parts_of_a_sentence_are_those_of_its_chinese_one() -> None:
    for key, chinese in TABLE.items():
        count = key.count("{}") or key.count("#")
        assert chinese.replace("#", "{}").format(*(f"<{at}>" for at in range(count))) != "", key
        shown = {int(number) for number in re.findall(r"{(\d+)}", chinese)} or set(
            range(chinese.replace("#", "{}").count("{}"))
        )
        assert shown <= set(range(count)), key
